"""On a machine with an NVIDIA GPU: what the health program reads of it, its power, and the acceptance check.

    PYTHONPATH=src python3 bench/doctor.d/gpu.py > bench/results/doctor-gpu.txt

Needs PyTorch with CUDA for the load. Nothing is simulated.
"""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median

from shoal.remote.node_health.gpu_checks import GPU_CHECKS, Gpu, Nvml, gpus
from shoal.remote.node_health.gpu_test import TEST_CHECKS, run_test
from shoal.remote.node_health.leftovers import _is_idle
from shoal.remote.node_health.node import Baseline, Node

LOADS = {
    "no process": "",
    "held: a process waits": "import time, torch; x = torch.zeros(1 << 30, device='cuda'); torch.cuda.synchronize(); "
    "print(flush=True); time.sleep(600)",
    "waiting kernel: 100 % utilization": "import torch; torch.cuda.init(); print(flush=True)\n"
    "while True: torch.cuda._sleep(10**9); torch.cuda.synchronize()",
    "busy: bf16 matmul": "import torch; x = torch.randn(8192, 8192, device='cuda', dtype=torch.bfloat16); "
    "y = torch.empty_like(x); print(flush=True)\n"
    "while True:\n for _ in range(50): torch.matmul(x, x, out=y)\n torch.cuda.synchronize()",
}
SETTLE_S, SAMPLES = 8.0, 20


def main() -> None:
    for line in (*describe(), "", *fields(), "", *findings(), "", *powers(), "", *acceptance()):
        print(line, flush=True)


def describe() -> Iterator[str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]
    try:
        name = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip().replace("\n", "; ")
    except (OSError, subprocess.CalledProcessError):
        name = "nvidia-smi does not run"
    yield f"{time.strftime('%Y-%m-%d')}: {name}; {platform.machine()}, Python {platform.python_version()}"


def fields() -> Iterator[str]:
    """Every value of NVML that a check reads. `-` is one that this GPU or driver does not have."""
    nvml = Nvml()
    yield f"NVML: nvmlInit_v2 {nvml.status}, GPUs {nvml.number('nvmlDeviceGetCount_v2')}"
    for gpu in nvml.gpus():
        yield f"{gpu}: uuid {gpu.uuid}, minor {gpu.minor}"
        values = {
            "recovery action (field 230)": gpu.recovery_action,
            "uncorrected ECC errors": gpu.number("nvmlDeviceGetTotalEccErrors", 1, 0, kind=ctypes.c_ulonglong),
            "rows to remap, failed": gpu.remapping,
            "retired pages pending": gpu.number("nvmlDeviceGetRetiredPagesPendingStatus"),
            "NVLinks up": gpu.links,
            "slowdown bits": gpu.number("nvmlDeviceGetCurrentClocksThrottleReasons", kind=ctypes.c_ulonglong),
            "PCIe lanes": gpu.number("nvmlDeviceGetCurrPcieLinkWidth"),
            "PCIe lanes at most": gpu.number("nvmlDeviceGetMaxPcieLinkWidth"),
            "persistence mode": gpu.number("nvmlDeviceGetPersistenceMode"),
            "power, W": gpu.watts,
            "power limit, mW": gpu.number("nvmlDeviceGetEnforcedPowerLimit"),
            "processes": gpu.pids,
        }
        for name, value in values.items():
            yield f"  {name:<32}{'-' if value is None else value}"


def findings() -> Iterator[str]:
    node = Node(Baseline({}), {}, {}, time.time())
    for name, check in GPU_CHECKS.items():
        start = time.perf_counter()
        evidence = list(check(node))
        yield f"{name:<24}{(time.perf_counter() - start) * 1000:8.1f} ms  {'; '.join(evidence) or 'nothing is wrong'}"


def powers() -> Iterator[str]:
    """Power and the verdict of the check of idle GPUs, for each load."""
    node = Node(Baseline({}), {}, {}, time.time())
    yield f"{'load':<36}{'watts':>8}{'utilization':>13}{'processes':>11}  the check says"
    for load, program in LOADS.items():
        process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) if program else None
        try:
            if process is not None and process.stdout is not None:
                process.stdout.readline()
            time.sleep(SETTLE_S)
            gpu = gpus(node)[0]
            watts = median(sample_watts(gpu))
            verdict = "idle" if _is_idle(node, gpu) else "busy"
            yield f"{load:<36}{watts:>8.0f}{utilization(gpu):>13}{len(gpu.pids):>11}  {verdict}"
        finally:
            if process is not None:
                process.kill()
                process.wait()
                time.sleep(2)


def sample_watts(gpu: Gpu) -> Iterator[float]:
    for _ in range(SAMPLES):
        yield gpu.watts or 0.0
        time.sleep(0.1)


def utilization(gpu: Gpu) -> str:
    rates = (ctypes.c_uint * 2)()
    status = gpu.nvml.call("nvmlDeviceGetUtilizationRates", gpu.handle, ctypes.byref(rates))
    return f"{rates[0]} %" if status == 0 else "-"


def acceptance() -> Iterator[str]:
    """The acceptance check, in a process of its own as on a node."""
    node = Node(Baseline({}), {}, {}, time.time())
    for gpu in gpus(node):
        start = time.perf_counter()
        result = run_test(gpu.uuid)
        yield f"acceptance check of {gpu}: {time.perf_counter() - start:.1f} s"
        for name, value in result.items():
            yield f"  {name:<32}{value}"
    for name, check in TEST_CHECKS.items():
        yield f"{name:<24}{'; '.join(check(node)) or 'nothing is wrong'}"


if __name__ == "__main__":
    main()
