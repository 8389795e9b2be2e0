"""Which rank has which GPU, proved before the first step.

A rank takes the only GPU it sees, or the one whose index is its local rank; CUDA_VISIBLE_DEVICES is never changed.
Then the ranks compare the GPUs' UUIDs: two ranks on one GPU, and a rank on a GPU of another job, are errors.

Without CUDA the GPUs are found by their device files: sandbox hosts have those and an nvidia-smi.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from shoal.train.env import Env
from shoal.train.errors import BindingError
from shoal.train.launcher_variables import in_slurm_step

VERDICT_READ_TIMEOUT_S = 10.0

NO_GPU_NOTE = "No rank has a GPU: there is no binding to prove."


@dataclass(frozen=True)
class RankGpu:
    """One rank and its GPU."""

    rank: int
    node: str
    local_rank: int
    index: int
    """The GPU's index in this process: what torch.device("cuda", index) takes."""
    visible: int
    """The number of GPUs that this process sees."""
    uuid: str = ""
    minor: int | None = None
    allocated: Sequence[int] = ()
    """The device numbers that Slurm allocated on this node; empty if unknown."""
    granted: int = 0
    """The number of GPUs that Slurm allocated on this node; 0 if unknown."""

    @property
    def gpu(self) -> str:
        """Identifies the GPU: the same for all processes that use it."""
        if self.uuid:
            return self.uuid
        return f"{self.node}:/dev/nvidia{self.minor}" if self.minor is not None else ""

    @property
    def label(self) -> str:
        device = f" (/dev/nvidia{self.minor})" if self.uuid and self.minor is not None else ""
        return self.gpu + device or "none"


@dataclass(frozen=True)
class Binding:
    """All ranks and their GPUs; str() is the table."""

    ranks: tuple[RankGpu, ...]

    @property
    def proved(self) -> bool:
        """False for a job without GPUs: there is nothing to prove."""
        return any(entry.gpu for entry in self.ranks)

    def __str__(self) -> str:
        rows = [("rank", "node", "local rank", "GPU")]
        rows += [(str(entry.rank), entry.node, str(entry.local_rank), entry.label) for entry in self.ranks]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines if self.proved else [*lines, NO_GPU_NOTE])


def prove_binding(env: Env, store: Any, environ: Mapping[str, str] = os.environ, timeout: float = 60.0) -> Binding:
    """Compare the GPUs of all ranks over the job's store. Every rank gets the same table, or the same BindingError."""
    store.set(f"binding/{env.rank}", json.dumps(asdict(choose_gpu(env, visible_gpus(environ), environ))))
    if env.rank == 0:
        keys = [f"binding/{rank}" for rank in range(env.world_size)]
        _wait_for_keys(store, keys, timeout)
        rows = [json.loads(store.get(key)) for key in keys]
        error = check_binding([RankGpu(**row) for row in rows], env)
        verdict = {"error": [error.what, error.found, error.fix] if error else None, "ranks": rows}
        store.set("binding/verdict", json.dumps(verdict))
    _wait_for_keys(store, ["binding/verdict"], 2 * timeout)
    verdict = json.loads(store.get("binding/verdict"))
    readers = store.add("binding/read", 1)
    if verdict["error"]:
        end = time.monotonic() + VERDICT_READ_TIMEOUT_S
        while env.rank == 0 and readers < env.world_size and time.monotonic() < end:
            time.sleep(0.01)  # the store ends with rank 0: the others must read the error first
            readers = store.add("binding/read", 0)
        what, evidence, fix = verdict["error"]
        raise BindingError(what, found=evidence, fix=fix)
    return Binding(tuple(RankGpu(**row) for row in verdict["ranks"]))


