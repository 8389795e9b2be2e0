"""Which rank has which GPU, proved before the first step.

A rank takes the only GPU it sees, or the one with the number of its local rank; CUDA_VISIBLE_DEVICES is never changed.
Then the ranks compare the GPUs' UUIDs. Two ranks on one GPU train at half the speed or run out of memory, a rank on a
GPU that Slurm gave to another job disturbs that job: both are refused, with the flags that set it right.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

from shoal.train.env import Env
from shoal.train.errors import BindingError
from shoal.train.gpus import Gpu, visible_gpus
from shoal.train.launchers import in_a_step

_FAREWELL_SECONDS = 10.0

NOTHING_TO_PROVE = "No rank has a GPU: there is no binding to prove."


@dataclass(frozen=True)
class Seat:
    """One rank and its GPU."""

    rank: int
    node: str
    local_rank: int
    index: int
    """The GPU's index in this process: what torch.device("cuda", index) takes."""
    visible: int
    """How many GPUs this process sees."""
    uuid: str = ""
    minor: int | None = None
    allocated: tuple[int, ...] = ()
    """The device numbers Slurm gave this step or job on this node; empty where it does not say."""
    granted: int = 0
    """How many GPUs Slurm gave on this node; 0 where it does not say."""

    @property
    def gpu(self) -> str:
        """The GPU in one word, the same for everyone who uses it."""
        if self.uuid:
            return self.uuid
        return f"{self.node}:/dev/nvidia{self.minor}" if self.minor is not None else ""

    @property
    def shown(self) -> str:
        device = f" (/dev/nvidia{self.minor})" if self.uuid and self.minor is not None else ""
        return self.gpu + device or "none"


@dataclass(frozen=True)
class Binding:
    """All ranks and their GPUs; str() is the table."""

    seats: tuple[Seat, ...]

    @property
    def proved(self) -> bool:
        """False for a job without GPUs: nothing was there to prove."""
        return any(seat.gpu for seat in self.seats)

    def __str__(self) -> str:
        rows = [("rank", "node", "local rank", "GPU")]
        rows += [(str(seat.rank), seat.node, str(seat.local_rank), seat.shown) for seat in self.seats]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines if self.proved else [*lines, NOTHING_TO_PROVE])


def prove_binding(env: Env, store: Any, environ: Mapping[str, str] = os.environ, timeout: float = 60.0) -> Binding:
    """Compare the GPUs of all ranks over the job's store. Every rank gets the same table, or the same BindingError."""
    seat = take_seat(env, visible_gpus(environ), environ)
    store.set(f"binding/{env.rank}", json.dumps(asdict(seat)))
    if env.rank == 0:
        keys = [f"binding/{rank}" for rank in range(env.world_size)]
        _wait(store, keys, timeout)
        seats = tuple(_seat(store.get(key)) for key in keys)
        error = find_fault(seats, env)
        verdict = {
            "error": [error.what, error.found, error.fix] if error else None,
            "seats": [asdict(s) for s in seats],
        }
        store.set("binding/verdict", json.dumps(verdict))
    _wait(store, ["binding/verdict"], 2 * timeout)
    verdict = json.loads(store.get("binding/verdict"))
    read = store.add("binding/read", 1)
    if verdict["error"]:
        end = time.monotonic() + _FAREWELL_SECONDS
        while env.rank == 0 and read < env.world_size and time.monotonic() < end:
            time.sleep(0.01)  # the store ends with rank 0: the others must have read why before
            read = store.add("binding/read", 0)
        what, found, fix = verdict["error"]
        raise BindingError(what, found=found, fix=fix)
    return Binding(tuple(_seat(json.dumps(row)) for row in verdict["seats"]))


def _wait(store: Any, keys: Sequence[str], timeout: float) -> None:
    try:
        store.wait(list(keys), timedelta(seconds=timeout))
    except RuntimeError:
        if "binding/verdict" in keys:
            raise BindingError("rank 0 did not compare the GPUs of the ranks", fix="look at rank 0's log") from None
        absent = [key.rpartition("/")[2] for key in keys if not store.check([key])]
        raise BindingError(
            f"{len(absent)} of {len(keys)} ranks did not say which GPU they have within {timeout:g} s",
            found=f"nothing from rank {', '.join(absent[:8])}",
            fix="look at the logs of these ranks; nvidia-smi on their nodes may hang",
        ) from None


