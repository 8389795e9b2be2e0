"""What `--profile` needs on the nodes, and whether they have it.

    torch   torch.profiler: a few steps of every rank, as Chrome traces
    nsys    NVIDIA Nsight Systems around every rank
    line    line_profiler: the time of each line of the script

`runner/rank.py` puts them around the ranks; what they leave lies in `profile` of the job's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from shoal.errors import UsageError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.jobs.model import JobSpec


@dataclass(frozen=True)
class Profiler:
    name: str
    needs: str
    """What it is called on the nodes: a program, or a module of the job's Python."""
    fix: str
    python: bool = True
    """It is a module of the job's Python, and reads Python scripts only."""


PROFILERS: Mapping[str, Profiler] = {
    profiler.name: profiler
    for profiler in (
        Profiler("torch", "torch", "name the Python that has it with --python"),
        Profiler("nsys", "nsys", "install NVIDIA Nsight Systems there", python=False),
        Profiler("line", "kernprof", "install line_profiler there, or name the Python that has it with --python"),
    )
}

_PROGRAM = 'command -v "$1" > /dev/null || echo missing'
_MODULE = "import importlib.util, sys; importlib.util.find_spec(sys.argv[1]) or print('missing')"


async def lacks_profiler(host: Host, job: JobSpec) -> bool:
    """Whether the host surely lacks what the job's profiler needs. A Python that is not found proves nothing."""
    profiler = PROFILERS[job.profile or ""]
    look = [job.python, "-c", _MODULE] if profiler.python else ["sh", "-c", _PROGRAM, "sh"]
    variables = [f"{name}={value}" for name, value in job.env.items()]
    result = await host.run(["env", *variables, *look, profiler.needs], timeout=60, root=False)
    return result.text.strip() == "missing"


def refuse_without_profiler(job: JobSpec, missing: list[str]) -> None:
    """Better now than after an hour in the queue."""
    if missing:
        profiler = PROFILERS[job.profile or ""]
        where = f"in {job.python} " if profiler.python else ""
        raise UsageError(
            f"--profile {profiler.name} needs {profiler.needs}, which is missing {where}on {compress(missing)}",
            hint=f"{profiler.fix}, choose other nodes with --nodelist, or leave out --profile",
        )
