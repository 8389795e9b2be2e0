"""Who starts the processes of a job: one visible table.

A script sees the same in all of them: one process a rank, with torch's variables (RANK, LOCAL_RANK, WORLD_SIZE,
MASTER_ADDR, MASTER_PORT ...) set, started by `runner/rank.py`, which keeps its log and passes signals on.

    srun       slurmstepd ─ runner rank ─ script            a task a rank
    mpirun     the same under PMIx: MPI programs find their peers
    torchrun   slurmstepd ─ runner agent ─ torchrun ─ runner rank ─ script
    spawn      slurmstepd ─ runner spawn ─ runner rank ─ script
    python     slurmstepd ─ runner rank ─ script            one process

torchrun needs its parent. It would end its workers 30 s after a warning signal, finished or not, and end badly even
when they saved their work. So `runner agent` starts it deaf to these signals and passes them to the ranks itself;
torchrun then sees workers that end by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Raw:
    """A word of the command that the shell must expand; all others are quoted by `script.py`."""

    text: str


@dataclass(frozen=True)
class Launch:
    """What a launcher needs to know of a job."""

    python: str
    nodes: int
    ranks_per_node: int
    runner: Raw
    """Shoal's program on the node."""
    command: tuple[str, ...]
    """The script and its arguments."""


@dataclass(frozen=True)
class Launcher:
    name: str
    one_task_a_rank: bool
    """Slurm starts every rank itself; otherwise it starts one process a node, which starts the ranks."""
    command: Callable[[Launch], list[str | Raw]]
    """What srun starts."""
    mpi: str = "none"
    """How srun helps MPI. Only who asks for PMIx gets it: its plugin leaves files on nodes that a crash has hit, and
    then does not start the same step of the same job there again."""
    one_process: bool = False


def _rank(rank_from: str) -> Callable[[Launch], list[str | Raw]]:
    def command(launch: Launch) -> list[str | Raw]:
        return [launch.python, "-I", "-S", launch.runner, "rank", "--rank-from", rank_from, "--", *launch.command]

    return command


def _spawn(launch: Launch) -> list[str | Raw]:
    runner: list[str | Raw] = [launch.python, "-I", "-S", launch.runner]
    return [*runner, "spawn", "--nproc", str(launch.ranks_per_node), "--", *launch.command]


def _torchrun(launch: Launch) -> list[str | Raw]:
    runner: list[str | Raw] = [launch.python, "-I", "-S", launch.runner]
    return [
        *(*runner, "agent", "--"),
        *(launch.python, "-m", "torch.distributed.run", "--no-python", "--max-restarts=0"),
        *(f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.ranks_per_node}"),
        *("--rdzv-backend=c10d", Raw('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"')),
        Raw('--rdzv-id="$SHOAL_JOB.${SLURM_RESTART_COUNT:-0}"'),
        *(*runner, "rank", "--rank-from", "RANK", "--", *launch.command),
    ]


LAUNCHERS: Mapping[str, Launcher] = {
    launcher.name: launcher
    for launcher in (
        Launcher("srun", True, _rank("SLURM_PROCID")),
        Launcher("torchrun", False, _torchrun),
        Launcher("spawn", False, _spawn),
        Launcher("mpirun", True, _rank("PMIX_RANK"), "pmix"),
        Launcher("python", True, _rank("SLURM_PROCID"), one_process=True),
    )
}
