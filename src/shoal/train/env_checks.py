"""Checks for contradictions between the variables of launchers: common mistakes, each with its fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from shoal.train.errors import EnvError
from shoal.train.launchers import TORCH_NAMES, VariableReader, in_slurm_step, tasks_per_node


def check_single_process(environ: Mapping[str, str]) -> None:
    """A process without a rank although WORLD_SIZE is above 1: each process would train alone, without an error."""
    if (environ.get("WORLD_SIZE") or "1") != "1":
        raise EnvError(
            "WORLD_SIZE is set, but the rank of this process is not",
            found=f"WORLD_SIZE={environ['WORLD_SIZE']}, no RANK, and no launcher's variables",
            fix="start it with srun, torchrun or mpirun, which set all of it; for one process unset WORLD_SIZE",
        )


def check_bounds(read: VariableReader, rank: int, world_size: int, local_rank: int, local_world_size: int) -> None:
    names = read.launcher
    local, whole = names.local_world_size, names.world_size
    for small, value, large, limit in (
        ("rank", rank, "world_size", world_size),
        ("local_rank", local_rank, "local_world_size", local_world_size),
    ):
        if value >= limit:
            raise EnvError(
                f"{small} {value} does not exist: {large} is {limit}, counted from 0",
                found=f"{read.describe(getattr(names, small), value)},"
                f" {read.describe(getattr(names, large), limit)} (from {names.name})",
                fix=names.fix,
            )
    if local_world_size > world_size:
        raise EnvError(
            f"a node cannot have {local_world_size} of {world_size} ranks",
            found=f"{read.describe(local, local_world_size)}, {read.describe(whole, world_size)} (from {names.name})",
            fix=names.fix,
        )


def check_torch_names(read: VariableReader, values: Mapping[str, int]) -> None:
    """RANK and the like besides a launcher's own variables: Pyxis' hook sets them right, batch scripts often wrong."""
    if read.launcher.name in ("spawn", "torchrun", "env"):
        return
    for name, field in TORCH_NAMES.items():
        own = read.first_set(getattr(read.launcher, field))
        if own in ("", name) or not read.environ.get(name):
            continue
        if read.number(field, (name,)) == values[field]:
            continue
        too_early = (
            f"\nIn a batch script ${own} is that of the script, not that of each process." if "rank" in field else ""
        )
        raise EnvError(
            f"{read.launcher.name} and the environment contradict each other about {field}",
            found=f"{name}={read.environ[name]}, {own}={read.environ[own]}",
            fix=f"remove the line that exports {name}: the library reads {own} itself.{too_early}",
        )


def check_torchrun(environ: Mapping[str, str], world_size: int, local_world_size: int) -> None:
    """torchrun needs one agent per node, and as many nodes as its --nnodes."""
    agents = int(environ.get("GROUP_WORLD_SIZE") or 0)
    if agents and agents * local_world_size != world_size:
        raise EnvError(
            "torchrun's variables contradict each other about the world size",
            found=f"GROUP_WORLD_SIZE={agents}, LOCAL_WORLD_SIZE={local_world_size}, WORLD_SIZE={world_size}",
            fix="let torchrun set its variables: export none of them before or in the script",
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


def check_node_rank(read: VariableReader, node_rank: int, nodes: Sequence[str]) -> None:
    """A node rank beyond Slurm's list: the address of rank 0 would be unknown."""
    if nodes and node_rank >= len(nodes):
        raise EnvError(
            f"node_rank {node_rank} does not exist: Slurm lists {len(nodes)} nodes, counted from 0",
            found=f"{read.describe(read.launcher.node_rank, node_rank)}, nodes {', '.join(nodes[:8])}",
            fix=read.launcher.fix,
        )
