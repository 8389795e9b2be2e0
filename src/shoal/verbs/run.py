"""`shoal run`: a script of your working tree as a Slurm job."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.contract import PROFILE_DIRECTORY
from shoal.errors import ShoalError, SlurmError, UsageError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.jobs.bundle import DEFAULT_LIMIT, Bundle, runtime, working_tree
from shoal.jobs.launchers import PROFILERS, is_profiler_missing
from shoal.jobs.model import SECRETS, JobPaths, JobSpec, ResolvedJob, job_root
from shoal.jobs.record import parse_records, show_command
from shoal.jobs.resolve import resolve
from shoal.jobs.script import sbatch_script
from shoal.jobs.ship import StorageState, clean, inspect_storage, mark, one_host_per_storage, require_all_hosts, send
from shoal.plan.connections import Connections
from shoal.remote.runner.node import SUBMISSION
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND, parse_nodes, parse_partitions
from shoal.spec.member import Member
from shoal.tracking.mlflow import ADDRESS_COMMAND, job_variables
from shoal.verbs.context import Context, compute_hosts
from shoal.verbs.slurmctld import gather_answers, slurm_output

if TYPE_CHECKING:
    from shoal.environments.store import BuiltEnvironment


MAX_EAGER_HOSTS = 16
"""All hosts of a cluster up to this size are connected at once, because the job may go to any of them."""


@dataclass(frozen=True)
class PreparedJob:
    """A job that is ready to be sent: what `--dry-run` shows and what is submitted are this one value."""

    job: ResolvedJob
    shipped: JobPaths
    tree: Bundle
    runtime: Bundle
    script: str
    environment: BuiltEnvironment | None = None


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


@dataclass(frozen=True)
class JobConnections:
    """The connections to a cluster, which may still be opening, and the questions its controller was asked."""

    fleet: Connections
    slurm: asyncio.Future[list[str]]
    """Slurm's nodes and partitions."""
    tracking: asyncio.Future[str]
    """The address of the tracking server."""


@asynccontextmanager
async def connect(context: Context, chosen: Sequence[Member] | None = None) -> AsyncIterator[JobConnections]:
    """Start to connect to the hosts that a job may need, and ask Slurm once its controller is connected."""
    controller = context.controller.name
    async with await context.connections(chosen) as fleet:
        fleet.start_connecting([controller])  # first: Slurm's answer takes longest
        if len(fleet.targets) <= MAX_EAGER_HOSTS:
            fleet.start_connecting(fleet.targets)

        async def ask_slurm() -> list[str]:
            host = await fleet.host(controller)
            return await gather_answers(host, slurm_output(host, NODES_COMMAND), slurm_output(host, PARTITIONS_COMMAND))

        async def ask_tracking() -> str:
            return (await (await fleet.host(controller)).run(ADDRESS_COMMAND, timeout=60)).text

        slurm, tracking = asyncio.ensure_future(ask_slurm()), asyncio.ensure_future(ask_tracking())
        try:
            yield JobConnections(fleet, slurm, tracking)
        finally:
            slurm.cancel()
            tracking.cancel()
            await asyncio.gather(slurm, tracking, return_exceptions=True)


