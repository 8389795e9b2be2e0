"""What the checks share: the node's baseline, what the last run remembered, its processes and its kernel's log."""

from __future__ import annotations

import errno
import os
import re
import time
from typing import Any, List

CONFIG = "/etc/shoal/health.json"
STATE = "/var/lib/shoal/health"
RESULT, BASELINE, DRAIN, ORDERS = "result.json", "baseline.json", "drain", "orders"
INTERVAL_S = 300
"""From run to run."""
WARN_ONLY_S = 24 * 3600
"""So long a node is not drained after its first run: its first good day is its baseline."""
PREFIX = "shoal: health: "
"""How the reason of a drain begins that the health program asked for."""
CHECK_NAMES = (
    *("disk-full", "inodes-full", "read-only", "share-hangs", "processes-stuck", "disk-errors", "memory-errors"),
    *("link-slow", "clock-source", "cpu-governor", "sensors", "gpu-test", "gpu-slow", "gpu-driver"),
    "driver-reboot",
    *("gpu-driver-mismatch", "gpu-lost", "gpu-recovery", "gpu-xid", "gpu-xid-past", "gpu-ecc", "gpu-remap-pending"),
    *("gpu-remap-failed", "gpu-nvlink", "gpu-nvlink-errors", "gpu-clock", "gpu-pcie", "gpu-persistence"),
    *("fabric-manager", "step-left", "gpu-process-left", "memory-held", "gpu-idle", "training-hung"),
)
"""Every check, by the name of its finding."""
DRAINING = (
    *("disk-full", "inodes-full", "read-only", "share-hangs", "memory-errors", "gpu-lost", "gpu-recovery"),
    *("gpu-xid", "gpu-ecc", "gpu-remap-failed", "gpu-driver-mismatch", "gpu-test", "fabric-manager", "driver-reboot"),
)
"""Checks that take a node out of service with `health: drain`; the others only warn."""
REQUESTED = ("driver-reboot",)
"""Those that the file asked for: they take a node out of service in every mode, and on its first day."""
CONFIRMED = ("disk-full", "inodes-full", "share-hangs", "fabric-manager", "gpu-test")
"""Those that must fail in two runs: a server that restarts is back by then, and a busy host is not."""
Evidence = List[str]
KERNEL_LOG = "/dev/kmsg"
MAX_LOG_READS = 100_000


class Baseline:
    """The best that the node has shown. Each node learns its own, so that every model of GPU or network is covered."""

    def __init__(self, values: dict[str, Any]) -> None:
        self.values = values

    def best(self, key: str, value: float) -> float:
        """The highest value so far, this one included."""
        self.values[key] = max(value, self.values.get(key, value))
        return float(self.values[key])

    def lowest(self, key: str, value: float) -> float:
        self.values[key] = min(value, self.values.get(key, value))
        return float(self.values[key])

    def first(self, key: str, value: str) -> str:
        """The value that was seen first."""
        return str(self.values.setdefault(key, value))

    def all_of(self, key: str, names: list[str]) -> list[str]:
        """All names that were ever seen, these included."""
        self.values[key] = sorted({*self.values.get(key, ()), *names})
        return list(self.values[key])


class Node:
    """One run of the program on this node."""

    def __init__(self, baseline: Baseline, memory: dict[str, Any], config: dict[str, Any], now: float) -> None:
        self.baseline, self.memory, self.config, self.now = baseline, memory, config, now
        self.orders: list[str] = []
        """What the hook is to ask of Slurm: `notify JOB TEXT`, `cancel JOB`, `hung JOB UID`, `reboot BOOT`."""
        self.cache: dict[str, Any] = {}
        """What several checks read, read once."""
        self._processes: dict[int, Process] | None = None
        self._log: list[tuple[float, str]] | None = None

    def remember(self, key: str, value: Any) -> Any:
        """Keep a value for the next run, and return that of the last one."""
        last = self.memory.get(key)
        self.memory[key] = value
        return last

    @property
    def processes(self) -> dict[int, Process]:
        """The processes of the node, without the kernel's threads."""
        if self._processes is None:
            pids = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
            found = ((pid, Process.read(pid)) for pid in pids)
            self._processes = {pid: process for pid, process in found if process is not None and process.parent != 2}
        return self._processes

    @property
    def is_idle(self) -> bool:
        """No job runs here. Told by Slurm's own processes: the program asks no daemon."""
        return not any(process.name == "slurmstepd" for process in self.processes.values())

    def kernel_log(self, max_age_s: float) -> list[str]:
        """The kernel's messages that are not older."""
        if self._log is None:
            self._log = read_kernel_log()
        return [text for age, text in self._log if age <= max_age_s]


class Process:
    """A process, as /proc shows it."""

    def __init__(self, pid: int, name: str, state: str, parent: int, start: str, pages: int) -> None:
        self.pid, self.name, self.state, self.parent, self.start, self.pages = pid, name, state, parent, start, pages

    @classmethod
    def read(cls, pid: int) -> Process | None:
        head, _, tail = read_text(f"/proc/{pid}/stat").rpartition(")")
        fields = tail.split()
        if len(fields) < 22:
            return None  # it has ended
        return cls(pid, head.partition("(")[2], fields[0], int(fields[1]), fields[19], int(fields[21]))

    @property
    def user(self) -> str:
        import pwd

        try:
            uid = os.stat(f"/proc/{self.pid}").st_uid
            return pwd.getpwuid(uid).pw_name
        except (OSError, KeyError):
            return "?"

    @property
    def environment(self) -> dict[str, str]:
        pairs = (text.partition("=") for text in read_text(f"/proc/{self.pid}/environ").split("\0"))
        return {name: value for name, _, value in pairs if name}

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}, user {self.user})"


def read_kernel_log(path: str = "") -> list[tuple[float, str]]:
    """Every message in the kernel's buffer with its age in seconds; none where a container may not read it."""
    messages: list[tuple[float, str]] = []
    try:
        log = os.open(path or KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return messages
    text = b""
    try:
        for _ in range(MAX_LOG_READS):
            try:
                record = os.read(log, 65536)
            except OSError as error:
                if error.errno == errno.EPIPE:  # the kernel has written over this message
                    continue
                break
            if not record:
                break
            text += record
    finally:
        os.close(log)
    now = time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()
    for line in text.decode("utf-8", "replace").splitlines():
        match = re.match(r"\d+,\d+,(\d+),[^;]*;(.*)", line)
        if match:
            messages.append((max(0.0, now - int(match[1]) / 1e6), match[2]))
    return messages


def read_text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def read_number(path: str) -> int | None:
    text = read_text(path).strip()
    return int(text) if re.fullmatch(r"-?\d+", text) else None
