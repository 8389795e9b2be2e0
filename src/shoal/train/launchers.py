"""The environment variables of each launcher, as one table; read by `env`.

Launchers nest: torchrun runs in a task of srun, mpirun starts its daemons with srun, a script spawns processes. The
innermost one knows the rank of the process, so the table runs from the innermost outwards and the first match wins.
Variables of an outer launcher describe the outer process, and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Literal

from shoal.hostlist import expand
from shoal.train.errors import EnvError

LauncherName = Literal["spawn", "torchrun", "mpirun", "srun", "pmix", "env", "python"]

BATCH_STEPS = ("4294967291", "4294967290")
"""The step ids of a batch script and of salloc's shell: one process, whatever SLURM_NTASKS says."""


@dataclass(frozen=True)
class LauncherVariables:
    """The variables of one launcher. Of several names the first that is set counts."""

    name: LauncherName
    marks: tuple[str, ...]
    """All of these are set if this launcher started the process."""
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    """The launcher's own restarts, besides Slurm's requeues."""
    fix: str = ""
    """The fix if one of its variables is missing or wrong."""


LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        "spawn",
        marks=("SHOAL_SPAWN",),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        fix="start the processes with shoal.train.spawn(), and change none of its variables",
    ),
    LauncherVariables(
        "torchrun",
        marks=("TORCHELASTIC_RUN_ID",),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        restart=("TORCHELASTIC_RESTART_COUNT",),
        fix="let torchrun set its variables: export none of them before or in the script",
    ),
    LauncherVariables(  # Open MPI. OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts processes on the node.
        "mpirun",
        marks=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        fix="start the script with mpirun itself, and forward no OMPI_* variable by hand",
    ),
    LauncherVariables(  # MPICH and Intel MPI
        "mpirun",
        marks=("PMI_RANK", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        fix="start the script with mpirun itself, and forward no PMI_* variable by hand",
    ),
    LauncherVariables(  # bare, in a container of Pyxis (its hook adds RANK and the rest), or with --mpi=pmix|pmi2
        "srun",
        marks=("SLURM_PROCID", "SLURM_STEP_ID"),
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        fix="start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    LauncherVariables(
        "pmix",
        marks=("PMIX_RANK",),
        rank=("PMIX_RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        fix="PMIx has no variable for how many ranks there are: pass WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    ),
    LauncherVariables(  # by hand, or by a launcher such as Kubernetes' PyTorchJob
        "env",
        marks=("RANK",),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        fix="set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none",
    ),
)

TORCH_NAMES = {"RANK": "rank", "WORLD_SIZE": "world_size", "LOCAL_RANK": "local_rank"}
"""These may also be set under srun, mpirun and PMIx (Pyxis' hook does so), and must then agree."""


def find_launcher(environ: Mapping[str, str]) -> LauncherVariables | None:
    """The innermost launcher; None for plain python."""
    return next((launcher for launcher in LAUNCHERS if _has_started(launcher, environ)), None)


def _has_started(launcher: LauncherVariables, environ: Mapping[str, str]) -> bool:
    if launcher.name == "srun" and not in_slurm_step(environ):
        return False
    return all(environ.get(mark) for mark in launcher.marks)


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process or one of its parents: not a batch script, nor the shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    return bool(environ.get("SLURM_PROCID")) and bool(step) and step not in BATCH_STEPS


class VariableReader:
    """Reads the numbers of one launcher. EnvError if one is missing or not a number."""

    def __init__(self, environ: Mapping[str, str], launcher: LauncherVariables) -> None:
        self.environ = environ
        self.launcher = launcher

    def number(self, field: str, names: tuple[str, ...], default: int | None = None) -> int:
        name = self.first_set(names)
        if not name:
            if default is not None:
                return default
            launcher = "a launcher that sets RANK" if self.launcher.name == "env" else self.launcher.name
            raise EnvError(
                f"{launcher} started this process, but its {field} is not in the environment",
                found=f"{', '.join(f'{mark}={self.environ[mark]}' for mark in self.launcher.marks)},"
                f" but no {' or '.join(names)}",
                fix=self.launcher.fix,
            )
        text = self.environ[name].strip()
        if not text.isascii() or not text.isdigit():
            raise EnvError(
                f"{field} under {self.launcher.name} must be a whole number",
                found=f"{name}={text}",
                fix=self.launcher.fix,
            )
        return int(text)

    def first_set(self, names: tuple[str, ...]) -> str:
        """The first of these variables that is set."""
        return next((name for name in names if self.environ.get(name)), "")

    def describe(self, names: tuple[str, ...], value: int) -> str:
        return f"{self.first_set(names) or 'counted'}={value}"


_COUNT = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def expand_nodelist(text: str) -> tuple[str, ...]:
    """`gpu[01-02]` as its names, in Slurm's order, which is the order of node ranks."""
    return tuple(expand(text))


def tasks_per_node(text: str) -> tuple[int, ...]:
    """SLURM_TASKS_PER_NODE as one count per node: `2(x3),1` is 2, 2, 2, 1. ValueError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = _COUNT.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def place_tasks(counts: tuple[int, ...], distribution: str = "block") -> tuple[int, ...]:
    """The node rank of every rank: node after node, or in turns for Slurm's `cyclic` distribution."""
    if not distribution.startswith("cyclic"):
        return tuple(chain.from_iterable(repeat(node, count) for node, count in enumerate(counts)))
    left = list(counts)
    placed: list[int] = []
    while any(left):
        for node, count in enumerate(left):
            if count:
                placed.append(node)
                left[node] -= 1
    return tuple(placed)