def take_seat(env: Env, gpus: Sequence[Gpu], environ: Mapping[str, str]) -> Seat:
    """The GPU this rank takes: the only one it sees, else the one with the number of its local rank."""
    index = 0 if len(gpus) == 1 else env.local_rank
    taken = gpus[index] if index < len(gpus) else Gpu("", None)
    allocated = device_numbers(allocated_gpus(environ))
    granted = int(environ.get("SLURM_GPUS_ON_NODE") or 0)
    return Seat(env.rank, env.node, env.local_rank, index, len(gpus), taken.uuid, taken.minor, allocated, granted)


def allocated_gpus(environ: Mapping[str, str]) -> str:
    """The GPUs that Slurm gave on this node. In a step the job's list is that of the batch host, not of this one."""
    return environ.get("SLURM_STEP_GPUS" if in_a_step(environ) else "SLURM_JOB_GPUS", "")


def device_numbers(text: str) -> tuple[int, ...]:
    """SLURM_STEP_GPUS as numbers: `0,2-3` is 0, 2, 3. Empty where it holds something else."""
    numbers: list[int] = []
    for part in filter(None, text.split(",")):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part.strip())
        if match is None:
            return ()
        numbers += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(numbers)


def find_fault(seats: Sequence[Seat], env: Env) -> BindingError | None:
    """What is wrong with this layout, None when nothing is."""
    if not any(seat.visible for seat in seats):
        return None
    table = str(Binding(tuple(seats)))
    fix = right_flags(env, max(seat.local_rank for seat in seats) + 1)
    blind = [seat for seat in seats if not seat.gpu]
    if blind:
        seat = blind[0]
        sees = f"sees {seat.visible} GPU{'' if seat.visible == 1 else 's'}" if seat.visible else "sees no GPU"
        return BindingError(
            f"rank {seat.rank} has no GPU: it is local rank {seat.local_rank} on {seat.node} and {sees}",
            found=table,
            fix=fix,
        )
    owners: dict[str, Seat] = {}
    for seat in seats:
        owner = owners.setdefault(seat.gpu, seat)
        if owner is not seat:
            return BindingError(
                f"ranks {owner.rank} and {seat.rank} are on the same GPU of {seat.node}: {seat.shown}",
                found=table,
                fix=fix,
            )
    for seat in seats:
        if seat.allocated and seat.minor is not None and seat.minor not in seat.allocated:
            given = ", ".join(f"/dev/nvidia{number}" for number in seat.allocated)
            return BindingError(
                f"rank {seat.rank} is on /dev/nvidia{seat.minor} of {seat.node}, which Slurm did not give to this job",
                found=f"Slurm gave it {given}\n{table}",
                fix=f"remove the line that sets CUDA_VISIBLE_DEVICES: Slurm sets it.\n{fix}",
            )
        if not seat.allocated and 0 < seat.granted < seat.visible:
            return BindingError(
                f"rank {seat.rank} sees {seat.visible} GPUs on {seat.node}, and Slurm gave it {seat.granted},"
                " not saying which",
                found=f"SLURM_GPUS_ON_NODE={seat.granted}, no SLURM_STEP_GPUS and no CUDA_VISIBLE_DEVICES\n{table}",
                fix=f"remove --gpu-bind=none: Slurm 22.05 then leaves CUDA_VISIBLE_DEVICES out.\n{fix}",
            )
    return None


def right_flags(env: Env, ranks: int) -> str:
    """The sbatch flags that give each of so many ranks on a node a GPU of its own."""
    if env.launcher in ("torchrun", "spawn"):
        start = f"torchrun --nproc-per-node={ranks}" if env.launcher == "torchrun" else f"spawn(nprocs={ranks})"
        return f"#SBATCH --gpus-per-node={ranks} --ntasks-per-node=1, and {start}"
    # All ranks of a node then see all its GPUs, which NCCL needs to copy between them directly. Without --gpu-bind:
    # --gpus-per-task hides the others' GPUs, and `none` makes Slurm 22.05 leave CUDA_VISIBLE_DEVICES out.
    return f"#SBATCH --gpus-per-node={ranks} --ntasks-per-node={ranks}"


def _seat(text: str | bytes) -> Seat:
    row = json.loads(text)
    return Seat(**{**row, "allocated": tuple(row["allocated"])})