def _wait_for_keys(store: Any, keys: Sequence[str], timeout: float) -> None:
    try:
        store.wait(list(keys), timedelta(seconds=timeout))
    except RuntimeError:
        if "binding/verdict" in keys:
            raise BindingError("rank 0 did not compare the GPUs of the ranks", fix="read rank 0's log") from None
        missing = [key.rpartition("/")[2] for key in keys if not store.check([key])]
        raise BindingError(
            f"{len(missing)} of {len(keys)} ranks did not report their GPU within {timeout:g} s",
            found=f"nothing from rank {', '.join(missing[:8])}",
            fix="read the logs of these ranks; nvidia-smi on their nodes may hang",
        ) from None


def choose_gpu(env: Env, gpus: Sequence[GpuDevice], environ: Mapping[str, str]) -> RankGpu:
    """The GPU of this rank: the only one it sees, else the one whose index is its local rank."""
    index = 0 if len(gpus) == 1 else env.local_rank
    gpu = gpus[index] if index < len(gpus) else GpuDevice("", None)
    # Within a step the job's list is that of the batch host.
    allocated = device_numbers(environ.get("SLURM_STEP_GPUS" if in_slurm_step(environ) else "SLURM_JOB_GPUS", ""))
    granted = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    return RankGpu(env.rank, env.node, env.local_rank, index, len(gpus), gpu.uuid, gpu.minor, allocated, granted)


def device_numbers(text: str) -> tuple[int, ...]:
    """SLURM_STEP_GPUS as numbers: `0,2-3` is 0, 2, 3. Empty for other text."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            return ()
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(numbers)


def check_binding(ranks: Sequence[RankGpu], env: Env) -> BindingError | None:
    """The error in this layout; None if it is correct."""
    if not any(entry.visible for entry in ranks):
        return None
    flags = suggest_flags(env, max(entry.local_rank for entry in ranks) + 1)

    def error(what: str, evidence: str = "", fix: str = "") -> BindingError:
        return BindingError(what, found=evidence + str(Binding(tuple(ranks))), fix=fix + flags)

    for entry in ranks:
        if not entry.gpu:
            sees = f"sees {entry.visible or 'no'} GPU{'s' * (entry.visible > 1)}"
            place = f"local rank {entry.local_rank} on {entry.node}"
            return error(f"rank {entry.rank} has no GPU: it is {place} and {sees}")
    owners: dict[str, RankGpu] = {}
    for entry in ranks:
        owner = owners.setdefault(entry.gpu, entry)
        if owner is not entry:
            return error(f"ranks {owner.rank} and {entry.rank} are on the same GPU of {entry.node}: {entry.label}")
    for entry in ranks:
        if entry.allocated and entry.minor is not None and entry.minor not in entry.allocated:
            allocated = ", ".join(f"/dev/nvidia{number}" for number in entry.allocated)
            device = f"/dev/nvidia{entry.minor} of {entry.node}"
            return error(
                f"rank {entry.rank} is on {device}, which Slurm did not allocate to this job",
                f"Slurm allocated {allocated}\n",
                "remove the line that sets CUDA_VISIBLE_DEVICES: Slurm sets it.\n",
            )
        if not entry.allocated and 0 < entry.granted < entry.visible:
            allocated = f"Slurm allocated {entry.granted}, without naming them"
            return error(
                f"rank {entry.rank} sees {entry.visible} GPUs on {entry.node}, and {allocated}",
                f"SLURM_GPUS_ON_NODE={entry.granted}, no SLURM_STEP_GPUS and no CUDA_VISIBLE_DEVICES\n",
                "remove --gpu-bind=none: Slurm 22.05 then leaves CUDA_VISIBLE_DEVICES out.\n",
            )
    return None


def suggest_flags(env: Env, ranks: int) -> str:
    """The sbatch flags that give each of this many ranks per node its own GPU."""
    if env.launcher in ("torchrun", "spawn"):
        start = f"torchrun --nproc-per-node={ranks}" if env.launcher == "torchrun" else f"spawn(nprocs={ranks})"
        return f"#SBATCH --gpus-per-node={ranks} --ntasks-per-node=1, and {start}"
    # All ranks of a node then see all its GPUs, which NCCL needs for direct copies. Not --gpus-per-task, which hides
    # the others' GPUs, nor --gpu-bind=none, with which Slurm 22.05 does not set CUDA_VISIBLE_DEVICES.
    return f"#SBATCH --gpus-per-node={ranks} --ntasks-per-node={ranks}"


@dataclass(frozen=True)
class GpuDevice:
    """One GPU, independent of the indexes in a process."""

    uuid: str
    """Empty if unknown."""
    minor: int | None
    """The number of its device file /dev/nvidiaN, which is also Slurm's number for it."""


