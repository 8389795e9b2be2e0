"""A job on its way to Slurm: the connections it needs, its archives, its secrets, and sbatch."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.errors import SlurmError, UsageError
from shoal.hosts.api import Host
from shoal.jobs.bundle import Bundle, runtime, working_tree
from shoal.jobs.delivery import encode_code
from shoal.jobs.field_checks import SECRETS
from shoal.jobs.model import JobPaths, JobSpec, ResolvedJob
from shoal.jobs.tree_files import NOTHING, LeftOut
from shoal.plan.connections import Connections
from shoal.remote.runner.node import SUBMISSION
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND
from shoal.spec.member import Member
from shoal.tracking.login import ADDRESS_COMMAND, job_variables
from shoal.verbs.context import Context, job_file_hosts
from shoal.verbs.early_login import MAX_EAGER_HOSTS
from shoal.verbs.operator_login import OperatorLogin, read_login
from shoal.verbs.slurmctld import gather_answers, slurm_output

if TYPE_CHECKING:
    from shoal.environments.store import BuiltEnvironment


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready to be sent: what `--dry-run` shows and what is submitted are this one value."""

    job: ResolvedJob
    shipped: JobPaths
    tree: Bundle
    runtime: Bundle
    script: str
    environment: BuiltEnvironment | None = None

    @property
    def carried_bytes(self) -> int:
        """How much code goes with the job itself."""
        return len(self.tree.data) + len(self.runtime.data) if self.shipped.carried else 0


@dataclass(frozen=True)
class SubmittedJob:
    """A job in the queue."""

    id: str
    name: str
    partition: str
    nodes: int
    world_size: int
    code: str
    """The content hash of the working tree."""
    sent: int
    """Bytes that were not on the nodes yet."""
    script: str
    traces: str = ""
    """The directory on its nodes where the profiler's files will be."""
    shared: bool = True
    """Its nodes have the jobs' directory in common. Checkpoints of several nodes need that."""
    array: bool = False
    """It is as many jobs as `--array` says, each with a number behind its own."""
    left_out: LeftOut = NOTHING
    """What of the working tree was not sent."""


@dataclass(frozen=True)
class JobConnections:
    """The connections to a cluster, which may still be opening, and the questions its controller was asked."""

    fleet: Connections
    slurm: asyncio.Future[list[str]]
    """Slurm's nodes and partitions."""
    tracking: asyncio.Future[str]
    """The address of the tracking server."""
    login: asyncio.Future[OperatorLogin]
    """Whom the controller takes the person for."""


@asynccontextmanager
async def connect(context: Context, chosen: Sequence[Member] | None = None) -> AsyncIterator[JobConnections]:
    """Start to connect to the hosts that a job may need, and ask Slurm once its controller is connected."""
    controller = context.controller.name
    async with await context.connections(chosen) as fleet:
        fleet.start_connecting([controller])  # first: Slurm's answer takes longest
        if len(fleet.targets) <= MAX_EAGER_HOSTS:
            fleet.start_connecting(name for name in job_file_hosts(context) if name in fleet.targets)

        async def ask_slurm() -> list[str]:
            host = await fleet.host(controller)
            return await gather_answers(host, slurm_output(host, NODES_COMMAND), slurm_output(host, PARTITIONS_COMMAND))

        async def ask_tracking() -> str:
            return (await (await fleet.host(controller)).run(ADDRESS_COMMAND, timeout=60)).text

        async def ask_login() -> OperatorLogin:
            return OperatorLogin() if context.joined else await read_login(await fleet.host(controller))

        slurm, tracking = asyncio.ensure_future(ask_slurm()), asyncio.ensure_future(ask_tracking())
        login = asyncio.ensure_future(ask_login())
        try:
            yield JobConnections(fleet, slurm, tracking, login)
        finally:
            for question in (slurm, tracking, login):
                question.cancel()
            await asyncio.gather(slurm, tracking, login, return_exceptions=True)