async def dry_run(context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> PreparedJob:
    """What `run` would submit. Asks Slurm, changes nothing."""
    async with connect(context, [context.controller]) as connections:
        tree, runtime_bundle = await _bundles(job, here, limit)
        return await _resolve(context, connections, job, tree, runtime_bundle)


async def run(
    context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT, environ: Mapping[str, str] = os.environ
) -> SubmittedJob:
    """Send the working tree to the nodes and submit the job. Wrong jobs are rejected before anything is sent."""
    secrets = check_secrets(job, environ)
    async with connect(context) as connections:
        fleet = connections.fleet
        prepared, storages = await _prepare_and_inspect(context, connections, job, here, limit)
        resolved_job = prepared.job
        controller = await fleet.host(context.controller.name)
        if prepared.environment is not None:
            from shoal.verbs.env import require_environment

            await require_environment(fleet, prepared.environment, resolved_job.hosts)
        await _check_profiler(fleet, resolved_job)
        sent_bytes, tracking = await asyncio.gather(
            _ship(fleet, prepared, storages), _tracking(connections, resolved_job, environ)
        )
        number = await _sbatch(controller, prepared.script, {**secrets, **tracking})
        await _clean(fleet, controller, prepared, storages)
    return SubmittedJob(
        number,
        job.name,
        resolved_job.partition,
        resolved_job.nodes,
        resolved_job.world_size,
        prepared.tree.hash,
        sent_bytes,
        prepared.script,
        f"{prepared.shipped.root}/{number}/{PROFILE_DIRECTORY}" if job.profile and not job.array else "",
        _is_shared(storages, resolved_job),
        bool(job.array),
    )


async def _prepare_and_inspect(
    context: Context, connections: JobConnections, job: JobSpec, here: Path, limit: int
) -> tuple[PreparedJob, dict[str, StorageState]]:
    """The job, and what each node that Slurm may choose has already. Small clusters are inspected meanwhile."""
    tree, runtime_bundle = await _bundles(job, here, limit)
    fleet, root = connections.fleet, job_root(job, context.cluster)
    inspections: dict[str, asyncio.Future[StorageState]] = {}

    async def inspect_host(name: str) -> StorageState:
        return await inspect_storage(await fleet.host(name), root, tree.hash, runtime_bundle.hash)

    try:
        if len(fleet.targets) <= MAX_EAGER_HOSTS:
            inspections = {name: asyncio.ensure_future(inspect_host(name)) for name in compute_hosts(context)}
        prepared = await _resolve(context, connections, job, tree, runtime_bundle)
        names = prepared.job.hosts
        _require_known_hosts(names, fleet)
        if prepared.job.rented or prepared.job.containers:
            names = tuple(dict.fromkeys((*names, context.controller.name)))
        storages = await fleet.each(names, lambda name: inspections.get(name) or inspect_host(name))
    finally:
        for inspection in inspections.values():
            inspection.cancel()
        await asyncio.gather(*inspections.values(), return_exceptions=True)
    require_all_hosts(names, storages, fleet.failures)
    if prepared.job.rented and len({state.id for state in storages.values()}) > 1:
        raise UsageError(
            f"{root} is not the same on all hosts, so {compress(prepared.job.rented)} would not have the job's code",
            hint="name a directory on a share of all hosts with --directory, or other nodes with --nodelist",
        )
    return prepared, storages


async def _bundles(job: JobSpec, here: Path, limit: int) -> tuple[Bundle, Bundle]:
    return await asyncio.to_thread(lambda: (working_tree(here, job.script, limit), runtime()))


async def _resolve(
    context: Context, connections: JobConnections, job: JobSpec, tree: Bundle, runtime_bundle: Bundle
) -> PreparedJob:
    _require_accounting(context, job)
    environment: BuiltEnvironment | None = None
    if job.environment is not None:
        from shoal.verbs.env import job_environment  # it reads the whole spec, which no other job needs

        environment = await job_environment(context, connections.fleet, job.environment)
        job = job.model_copy(update={"python": environment.program})
    node_text, partition_text = await connections.slurm
    nodes, partitions = parse_nodes(node_text), parse_partitions(partition_text)
    root, place = job_root(job, context.cluster), environment.path if environment else ""
    if any(node.cloud for node in nodes):
        from shoal.verbs.run_rented import resolve_rented  # it reads the whole spec

        resolved_job = resolve_rented(context, job, nodes, partitions, environment)
    else:
        resolved_job = resolve(job, nodes, partitions)
    is_staged = bool(resolved_job.containers)
    paths = JobPaths(
        context.cluster, root, tree.hash, runtime_bundle.hash, tree.workdir, place, context.shares, is_staged
    )
    return PreparedJob(resolved_job, paths, tree, runtime_bundle, sbatch_script(resolved_job, paths), environment)


def _require_accounting(context: Context, job: JobSpec) -> None:
    options = [f"--{name}" for name in ("account", "qos") if getattr(job, name) is not None]
    if options and context.spec.accounting is None:
        raise UsageError(
            f"the cluster has no accounting, so Slurm would ignore {' and '.join(options)}",
            hint="put `accounting: true` into the file and run `shoal up`, or leave it out",
        )


def _require_known_hosts(names: Sequence[str], fleet: Connections) -> None:
    unknown = [name for name in names if name not in fleet.targets]
    if unknown:
        raise UsageError(
            f"the file does not name {', '.join(unknown)}, so the code cannot be sent there",
            hint="`shoal up` brings Slurm to what the file says",
        )


async def _check_profiler(fleet: Connections, job: ResolvedJob) -> None:
    """Raise where nodes lack the profiler: better now than after an hour in the queue."""
    if job.spec.profile is None:
        return

    async def is_missing_on(name: str) -> bool:
        return await is_profiler_missing(await fleet.host(name), job.spec)

    profiler = PROFILERS[job.spec.profile]
    missing = [name for name, is_missing in (await fleet.each(job.hosts, is_missing_on)).items() if is_missing]
    if missing:
        location = f"in {job.spec.python} " if profiler.python else ""
        raise UsageError(
            f"--profile {job.spec.profile} needs {profiler.needs}, which is missing {location}on {compress(missing)}",
            hint=f"{profiler.fix}, choose other nodes with --nodelist, or leave out --profile",
        )


async def _ship(fleet: Connections, prepared: PreparedJob, storages: Mapping[str, StorageState]) -> int:
    """Send the code to every node, or once to shared storage; returns how many bytes."""
    root = prepared.shipped.root
    is_shared = _is_shared(storages, prepared.job)

    async def send_to_host(name: str) -> int:
        host = await fleet.host(name)
        if storages[name].shared != is_shared:
            await mark(host, root, is_shared)
        return await send(host, root, prepared.tree, prepared.runtime, storages[name])

    hosts = one_host_per_storage(storages)
    bytes_by_host = await fleet.each(hosts, send_to_host)
    require_all_hosts(hosts, bytes_by_host, fleet.failures)
    return sum(bytes_by_host.values())


def _is_shared(storages: Mapping[str, StorageState], job: ResolvedJob) -> bool:
    return len(storages) + len(job.rented) > 1 and len({state.id for state in storages.values()}) == 1


async def _clean(
    fleet: Connections, controller: Host, prepared: PreparedJob, storages: Mapping[str, StorageState]
) -> None:
    """Remove old code where there is much of it. The job is submitted already, so failures are ignored."""
    hosts = [name for name in one_host_per_storage(storages) if storages[name].old]
    if not hosts:
        return
    with contextlib.suppress(ShoalError):
        active_records = [
            record for record in parse_records(await slurm_output(controller, show_command())) if record.active
        ]
        hashes = {
            digest for record in active_records if record.note for digest in (record.note.code, record.note.runtime)
        }

        async def clean_host(name: str) -> None:
            await clean(await fleet.host(name), prepared.shipped.root, [record.id for record in active_records], hashes)

        await fleet.each(hosts, clean_host)


async def _tracking(connections: JobConnections, job: ResolvedJob, environ: Mapping[str, str]) -> dict[str, str]:
    """The cluster's own tracking server, for a job that names no other. Its password goes by no script or argument.

    Rented containers do not reach it, and do not get its password.
    """
    if job.spec.tracking_uri or job.containers:
        return {}
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


async def _sbatch(controller: Host, script: str, secrets: Mapping[str, str]) -> str:
    """Submit the job. Slurm stores the environment of sbatch with it, readable by its user and root only."""
    variables = {SUBMISSION: os.urandom(4).hex(), **secrets}
    exports = "".join(f"{name}={value}\n" for name, value in variables.items())
    stdin = f"{exports}\n{script}".encode()
    result = await controller.run(["sh", "-c", SUBMIT], stdin=stdin, timeout=60, root=False)
    if result.status != 0:
        message = result.error_text.strip().removeprefix("sbatch: error: ")
        raise SlurmError(f"sbatch rejected the job: {message}", hint="`shoal run --dry-run` shows the script")
    return result.text.strip().partition(";")[0]
