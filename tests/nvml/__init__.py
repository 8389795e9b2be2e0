"""Simulated libraries for faults that no test machine has: NVML and libcuda of a GPU's driver.

What they answer is in a file of values.
"""

import subprocess
from pathlib import Path

WELL = {
    "minor": 0,
    "power": 60000,
    "limit": 700000,
    "width": 16,
    "links": 18,
    "ecc": 0,
    "remap_pending": 0,
    "remap_failed": 0,
    "persistence": 1,
    "link_errors": 7,
}


def build(folder: Path) -> Path:
    """Compile the library. A host finds it under this name."""
    return _compile("nvml.c", folder / "libnvidia-ml.so.1")


def build_cuda(folder: Path) -> Path:
    """The same for libcuda, which computes on the host."""
    return _compile("cuda.c", folder / "libcuda.so.1")


def _compile(source: str, library: Path) -> Path:
    line = ["cc", "-shared", "-fPIC", "-O2", "-o", library, Path(__file__).parent / source]
    subprocess.run(line, check=True, timeout=120)
    return library


def answers(*gpus: dict[str, object], **driver: object) -> str:
    """The file that the library reads: GPUs that are well, with these values changed. None leaves a value out."""
    lines = [f"count {len(gpus)}", *(f"{name} {value}" for name, value in driver.items())]
    for index, changes in enumerate(gpus):
        well = {"uuid": f"GPU-{index}", "bus": 65 + index, **WELL, "minor": index, "recovery": 0, "throttle": 0}
        lines += [f"{index}.{name} {value}" for name, value in {**well, **changes}.items() if value is not None]
    return "\n".join(lines) + "\n"
