"""`shoal run`: a script of your working tree as a Slurm job."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from shoal.contract import PROFILE_DIRECTORY
from shoal.errors import ShoalError, UsageError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.jobs.bundle import DEFAULT_LIMIT, Bundle
from shoal.jobs.launchers import PROFILERS, is_profiler_missing
from shoal.jobs.model import JobPaths, JobSpec, ResolvedJob, job_root
from shoal.jobs.resolve import resolve
from shoal.jobs.script import sbatch_script
from shoal.jobs.ship import (
    StorageState,
    clean,
    inspect_directory,
    inspect_storage,
    mark,
    one_host_per_storage,
    require_all_hosts,
    send,
)
from shoal.plan.connections import Connections
from shoal.slurm.state import parse_nodes, parse_partitions
from shoal.spec.cluster_record import ClusterRecord, RecordShare
from shoal.verbs.context import Context, compute_hosts
from shoal.verbs.early_login import MAX_EAGER_HOSTS
from shoal.verbs.operator_login import OperatorLogin
from shoal.verbs.run_user import prepare_as_user, run_as_user
from shoal.verbs.slurmctld import current_jobs
from shoal.verbs.submission import (
    JobConnections,
    PreparedJob,
    SubmittedJob,
    check_secrets,
    connect,
    make_bundles,
    require_accounting,
    require_dependencies,
    submit,
    tracking_variables,
)

if TYPE_CHECKING:
    from shoal.containers.images import JobImage
    from shoal.environments.store import BuiltEnvironment

NFS_NOBODY = 65534
"""Who root of a client is on an NFS share."""


async def dry_run(context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> PreparedJob:
    """What `run` would submit. Asks Slurm, changes nothing."""
    async with connect(context, [context.controller]) as connections:
        record = await _record_of_user(context, connections)
        if record is not None:
            return (await prepare_as_user(context, connections, record, job, here, limit)).prepared
        tree, runtime_bundle = await make_bundles(job, here, limit)
        prepared = await _resolve(context, connections, job, tree, runtime_bundle)
        login = await connections.login
        share = login.share_of(job.directory or "")
        return _with_own_code(prepared, login, share) if share else prepared


async def run(
    context: Context,
    job: JobSpec,
    here: Path,
    limit: int = DEFAULT_LIMIT,
    environ: Mapping[str, str] = os.environ,
) -> SubmittedJob:
    """Send the working tree to the nodes and submit the job. Wrong jobs are rejected before anything is sent."""
    secrets = check_secrets(job, environ)
    async with connect(context) as connections:
        record = await _record_of_user(context, connections)
        if record is not None:
            return await run_as_user(context, connections, record, job, here, limit, environ)
        fleet = connections.fleet
        share = (await connections.login).share_of(job.directory or "")
        prepare = _prepare_and_inspect if share is None else _prepare_on_share
        prepared, storages = await prepare(context, connections, job, here, limit)
        resolved_job = prepared.job
        controller = await fleet.host(context.controller.name)
        if prepared.environment is not None:
            from shoal.verbs.env import require_environment

            await require_environment(fleet, prepared.environment, resolved_job.hosts)
        await asyncio.gather(_check_profiler(fleet, resolved_job), require_dependencies(controller, job))
        sent_bytes, tracking = await asyncio.gather(
            _ship(fleet, prepared, storages), tracking_variables(connections, resolved_job, environ)
        )
        number = await submit(controller, prepared, {**secrets, **tracking})
        from shoal.verbs.unsent_files import note_tree  # slow to import, and the job is on its way

        note_tree(context, number, here, prepared.tree)
        await _clean(fleet, controller, prepared, storages)
    return SubmittedJob(
        number,
        job.name,
        resolved_job.partition,
        resolved_job.nodes,
        resolved_job.world_size,
        prepared.tree.hash,
        sent_bytes + prepared.carried_bytes,
        prepared.script,
        f"{prepared.shipped.root}/{number}/{PROFILE_DIRECTORY}" if job.profile and not job.array else "",
        _is_shared(storages, resolved_job),
        bool(job.array),
        prepared.tree.left_out,
    )


async def _record_of_user(context: Context, connections: JobConnections) -> ClusterRecord | None:
    """What the cluster tells its users, where the person is logged in as one of them; None for root and others."""
    if context.joined is not None:
        await connections.fleet.host(context.controller.name)  # a login reads the record anew
        return context.joined.record
    login = await connections.login
    return login.record if login.is_user else None


async def _prepare_on_share(
    context: Context, connections: JobConnections, job: JobSpec, here: Path, limit: int
) -> tuple[PreparedJob, dict[str, StorageState]]:
    """The same for a directory on a share. Others may write there, so no code runs from it: the batch script has it."""
    tree, runtime_bundle = await make_bundles(job, here, limit)
    fleet, root, login = connections.fleet, job_root(job, context.cluster), await connections.login
    prepared = await _resolve(context, connections, job, tree, runtime_bundle)
    names = prepared.job.hosts
    _require_known_hosts(names, fleet)
    if prepared.job.rented:
        names = tuple(dict.fromkeys((*names, context.controller.name)))

    async def inspect_host(name: str) -> StorageState:
        return await inspect_directory(await fleet.host(name), root)

    storages = await fleet.each(names, inspect_host)
    require_all_hosts(names, storages, fleet.failures)
    if len({state.id for state in storages.values()}) > 1:
        raise UsageError(
            f"{root} is not the same on all hosts", hint="`shoal check` says whether the share is there on all of them"
        )
    share = login.share_of(root)
    assert share is not None
    owners = {state.owner for state in storages.values()}
    if prepared.job.rented and share.kind == "nfs":
        owners.add(NFS_NOBODY)
    return _with_own_code(prepared, login, share, max(owners) if len(owners) > 1 else 0), storages


def _with_own_code(prepared: PreparedJob, login: OperatorLogin, share: RecordShare, owner: int = 0) -> PreparedJob:
    """The job with its code in a directory of each node that is root's, or the login's own. Root is `owner` on some."""
    paths = replace(
        prepared.shipped,
        carried=True,
        code_root=login.code_directory,
        own_tree=not share.private,
        owner=owner if login.uid == 0 else 0,
    )
    return replace(prepared, shipped=paths, script=sbatch_script(prepared.job, paths))


async def _prepare_and_inspect(
    context: Context, connections: JobConnections, job: JobSpec, here: Path, limit: int
) -> tuple[PreparedJob, dict[str, StorageState]]:
    """The job, and what each node that Slurm may choose has already. Small clusters are inspected meanwhile."""
    tree, runtime_bundle = await make_bundles(job, here, limit)
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


async def _resolve(
    context: Context, connections: JobConnections, job: JobSpec, tree: Bundle, runtime_bundle: Bundle
) -> PreparedJob:
    require_accounting(context, job)
    environment: BuiltEnvironment | None = None
    if job.environment is not None:
        from shoal.verbs.env import job_environment  # it reads the whole spec, which no other job needs

        environment = await job_environment(context, connections.fleet, job.environment)
        job = replace(job, python=environment.program)
    node_text, partition_text = await connections.slurm
    nodes, partitions = parse_nodes(node_text), parse_partitions(partition_text)
    image: JobImage | None = None
    if job.image or job.container_name:
        from shoal.verbs.images import job_image, nodes_with_images  # few jobs have one

        controller, login = await connections.fleet.host(context.controller.name), await connections.login
        able = nodes_with_images(job, nodes, partitions)
        image = await job_image(controller, login.record, job, able, context.progress)
        job = replace(job, constraint=image.constraint(job.constraint))
        nodes = [node for node in nodes if node.name not in image.unfit]
    root, place = job_root(job, context.cluster), environment.path if environment else ""
    if any(node.cloud for node in nodes):
        from shoal.verbs.run_rented import resolve_rented  # it reads the whole spec

        resolved_job = resolve_rented(context, job, nodes, partitions, environment)
    else:
        resolved_job = resolve(job, nodes, partitions)
    resolved_job = replace(resolved_job, exclude=(*resolved_job.exclude, *(image.unfit if image else ())))
    is_staged = bool(resolved_job.containers)
    paths = JobPaths(
        context.cluster,
        root,
        tree.hash,
        runtime_bundle.hash,
        tree.workdir,
        place,
        context.shares,
        is_staged,
        image=image,
    )
    return PreparedJob(resolved_job, paths, tree, runtime_bundle, sbatch_script(resolved_job, paths), environment)


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
        if prepared.shipped.carried:
            return 0
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
        active_records = [record for record in await current_jobs(controller) if record.active]
        hashes = {
            digest for record in active_records if record.note for digest in (record.note.code, record.note.runtime)
        }

        async def clean_host(name: str) -> None:
            await clean(await fleet.host(name), prepared.shipped.root, [record.id for record in active_records], hashes)

        await fleet.each(hosts, clean_host)
