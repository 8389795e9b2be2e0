"""A simulated NVML: the driver's library as a file of values, for faults of GPUs that no test machine has."""

from __future__ import annotations

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
}


def build(folder: Path) -> Path:
    """Compile the library. A host finds it under this name."""
    library = folder / "libnvidia-ml.so.1"
    source = Path(__file__).parent / "nvml.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", library, source], check=True, timeout=120)
    return library


def answers(*gpus: dict[str, object], **driver: object) -> str:
    """The file that the library reads: GPUs that are well, with these values changed. None leaves a value out."""
    lines = [f"count {len(gpus)}", *(f"{name} {value}" for name, value in driver.items())]
    for index, changes in enumerate(gpus):
        well = {"uuid": f"GPU-{index}", "bus": 65 + index, **WELL, "minor": index, "recovery": 0, "throttle": 0}
        lines += [f"{index}.{name} {value}" for name, value in {**well, **changes}.items() if value is not None]
    return "\n".join(lines) + "\n"
