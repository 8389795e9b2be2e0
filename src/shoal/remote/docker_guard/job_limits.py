"""The limits of a job: the cgroup that its containers are in, and its GPUs."""

from __future__ import annotations

import glob
import os
import re
import subprocess
from contextlib import suppress

from .caller import SLURM_TIMEOUT_S, Caller, Rejection

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, Sequence

ROOT = "/sys/fs/cgroup"
NVIDIA = "/proc/driver/nvidia/gpus"
COPIES = "/shoal-docker"
"""Groups with a copy of a job's limits."""
_COPIED = {"cpuset": ("cpuset.cpus", "cpuset.mems"), "memory": ("memory.limit_in_bytes",)}


def cgroup_parent(caller: Caller, root: str = ROOT) -> str:
    """The job's own group. With cgroup v1 Docker cannot use it where it denies devices: a copy of its limits then."""
    devices = f"{root}/devices{caller.cgroup}/devices.list"
    if not os.path.exists(devices) or _read(devices).startswith("a "):
        return caller.cgroup
    copy = f"{COPIES}/job_{caller.job}"
    for controller, names in _COPIED.items():
        source = f"{root}/{controller}{caller.cgroup}"
        if not os.path.isdir(source):
            continue
        for group, origin in ((COPIES, f"{root}/{controller}"), (copy, source)):
            os.makedirs(f"{root}/{controller}{group}", exist_ok=True)
            for name in names:
                if controller == "cpuset" or group == copy:
                    _write(f"{root}/{controller}{group}/{name}", _read(f"{origin}/{name}"))
    return copy


def remove_groups(job: str, root: str = ROOT) -> None:
    """The copies, and Slurm's own groups of a job that has ended: it cannot remove those that containers were in."""
    for group in glob.glob(f"{root}/*{COPIES}/job_{job}"):
        os.rmdir(group)
    for pattern in (f"*/slurm*/uid_*/job_{job}", f"system.slice/*slurmstepd.scope/job_{job}"):
        for group in glob.glob(f"{root}/{pattern}"):
            with suppress(OSError):  # Slurm is at it
                os.rmdir(group)


def job_gpus(job: str, config: Any, driver: str = NVIDIA) -> Sequence[str]:
    """The ids of the job's GPUs on this node, as Slurm has them; what the job itself says may be wrong."""
    command = ["scontrol", "show", "job", "-d", "-o", job]
    text = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S).stdout
    here = []
    for nodes, gres in re.findall(r" Nodes=(\S+) CPU_IDs=\S* Mem=\S* GRES=(\S*)", text):
        names = ["scontrol", "show", "hostnames", nodes]
        listed = subprocess.run(names, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S)
        if config["node"] in listed.stdout.split():
            here.append(gres)
    if len(here) > 1:  # Slurm names a node once
        raise Rejection("the job's name or comment looks like a list of GPUs: choose another")
    minors = [re.sub(r"\D", "", config["gpus"][index]) for gres in here for index in gpu_indexes(gres)]
    uuids = gpu_uuids(driver)
    return [uuids.get(minor, minor) for minor in minors]


def gpu_uuids(driver: str = NVIDIA) -> dict[str, str]:
    """Ids of GPUs by the N of /dev/nvidiaN. A bare number is an index to NVIDIA's tools, whose order may differ."""
    uuids = {}
    for path in glob.glob(f"{driver}/*/information"):
        text = _read(path)
        minor = re.search(r"^Device Minor:\s*(\d+)\s*$", text, re.MULTILINE)
        uuid = re.search(r"^GPU UUID:\s*(GPU-[0-9a-f-]+)\s*$", text, re.MULTILINE)
        if minor and uuid:
            uuids[minor[1]] = uuid[1]
    return uuids


def gpu_indexes(gres: str) -> list[int]:
    """The indexes in `gpu:h100:3(IDX:0,2-3)`."""
    indexes: list[int] = []
    for words in re.findall(r"gpu:[^()]*\(IDX:([\d,-]+)\)", gres):
        for word in words.split(","):
            first, _, last = word.partition("-")
            indexes += range(int(first), int(last or first) + 1)
    return indexes


def _read(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.read()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
