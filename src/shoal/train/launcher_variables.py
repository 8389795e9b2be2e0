"""The environment variables of each launcher, as one table, and the checks for contradictions between them.

Launchers nest: torchrun runs in a task of srun, mpirun starts its daemons with srun, a script spawns processes. The
innermost one knows the rank of the process, so the table runs from the innermost outwards and the first match wins.
Variables of an outer launcher describe the outer process, and are not compared.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from shoal.train.errors import EnvError

LauncherName = Literal["spawn", "torchrun", "mpirun", "srun", "pmix", "env", "python"]

BATCH_STEPS = ("4294967291", "4294967290")
"""The step ids of a batch script and of salloc's shell: one process, whatever SLURM_NTASKS says."""


@dataclass(frozen=True)
class LauncherVariables:
    """The variables of one launcher, by default torchrun's. Of several names the first that is set counts."""

    name: LauncherName
    marks: tuple[str, ...]
    """All of these are set if this launcher started the process."""
    fix: str
    """The fix if one of its variables is missing or wrong."""
    rank: tuple[str, ...] = ("RANK",)
    world_size: tuple[str, ...] = ("WORLD_SIZE",)
    local_rank: tuple[str, ...] = ("LOCAL_RANK",)
    local_world_size: tuple[str, ...] = ("LOCAL_WORLD_SIZE",)
    node_rank: tuple[str, ...] = ("GROUP_RANK",)
    restart: tuple[str, ...] = ()
    """The launcher's own restarts, besides Slurm's requeues."""


LAUNCHERS: tuple[LauncherVariables, ...] = (
    LauncherVariables(
        "spawn",
        marks=("SHOAL_SPAWN",),
        fix="start the processes with shoal.train.spawn(), and change none of its variables",
    ),
    LauncherVariables(
        "torchrun",
        marks=("TORCHELASTIC_RUN_ID",),
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
        node_rank=(),
        fix="start the script with mpirun itself, and forward no OMPI_* variable by hand",
    ),
    LauncherVariables(  # MPICH and Intel MPI
        "mpirun",
        marks=("PMI_RANK", "MPI_LOCALRANKID"),
        rank=("PMI_RANK",),
        world_size=("PMI_SIZE",),
        local_rank=("MPI_LOCALRANKID",),
        local_world_size=("MPI_LOCALNRANKS",),
        node_rank=(),
        fix="start the script with mpirun itself, and forward no PMI_* variable by hand",
    ),
    LauncherVariables(  # bare, in a container of Pyxis (its hook adds RANK and the rest), or with --mpi=pmix|pmi2
        "srun",
        marks=("SLURM_PROCID", "SLURM_STEP_ID"),
        rank=("SLURM_PROCID",),
        world_size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank=("SLURM_LOCALID",),
        local_world_size=(),
        node_rank=("SLURM_NODEID",),
        fix="start the script with srun inside the job, and pass Slurm's variables on unchanged (containers too)",
    ),
    LauncherVariables(
        "pmix",
        marks=("PMIX_RANK",),
        rank=("PMIX_RANK",),
        node_rank=(),
        fix="PMIx has no variable for how many ranks there are: pass WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE",
    ),
    LauncherVariables(  # by hand, or by a launcher such as Kubernetes' PyTorchJob
        "env",
        marks=("RANK",),
        node_rank=("GROUP_RANK", "NODE_RANK"),
        fix="set RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT together, or none",
    ),
)

TORCH_NAMES = {"RANK": "rank", "WORLD_SIZE": "world_size", "LOCAL_RANK": "local_rank"}
"""These may also be set under srun, mpirun and PMIx (Pyxis' hook does so), and must then agree."""


def find_launcher(environ: Mapping[str, str]) -> LauncherVariables | None:
    """The innermost launcher; None for plain python."""
    for launcher in LAUNCHERS:
        if all(map(environ.get, launcher.marks)) and (launcher.name != "srun" or in_slurm_step(environ)):
            return launcher
    return None


def in_slurm_step(environ: Mapping[str, str]) -> bool:
    """Whether srun started this process or one of its parents: not a batch script, nor the shell of salloc."""
    step = environ.get("SLURM_STEP_ID", "")
    return bool(environ.get("SLURM_PROCID")) and bool(step) and step not in BATCH_STEPS


class VariableReader:
    """Reads the numbers of one launcher. EnvError if one is missing or not a number."""

    def __init__(self, environ: Mapping[str, str], launcher: LauncherVariables) -> None:
        self.environ = environ
        self.launcher = launcher

    def number(self, field: str, default: int | None = None, names: tuple[str, ...] = ()) -> int:
        names = names or getattr(self.launcher, field)
        name = self.first_set(names)
        if not name:
            if default is not None:
                return default
            launcher = "a launcher that sets RANK" if self.launcher.name == "env" else self.launcher.name
            marks = ", ".join(f"{mark}={self.environ[mark]}" for mark in self.launcher.marks)
            raise self.error(
                f"{launcher} started this process, but its {field} is not in the environment",
                f"{marks}, but no {' or '.join(names)}",
            )
        text = self.environ[name].strip()
        if not text.isascii() or not text.isdigit():
            raise self.error(f"{field} under {self.launcher.name} must be a whole number", f"{name}={text}")
        return int(text)

    def first_set(self, names: Sequence[str]) -> str:
        """The first of these variables that is set."""
        return next((name for name in names if self.environ.get(name)), "")

    def describe(self, field: str, value: int) -> str:
        return f"{self.first_set(getattr(self.launcher, field)) or 'counted'}={value}"

    def error(self, what: str, found: str) -> EnvError:
        return EnvError(what, found=found, fix=self.launcher.fix)