async def make_bundles(job: JobSpec, here: Path, limit: int) -> tuple[Bundle, Bundle]:
    """The working tree, and Shoal's own part of a job."""
    return await asyncio.to_thread(lambda: (working_tree(here, job.script, limit, job.include), runtime()))


def require_accounting(context: Context, job: JobSpec) -> None:
    """Raise UsageError where Slurm would ignore an option."""
    options = [f"--{name}" for name in ("account", "qos") if getattr(job, name) is not None]
    if options and not context.accounting:
        raise UsageError(
            f"the cluster has no accounting, so Slurm would ignore {' and '.join(options)}",
            hint="put `accounting: true` into the file and run `shoal up`, or leave it out",
        )


async def require_dependencies(controller: Host, job: JobSpec) -> None:
    """Raise UsageError where the job would wait for one that does not exist: Slurm accepts that, or never starts it."""
    numbers = dict.fromkeys(re.findall(r":([0-9]+(?:_[0-9]+)?)", job.dependency or ""))
    if not numbers:
        return
    from shoal.verbs.logs import find_records  # slow to import, and few jobs wait for others

    answers = await asyncio.gather(*(find_records(controller, number) for number in numbers))
    unknown = [number for number, records in zip(numbers, answers, strict=True) if not records]
    if unknown:
        raise UsageError(
            f"--dependency {job.dependency}: there is no job {', '.join(unknown)}",
            hint="`shoal jobs` lists those that Slurm knows",
        )


async def tracking_variables(
    connections: JobConnections, job: ResolvedJob, environ: Mapping[str, str], user_host: Host | None = None
) -> dict[str, str]:
    """The cluster's own tracking server, for a job that names no other. Its password goes by no script or argument.

    Rented containers do not reach it, and do not get its password. With `user_host` the password is the user's own.
    """
    if job.spec.tracking_uri or job.containers:
        return {}
    if user_host is not None:
        variables = job_variables((await user_host.run(ADDRESS_COMMAND, timeout=60, root=False)).text)
    else:
        variables = job_variables(await connections.tracking)
    # A server that somebody else set up has a password that only the operator knows.
    is_foreign_server = variables and "MLFLOW_TRACKING_USERNAME" not in variables
    return {**(_read_secrets(environ) if is_foreign_server else {}), **variables}


def check_secrets(job: JobSpec, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The credentials of the job's tracker, from the environment."""
    return _read_secrets(environ) if job.tracking_uri else {}


def _read_secrets(environ: Mapping[str, str]) -> dict[str, str]:
    secrets = {name: environ[name] for name in SECRETS if environ.get(name)}
    unprintable = [name for name, value in secrets.items() if not value.isprintable()]
    if unprintable:
        raise UsageError(f"{', '.join(unprintable)} is not a single line of text", hint="set it again, or unset it")
    return secrets


SUBMIT = r"""
while IFS= read -r line && [ -n "$line" ]; do export "$line"; done
exec sbatch --parsable
"""
"""Takes variables from standard input until an empty line; the rest is the script."""


async def submit(controller: Host, prepared: PreparedJob, variables: Mapping[str, str]) -> str:
    """Submit the batch job. Slurm stores the environment of sbatch with it, readable by its user and root only."""
    carried = encode_code(prepared.tree, prepared.runtime) if prepared.shipped.carried else ""
    variables = {SUBMISSION: os.urandom(4).hex(), **variables}
    head = "".join(f"{name}={value}\n" for name, value in variables.items()) + "\n"
    stdin = (head + prepared.script + carried).encode()
    result = await controller.run(["sh", "-c", SUBMIT], stdin=stdin, timeout=60, root=False)
    if result.status != 0:
        message = result.error_text.strip().removeprefix("sbatch: error: ")
        raise SlurmError(f"sbatch rejected the job: {message}", hint="`shoal run --dry-run` shows the script")
    return result.text.strip().partition(";")[0]
