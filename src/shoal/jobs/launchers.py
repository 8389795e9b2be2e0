"""What starts the processes of a job, and what profiles them: two tables.

Under every launcher a script sees the same: one process per rank, with torch's variables (RANK, LOCAL_RANK,
WORLD_SIZE, MASTER_ADDR, MASTER_PORT ...), started by `runner/rank.py`, which writes its log and forwards signals.
Profilers run around each rank; their files are in `profile` of the job's directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from shoal.hosts.api import Host
from shoal.jobs.model import JobSpec


@dataclass(frozen=True)
class ShellText:
    """A word of the command that the shell must expand; all others are quoted by `script.py`."""

    text: str


@dataclass(frozen=True)
class LaunchParameters:
    """What a launcher needs to know of a job."""

    python: str
    nodes: int
    ranks_per_node: int
    runner: ShellText
    """Shoal's program on the node."""
    command: tuple[str, ...]
    """The script and its arguments."""
    runner_python: str
    """What runs Shoal's program outside of an image."""


@dataclass(frozen=True)
class JobLauncher:
    one_task_a_rank: bool
    """Slurm starts every rank itself; otherwise it starts one process a node, which starts the ranks."""
    command: Callable[[LaunchParameters], list[str | ShellText]]
    """What srun or mpirun starts."""
    mpi: str = "none"
    """How srun helps MPI. Only who asks for PMIx gets it: its plugin leaves files on nodes that a crash has hit, and
    then does not start the same step of the same job there again."""
    one_process: bool = False
    mpirun: bool = False
    """Open MPI's mpirun starts the ranks, in the batch script and through a daemon on each other node, not srun."""


def _runner(python: str, launch: LaunchParameters) -> list[str | ShellText]:
    """The start of Shoal's program by this Python: the node's, or inside of an image the script's."""
    return [python, "-I", "-S", launch.runner]


def _rank(rank_from: str) -> Callable[[LaunchParameters], list[str | ShellText]]:
    def command(launch: LaunchParameters) -> list[str | ShellText]:
        return [*_runner(launch.runner_python, launch), "rank", "--rank-from", rank_from, "--", *launch.command]

    return command


def _spawn(launch: LaunchParameters) -> list[str | ShellText]:
    ranks = str(launch.ranks_per_node)
    return [*_runner(launch.runner_python, launch), "spawn", "--nproc", ranks, "--", *launch.command]


def _torchrun(launch: LaunchParameters) -> list[str | ShellText]:
    # torchrun kills its workers 30 s after a warning signal, and fails even when they saved their work. So `runner
    # agent` starts it with these signals ignored, and forwards them to the ranks itself.
    return [
        *(*_runner(launch.runner_python, launch), "agent", "--"),
        *(launch.python, "-m", "torch.distributed.run", "--no-python", "--max-restarts=0"),
        *(f"--nnodes={launch.nodes}", f"--nproc-per-node={launch.ranks_per_node}"),
        *("--rdzv-backend=c10d", ShellText('--rdzv-endpoint="$MASTER_ADDR:$MASTER_PORT"')),
        ShellText('--rdzv-id="$SHOAL_JOB.${SLURM_RESTART_COUNT:-0}"'),
        *(*_runner(launch.python, launch), "rank", "--rank-from", "RANK", "--", *launch.command),
    ]


LAUNCHERS: Mapping[str, JobLauncher] = {
    "srun": JobLauncher(True, _rank("SLURM_PROCID")),
    "torchrun": JobLauncher(False, _torchrun),
    "spawn": JobLauncher(False, _spawn),
    "pmix": JobLauncher(True, _rank("PMIX_RANK"), "pmix"),
    "mpirun": JobLauncher(True, _rank("OMPI_COMM_WORLD_RANK"), mpirun=True),
    "python": JobLauncher(True, _rank("SLURM_PROCID"), one_process=True),
}


# Binding to cores would give a rank one core, whatever --cpus-per-task says. Slurm has allowed it already to root.
MPIRUN = ("mpirun", "--allow-run-as-root", "--bind-to none")


@dataclass(frozen=True)
class Profiler:
    needs: str
    """What it is called on the nodes: a program, or a module of the job's Python."""
    fix: str
    python: bool = True
    """It is a module of the job's Python, and reads Python scripts only."""


PROFILERS: Mapping[str, Profiler] = {
    "torch": Profiler("torch", "name the Python that has it with --python"),
    "nsys": Profiler("nsys", "install NVIDIA Nsight Systems there", python=False),
    "line": Profiler("kernprof", "install line_profiler there, or name the Python that has it with --python"),
}

_PROGRAM = 'command -v "$1" > /dev/null || echo missing'
_MODULE = "import importlib.util, sys; importlib.util.find_spec(sys.argv[1]) or print('missing')"


async def is_profiler_missing(host: Host, job: JobSpec) -> bool:
    """Whether the host surely lacks what the job's profiler needs. A Python that is not found proves nothing."""
    profiler = PROFILERS[job.profile or ""]
    look = [job.python, "-c", _MODULE] if profiler.python else ["sh", "-c", _PROGRAM, "sh"]
    variables = [f"{name}={value}" for name, value in job.export.items()]
    result = await host.run(["env", *variables, *look, profiler.needs], timeout=60, root=False)
    return result.text.strip() == "missing"