def check_single_process(environ: Mapping[str, str]) -> None:
    """A process without a rank although WORLD_SIZE is above 1: each process would train alone, without an error."""
    if (environ.get("WORLD_SIZE") or "1") != "1":
        raise EnvError(
            "WORLD_SIZE is set, but the rank of this process is not",
            found=f"WORLD_SIZE={environ['WORLD_SIZE']}, no RANK, and no launcher's variables",
            fix="start it with srun, torchrun or mpirun, which set all of it; for one process unset WORLD_SIZE",
        )


def check_bounds(read: VariableReader, values: Mapping[str, int]) -> None:
    def check(small: str, large: str, contradiction: bool, message: str) -> None:
        if contradiction:
            variables = f"{read.describe(small, values[small])}, {read.describe(large, values[large])}"
            raise read.error(message, f"{variables} (from {read.launcher.name})")

    for small, large in (("rank", "world_size"), ("local_rank", "local_world_size")):
        value, limit = values[small], values[large]
        check(small, large, value >= limit, f"{small} {value} does not exist: {large} is {limit}, counted from 0")
    local, world_size = values["local_world_size"], values["world_size"]
    check("local_world_size", "world_size", local > world_size, f"a node cannot have {local} of {world_size} ranks")


def check_torch_names(read: VariableReader, values: Mapping[str, int]) -> None:
    """RANK and the like besides a launcher's own variables: Pyxis' hook sets them right, batch scripts often wrong."""
    if read.launcher.name in ("spawn", "torchrun", "env"):
        return
    for name, field in TORCH_NAMES.items():
        variable = read.first_set(getattr(read.launcher, field))
        if variable in ("", name) or not read.environ.get(name) or read.number(field, names=(name,)) == values[field]:
            continue
        too_early = f"\nIn a batch script ${variable} is that of the script, not that of each process."
        raise EnvError(
            f"{read.launcher.name} and the environment contradict each other about {field}",
            found=f"{name}={read.environ[name]}, {variable}={read.environ[variable]}",
            fix=f"remove the line that exports {name}: the library reads {variable} itself."
            + (too_early if "rank" in field else ""),
        )


def check_torchrun(read: VariableReader, world_size: int, local_world_size: int) -> None:
    """torchrun needs one agent per node, and as many nodes as its --nnodes."""
    environ = read.environ
    agents = int(environ.get("GROUP_WORLD_SIZE") or 0)
    if agents and agents * local_world_size != world_size:
        raise read.error(
            "torchrun's variables contradict each other about the world size",
            f"GROUP_WORLD_SIZE={agents}, LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size}",
        )
    if not in_slurm_step(environ):
        return
    text = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE") or "1"
    if max(tasks_per_node(text)) > 1:
        raise EnvError(
            "srun starts torchrun several times on a node, and each starts all ranks of the node",
            found=f"tasks per node: {text}, LOCAL_WORLD_SIZE={local_world_size}",
            fix=f"srun --ntasks-per-node=1 torchrun --nproc-per-node={local_world_size} ...",
        )
    nodes = int(environ.get("SLURM_STEP_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    if agents and agents != nodes:
        raise EnvError(
            f"srun starts torchrun on {nodes} nodes, but torchrun counts {agents}",
            found=f"SLURM_STEP_NUM_NODES={nodes}, GROUP_WORLD_SIZE={agents}",
            fix=f"torchrun --nnodes={nodes} --rdzv-backend=c10d --rdzv-endpoint=HOST:PORT --rdzv-id=$SLURM_JOB_ID ...",
        )


def check_mpirun(environ: Mapping[str, str], rank: int, world_size: int) -> None:
    """mpirun's daemons are one task per node. The variables of an mpirun around sbatch make each task rank 0."""
    if not in_slurm_step(environ):
        return
    tasks = int(environ.get("SLURM_STEP_NUM_TASKS") or 1)
    if (environ["SLURM_PROCID"], tasks) == (str(rank), world_size):
        return
    crowded = max(tasks_per_node(environ.get("SLURM_STEP_TASKS_PER_NODE") or "1")) > 1
    if crowded or (world_size == 1 and tasks > 1):
        raise EnvError(
            "the variables of both srun and mpirun are set for this process",
            found=f"task {environ['SLURM_PROCID']} of srun's {tasks}, rank {rank} of mpirun's {world_size}",
            fix="start it with one of the two; sbatch --export=NONE drops the variables of an mpirun around it",
        )


def tasks_per_node(text: str) -> tuple[int, ...]:
    """SLURM_TASKS_PER_NODE as one count per node: `2(x3),1` is 2, 2, 2, 1. ValueError for other text."""
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part.strip())
        if match is None:
            raise ValueError(f"{part!r} is not a count like 2 or 2(x3)")
        counts += [int(match[1])] * int(match[2] or 1)
    return tuple(counts)


def place_tasks(counts: Sequence[int], distribution: str = "block") -> tuple[int, ...]:
    """The node rank of every rank: node after node, or in turns for Slurm's `cyclic` distribution."""
    placed = [(turn, node) for node, count in enumerate(counts) for turn in range(count)]
    return tuple(node for _, node in (sorted(placed) if distribution.startswith("cyclic") else placed))
