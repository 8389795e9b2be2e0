"""Metrics of a node: CPU, memory, network and GPUs, under the names that MLflow's system metrics page expects.

Read from /proc and `nvidia-smi`, by the first rank of each node, in a thread of its own.
"""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
import subprocess
import threading
from dataclasses import dataclass
from pathlib import Path

from shoal.train.tracking.spool import Spool, now_ms

GPU_QUERY = (
    "--query-gpu=index,utilization.gpu,memory.used,memory.total,power.draw",
    "--format=csv,noheader,nounits",
)

log = logging.getLogger("shoal.train")


@dataclass(frozen=True)
class KernelCounters:
    """The kernel's counters at one moment."""

    busy: int
    total: int
    received: int
    sent: int


class SystemMetrics:
    """Records the node's metrics every few seconds until stopped."""

    def __init__(self, spool: Spool, node: str, every: float, first_step: int, proc: Path = Path("/proc")) -> None:
        self._spool, self._node, self._every, self._proc = spool, node, every, proc
        self._step = first_step
        self._smi = shutil.which("nvidia-smi")
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="shoal-system-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(1.0)

    def _loop(self) -> None:
        if not self._smi:
            self._tag_gpus("none: no nvidia-smi here")
        before = first = read_counters(self._proc)
        while not self._stopping.wait(self._every):
            now = read_counters(self._proc)
            values = {**rates(before, now, first), **memory(_text(self._proc / "meminfo")), **self._gpus()}
            before = now
            metrics = {f"system/{self._node}/{key}": value for key, value in values.items()}
            if metrics:
                self._spool.append({"t": now_ms(), "step": self._step, "metrics": metrics})
            self._step += 1

    def _tag_gpus(self, reason: str) -> None:
        """Say why there are no GPU metrics: they would otherwise look like those of idle GPUs."""
        self._spool.append({"t": now_ms(), "tags": {f"shoal.gpu_metrics.{self._node}": reason}})

    def _gpus(self) -> dict[str, float]:
        if not self._smi:
            return {}
        try:
            output = subprocess.check_output(
                [self._smi, *GPU_QUERY], text=True, timeout=10, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL
            )
        except (OSError, subprocess.SubprocessError) as error:
            log.warning("tracking: no GPU metrics of %s any more: %s", self._node, error)
            self._tag_gpus("nvidia-smi failed")
            self._smi = None
            return {}
        return gpus(output)


def read_counters(proc: Path) -> KernelCounters:
    """Processor time and network bytes so far. Zeros where this is no Linux."""
    times = [int(word) for word in _text(proc / "stat").partition("\n")[0].split()[1:9]]
    idle = sum(times[3:5])  # idle and waiting for a disk
    received = sent = 0
    for line in _text(proc / "net/dev").splitlines():
        name, colon, counters = line.partition(":")
        fields = counters.split()
        if colon and name.strip() != "lo" and len(fields) >= 9:
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return KernelCounters(sum(times) - idle, sum(times), received, sent)


def rates(before: KernelCounters, now: KernelCounters, first: KernelCounters) -> dict[str, float]:
    """How busy the processors were since the last reading, and what went over the network since the first."""
    if now.total <= before.total:
        return {}
    return {
        "cpu_utilization_percentage": round(100 * (now.busy - before.busy) / (now.total - before.total), 2),
        "network_receive_megabytes": round((now.received - first.received) / 1e6, 3),
        "network_transmit_megabytes": round((now.sent - first.sent) / 1e6, 3),
    }


def memory(meminfo: str) -> dict[str, float]:
    """Memory that processes hold, from /proc/meminfo."""
    kilobytes = {name: int(number) for name, number in re.findall(r"^(\w+): +(\d+)", meminfo, re.MULTILINE)}
    if "MemTotal" not in kilobytes or "MemAvailable" not in kilobytes:
        return {}
    total = kilobytes["MemTotal"]
    used = total - kilobytes["MemAvailable"]
    return {
        "system_memory_usage_megabytes": round(used * 1024 / 1e6, 1),
        "system_memory_usage_percentage": round(100 * used / total, 2),
    }


def gpus(csv: str) -> dict[str, float]:
    """The answer of nvidia-smi. What a GPU does not tell (`[N/A]`) is left out."""
    values: dict[str, float] = {}
    for line in csv.splitlines():
        fields = [word.strip() for word in line.split(",")]
        if len(fields) != 5:
            continue
        numbers: dict[str, float] = {}
        for name, word in zip(("load", "used", "total", "power"), fields[1:], strict=True):
            with contextlib.suppress(ValueError):
                numbers[name] = float(word)
        gpu = f"gpu_{fields[0]}"
        if "load" in numbers:
            values[f"{gpu}_utilization_percentage"] = numbers["load"]
        if "used" in numbers:
            values[f"{gpu}_memory_usage_megabytes"] = round(numbers["used"] * 1024 * 1024 / 1e6, 1)
        if numbers.get("total") and "used" in numbers:
            values[f"{gpu}_memory_usage_percentage"] = round(100 * numbers["used"] / numbers["total"], 2)
        if "power" in numbers:
            values[f"{gpu}_power_usage_watts"] = numbers["power"]
    return values


def _text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
