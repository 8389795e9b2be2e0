"""Files of users' jobs that are on no share, but on the nodes of each job: read there as the user, through Slurm.

While a job runs, its files are read by steps of the job itself. After its end a short job of the user's reads them; it
takes a CPU of the node for a moment, and does not wait for one. A node that is off stays off.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import secrets
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from shoal.errors import CommandFailed, CommandTimeout, HostError
from shoal.hostlist import expand
from shoal.hosts.api import Host
from shoal.jobs.record import USER_JOBS_DIRECTORY, JobRecord, step_command
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import slurm_output

READER_NAME = "shoal-logs"
"""How names of the short jobs begin."""
_NAME_OPTION = "--job-name="
START_TIMEOUT_S = 15
"""So long a short job waits for a CPU of its node."""
READ_TIMEOUT_S = 120.0
READ_LIMIT = "--time=2"
CANCEL_TIMEOUT_S = 10.0
ABSENT_STATES = frozenset(
    ("DOWN", "NOT_RESPONDING", "POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "POWER_DOWN", "POWER_UP", "UNKNOWN")
)
READER_OPTIONS = ("--mpi=none", "--chdir=/")

Take = Callable[[str, bytes], object]
"""What is done with a line that a node printed."""


def is_on_nodes(context: Context, record: JobRecord) -> bool:
    """Whether it is a user's job whose nodes have its files."""
    return context.joined is not None and record.work_dir.startswith(f"{USER_JOBS_DIRECTORY}/")


def nodes_with_files(context: Context, record: JobRecord) -> tuple[str, ...]:
    """The nodes that have files of a job which the host that the user logs in to has not."""
    if context.joined is None or not is_on_nodes(context, record):
        return ()
    return tuple(name for name in expand(record.nodes) if name not in context.joined.record.containers)


def reader_command(record: JobRecord, nodes: Sequence[str], command: Sequence[str]) -> tuple[str, ...]:
    """The command as a step of a job that runs, which takes nothing from the job's other steps; a task a node."""
    name = f"{_NAME_OPTION}{READER_NAME}"  # `shoal jobs` does not count it among the steps of the job
    return step_command(record.number, nodes, command, (name, "--mem=0", "--gres=none", *READER_OPTIONS))


def short_job_command(record: JobRecord, node: str, command: Sequence[str], *limits: str) -> tuple[str, ...]:
    """The command as a job of its own, on a node where a job has ended."""
    name = unique_job_name(READER_NAME)
    resources = (f"--immediate={START_TIMEOUT_S}", *limits, "--mem=64M", "--cpus-per-task=1")
    partition = (f"--partition={record.partition}",) if record.partition else ()
    one_task = ("--nodes=1", "--ntasks=1", "--quiet", *READER_OPTIONS)
    return ("srun", name, f"--nodelist={node}", *partition, *resources, *one_task, *command)


def unique_job_name(start: str) -> str:
    """An option of srun: a name that no other job has, so that `cancel_short_job` finds it."""
    return f"{_NAME_OPTION}{start}-{secrets.token_hex(4)}"


def job_name(line: Sequence[str]) -> str:
    """The name that `unique_job_name` gave the job of an srun; empty where it has none."""
    options = (option for option in line if re.fullmatch(rf"{_NAME_OPTION}shoal-[a-z-]+-[0-9a-f]{{8}}", option))
    return next(options, "").removeprefix(_NAME_OPTION)


async def cancel_short_job(controller: Host, line: Sequence[str]) -> None:
    """Cancel the job of an srun that was killed: Slurm keeps its allocation. A step has none."""
    if name := job_name(line):
        with contextlib.suppress(HostError):
            await controller.run(["scancel", f"--name={name}"], timeout=CANCEL_TIMEOUT_S, root=False)


@dataclass
class NodeFiles:
    """The files of one job on its nodes, read once or several times. Each line of them is taken once."""

    controller: Host
    nodes: tuple[str, ...]
    command: tuple[str, ...]
    """What reads them on a node."""
    take: Take
    failures: dict[str, HostError] = field(default_factory=dict)
    _seen: Counter[tuple[str, bytes]] = field(default_factory=Counter)

    async def read(self, record: JobRecord) -> None:
        """Read what the nodes have now."""
        if record.state in ("PENDING", "CONFIGURING"):
            return
        is_running = record.state == "RUNNING"
        states = {} if is_running else await self._states()

        async def read_node(node: str) -> None:
            if ABSENT_STATES & states.get(node, set()):
                self.failures[node] = CommandFailed(node, "it is off or away, and has the job's files")
                return
            line = reader_command(record, [node], self.command) if is_running else ()
            try:
                async with asyncio.timeout(READ_TIMEOUT_S):
                    await self.pump(node, line or short_job_command(record, node, self.command, READ_LIMIT))
            except TimeoutError:
                self.failures[node] = CommandTimeout(node, "the job's files did not arrive", hint="try it again")

        await asyncio.gather(*(read_node(node) for node in self.nodes))

    async def pump(self, node: str, line: Sequence[str], *, must_succeed: bool = True) -> None:
        """Take the lines that a command prints, but those that were taken before."""
        count: Counter[tuple[str, bytes]] = Counter()
        process, result = await self.controller.start(line, root=False), None
        try:
            while raw := await process.readline():
                key = node, raw.partition(b"\t")[0]
                count[key] += 1
                if count[key] > self._seen[key]:
                    self._seen[key] = count[key]
                    self.take(node, raw)
            result = await process.wait()
        finally:
            await process.kill()
            if result is None:
                await cancel_short_job(self.controller, line)
        if result.status != 0 and must_succeed:
            cause = result.error_text.strip().splitlines()[-1:] or ["srun failed"]
            fix = "its node may be busy: try it again when it is not"
            self.failures[node] = CommandFailed(node, f"cannot read the job's files: {cause[0]}", hint=fix)
        else:
            self.failures.pop(node, None)

    async def _states(self) -> dict[str, set[str]]:
        text = await slurm_output(self.controller, NODES_COMMAND)
        return {node.name: set(node.state) for node in parse_nodes(text)}
