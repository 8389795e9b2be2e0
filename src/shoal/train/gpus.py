"""The GPUs a process may use: from CUDA where torch has it, else from their device files.

Sandbox hosts have device files and an nvidia-smi, and no CUDA. What Slurm does to a process is the same there, so the
proof of the binding runs on them too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Gpu:
    """One GPU, as every process on the host would name it."""

    uuid: str
    """Empty where nothing tells it."""
    minor: int | None
    """The number of its device file /dev/nvidiaN, which is also Slurm's number for it."""


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs this process may use, in the order of their index in it."""
    return cuda_gpus() if torch.cuda.is_available() else device_file_gpus(environ)


def cuda_gpus() -> tuple[Gpu, ...]:
    minors = uuid_minors()
    found = []
    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        found.append(Gpu(uuid, minors.get(uuid)))
    return tuple(found)


def device_file_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[Gpu, ...]:
    """What CUDA would see: it numbers the device files it can open, then picks those of CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" not in environ and "SLURM_GPUS_ON_NODE" not in environ:
        return ()  # device files are no sign that this process is to use them
    usable = usable_minors(devices)
    every = ",".join(str(index) for index in range(len(usable)))
    wanted = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", every).split(",") if part.strip()]
    uuids = smi_uuids() if usable and wanted else {}
    by_uuid = {uuid: minor for minor, uuid in uuids.items()}
    found = []
    for part in wanted:
        if part in by_uuid:
            found.append(Gpu(part, by_uuid[part]))
        elif part.isdigit() and int(part) < len(usable):
            minor = usable[int(part)]
            found.append(Gpu(uuids.get(minor, ""), minor))
        else:
            break  # CUDA stops at the first it does not know
    return tuple(found)


def usable_minors(devices: Path) -> list[int]:
    """The numbers of the device files that this process may open: Slurm's cgroup denies the others."""
    minors = []
    for path in devices.glob("nvidia*"):
        match = re.fullmatch(r"nvidia(\d+)", path.name)
        if match is None:
            continue
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
        except OSError:
            continue
        minors.append(int(match[1]))
    return sorted(minors)


def smi_uuids() -> dict[int, str]:
    """The UUID behind each device file, from nvidia-smi. Empty where it is not there or says nothing."""
    program = shutil.which("nvidia-smi")
    if not program:
        return {}
    query = [program, "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    minors = uuid_minors()
    rows = (line.split(", ") for line in text.splitlines() if ", " in line)
    return {minors.get(uuid.strip(), int(index)): uuid.strip() for index, uuid in rows}


def uuid_minors(table: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, int]:
    """The device file's number of each GPU by UUID: nvidia-smi and CUDA count in another order."""
    minors = {}
    for path in table.glob("*/information"):
        pairs = (line.partition(":") for line in path.read_text().splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "GPU UUID" in fields and fields.get("Device Minor", "").isdigit():
            minors[fields["GPU UUID"]] = int(fields["Device Minor"])
    return minors
