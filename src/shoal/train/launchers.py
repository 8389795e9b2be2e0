"""What each launcher calls a process's place in the job: one table, read by `env`.

Launchers nest: torchrun runs in a task of srun, mpirun starts its daemons with srun, a script spawns processes. The one
nearest to the process knows its rank, so the table is in order from the innermost outwards and the first that left its
mark wins. The variables of an outer launcher then describe the outer process, and are not compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.train.errors import EnvError

LauncherName = Literal["spawn", "torchrun", "mpirun", "srun", "pmix", "env", "python"]

BATCH_STEPS = ("4294967291", "4294967290")
"""The step ids of a batch script and of salloc's shell: one process, whatever SLURM_NTASKS says."""


@dataclass(frozen=True)
class Launcher:
    """The variables of one launcher. Several names: the first that is set counts. None: it does not say."""

    name: LauncherName
    marks: tuple[str, ...]
    """All of these are set when this launcher started the process."""
    rank: tuple[str, ...]
    world_size: tuple[str, ...]
    local_rank: tuple[str, ...] = ()
    local_world_size: tuple[str, ...] = ()
    node_rank: tuple[str, ...] = ()
    restart: tuple[str, ...] = ()
    """Restarts that the launcher itself made, beside Slurm's requeues."""
    fix: str = ""
    """What to do when one of its variables is missing or wrong."""


LAUNCHERS: tuple[Launcher, ...] = (
    Launcher(
        "spawn",
        marks=("SHOAL_SPAWN",),
        rank=("RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        node_rank=("GROUP_RANK",),
        fix="start the processes with shoal.train.spawn(), and change none of its variables",
    ),
    Launcher(
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
    Launcher(  # Open MPI. OMPI_COMM_WORLD_NODE_RANK is no node rank: it counts processes on the node.
        "mpirun",
        marks=("OMPI_COMM_WORLD_RANK",),
        rank=("OMPI_COMM_WORLD_RANK",),
        world_size=("OMPI_COMM_WORLD_SIZE",),
        local_rank=("OMPI_COMM_WORLD_LOCAL_RANK",),
        local_world_size=("OMPI_COMM_WORLD_LOCAL_SIZE",),
        fix="start the script with mpirun itself, and forward no OMPI_* variable by hand",
    ),
    Launcher(  # MPICH and Intel MPI
        "mpirun",
        marks=("PMI_RANK", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        fix="start the script with mpirun itself, and forward no PMI_* variable by hand",
    ),
    Launcher(  # bare, in a container of Pyxis (its hook adds RANK and the rest), or with --mpi=pmix|pmi2
        "srun",
        marks=("SLURM_PROCID", "SLURM_STEP_ID"),
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        node_rank=("SLURM_NODEID",),
        fix="start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    Launcher(
        "pmix",
        marks=("PMIX_RANK",),
        rank=("PMIX_RANK",),
        world_size=("WORLD_SIZE",),
        local_rank=("LOCAL_RANK",),
        local_world_size=("LOCAL_WORLD_SIZE",),
        fix="PMIx has no variable for how many ranks there are: pass WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    ),
    Launcher(  # by hand, or by something like Kubernetes' PyTorchJob
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
"""Under srun, mpirun and PMIx these may be set too (Pyxis' hook does it), and must then say the same."""


def find_launcher(environ: Mapping[str, str]) -> Launcher | None:
    """The innermost launcher that left its mark, None for plain python."""
    return next((launcher for launcher in LAUNCHERS if _started(launcher, environ)), None)


def _started(launcher: Launcher, environ: Mapping[str, str]) -> bool:
    if launcher.name == "srun" and not in_a_step(environ):
        return False
    return all(environ.get(mark) for mark in launcher.marks)


def in_a_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process or one of its parents: not a batch script, nor the shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    return bool(environ.get("SLURM_PROCID")) and bool(step) and step not in BATCH_STEPS


class Variables:
    """Reads numbers for one launcher, and knows what to say when one is missing or broken."""

    def __init__(self, environ: Mapping[str, str], launcher: Launcher) -> None:
        self.environ = environ
        self.launcher = launcher

    def number(self, field: str, names: tuple[str, ...], default: int | None = None) -> int:
        name = self.source(names)
        if not name:
            if default is not None:
                return default
            starter = "whoever set RANK" if self.launcher.name == "env" else self.launcher.name
            raise EnvError(
                f"{starter} started this process, and its {field} is not in the environment",
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

    def source(self, names: tuple[str, ...]) -> str:
        """The first of these names that is set."""
        return next((name for name in names if self.environ.get(name)), "")

    def shown(self, names: tuple[str, ...], value: int) -> str:
        return f"{self.source(names) or 'counted'}={value}"