def visible_gpus(environ: Mapping[str, str] = os.environ) -> tuple[GpuDevice, ...]:
    """The GPUs this process may use, in the order of their index in it."""
    return cuda_gpus() if torch.cuda.is_available() else device_file_gpus(environ)


def cuda_gpus() -> tuple[GpuDevice, ...]:
    minors = uuid_minors()
    gpus = []
    for index in range(torch.cuda.device_count()):
        uuid = str(torch.cuda.get_device_properties(index).uuid)
        uuid = uuid if uuid.startswith(("GPU-", "MIG-")) else f"GPU-{uuid}"
        gpus.append(GpuDevice(uuid, minors.get(uuid)))
    return tuple(gpus)


def device_file_gpus(environ: Mapping[str, str], devices: Path = Path("/dev")) -> tuple[GpuDevice, ...]:
    """What CUDA would see: it numbers the device files it can open, then selects those of CUDA_VISIBLE_DEVICES."""
    if "CUDA_VISIBLE_DEVICES" not in environ and "SLURM_GPUS_ON_NODE" not in environ:
        return ()  # device files alone do not mean that this process may use them
    usable = usable_minors(devices)
    all_indexes = ",".join(str(index) for index in range(len(usable)))
    selected = [part.strip() for part in environ.get("CUDA_VISIBLE_DEVICES", all_indexes).split(",") if part.strip()]
    uuids = smi_uuids() if usable and selected else {}
    by_uuid = {uuid: minor for minor, uuid in uuids.items()}
    gpus = []
    for part in selected:
        if part in by_uuid:
            gpus.append(GpuDevice(part, by_uuid[part]))
        elif part.isdigit() and int(part) < len(usable):
            minor = usable[int(part)]
            gpus.append(GpuDevice(uuids.get(minor, ""), minor))
        else:
            break  # CUDA stops at the first unknown one
    return tuple(gpus)


def usable_minors(devices: Path) -> list[int]:
    """The numbers of the device files that this process may open: Slurm's cgroup denies the others."""
    minors = []
    for path in devices.glob("nvidia*"):
        if match := re.fullmatch(r"nvidia(\d+)", path.name):
            with contextlib.suppress(OSError):
                os.close(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                minors.append(int(match[1]))
    return sorted(minors)


def smi_uuids() -> dict[int, str]:
    """The UUID of each device file, from nvidia-smi. Empty if that is missing or fails."""
    query = ["nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader"]
    try:
        text = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    minors = uuid_minors()
    rows = (line.split(", ") for line in text.splitlines() if ", " in line)
    return {minors.get(uuid.strip(), int(index)): uuid.strip() for index, uuid in rows}


def uuid_minors(table: Path = Path("/proc/driver/nvidia/gpus")) -> dict[str, int]:
    """The device file's number of each GPU by UUID: nvidia-smi and CUDA use other orders."""
    minors = {}
    for path in table.glob("*/information"):
        pairs = (line.partition(":") for line in path.read_text().splitlines())
        fields = {name.strip(): value.strip() for name, _, value in pairs}
        if "GPU UUID" in fields and fields.get("Device Minor", "").isdigit():
            minors[fields["GPU UUID"]] = int(fields["Device Minor"])
    return minors
