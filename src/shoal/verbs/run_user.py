"""`shoal run` of an ordinary user: everything is written as that user, through the one host they log in to.

Where the user's directory for jobs is on a share, the code is written there once. Otherwise each node has such a
directory of its own, and the batch script carries the code. Rented containers get it from the controller.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shoal.contract import PROFILE_DIRECTORY
from shoal.environments.store import LOCAL_DIRECTORY, BuiltEnvironment
from shoal.errors import UsageError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.jobs.model import JobPaths, JobSpec, ResolvedJob
from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.jobs.resolve import resolve
from shoal.jobs.script import sbatch_script
from shoal.jobs.ship import StorageState, mark, send
from shoal.remote import python_command
from shoal.remote.job_directory import EXIT_WITH_CAUSE
from shoal.slurm.state import NodeState, PartitionState, parse_nodes, parse_partitions
from shoal.spec.cluster_record import ClusterRecord
from shoal.verbs.context import Context
from shoal.verbs.submission import (
    JobConnections,
    PreparedJob,
    SubmittedJob,
    check_secrets,
    make_bundles,
    require_accounting,
    require_dependencies,
    submit,
    tracking_variables,
)

STORAGE_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class UserStorage:
    """A user's own directory for jobs."""

    root: str
    user: str
    code: bool
    """The code is there already."""
    runtime: bool
    marked: bool
    """A job was told that it is shared."""
    shared: bool
    """All nodes have the directory in common."""

    @property
    def on_each_host(self) -> bool:
        """Each host has one of its own under the same name: `up` has made it."""
        return self.root == f"{USER_JOBS_DIRECTORY}/{self.user}"


@dataclass(frozen=True)
class PreparedUserJob:
    prepared: PreparedJob
    storage: UserStorage


async def run_as_user(
    context: Context,
    connections: JobConnections,
    record: ClusterRecord,
    job: JobSpec,
    here: Path,
    limit: int,
    environ: Mapping[str, str],
) -> SubmittedJob:
    """Write the working tree to the user's directory and submit the job, all as the user who is logged in."""
    secrets = check_secrets(job, environ)
    host = await connections.fleet.host(context.controller.name)
    await require_dependencies(host, job)
    ready = await prepare_as_user(context, connections, record, job, here, limit)
    prepared, storage = ready.prepared, ready.storage
    sent_bytes = prepared.carried_bytes
    if prepared.shipped.staged or not prepared.shipped.carried:
        sent_bytes += await _write_code(host, prepared, storage)
    # An operator's connection has asked as root, for the password of root's jobs.
    user_host = host if context.joined is None else None
    tracking = await tracking_variables(connections, prepared.job, environ, user_host)
    number = await submit(host, prepared, {**secrets, **tracking})
    from shoal.verbs.unsent_files import note_tree  # slow to import, and the job is on its way

    note_tree(context, number, here, prepared.tree)
    resolved = prepared.job
    return SubmittedJob(
        number,
        job.name,
        resolved.partition,
        resolved.nodes,
        resolved.world_size,
        prepared.tree.hash,
        sent_bytes,
        prepared.script,
        f"{storage.root}/{number}/{PROFILE_DIRECTORY}" if job.profile and not job.array else "",
        storage.shared,
        bool(job.array),
        prepared.tree.left_out,
    )


async def prepare_as_user(
    context: Context, connections: JobConnections, record: ClusterRecord, job: JobSpec, here: Path, limit: int
) -> PreparedUserJob:
    """The job, and the directory that it will use, which is made where it is missing."""
    tree, runtime = await make_bundles(job, here, limit)
    host = await connections.fleet.host(context.controller.name)
    require_accounting(context, job)
    storage = await _own_storage(host, record, job, tree.hash, runtime.hash)
    environment = None
    if job.environment:
        from shoal.verbs.env_user import user_job_environment  # it imports what builds clusters

        environment = await user_job_environment(host, record, job.environment)
        job = replace(job, python=environment.program)
    node_text, partition_text = await connections.slurm
    nodes, partitions, image = parse_nodes(node_text), parse_partitions(partition_text), None
    if job.image or job.container_name:
        from shoal.verbs.images import job_image, nodes_with_images  # few jobs have one

        able = nodes_with_images(job, nodes, partitions)
        image = await job_image(host, record, job, able, context.progress)
        job = replace(job, constraint=image.constraint(job.constraint))
        nodes = [node for node in nodes if node.name not in image.unfit]
    resolved = _resolve(record, job, storage, nodes, partitions)
    resolved = replace(resolved, exclude=(*resolved.exclude, *(image.unfit if image else ())))
    if resolved.containers:
        await _require_transferable(host, record, resolved, environment)
        if not storage.on_each_host:
            local = replace(job, directory=f"{USER_JOBS_DIRECTORY}/{storage.user}")
            storage = await _own_storage(host, record, local, tree.hash, runtime.hash)
    is_carried = storage.on_each_host and bool(resolved.hosts or resolved.rented)
    if not storage.shared and not storage.on_each_host and resolved.hosts != (record.controller,):
        raise UsageError(
            f"{storage.root} is not on a share, so other nodes than {record.controller} would not have the job's code",
            hint=f"leave out --directory, name one on a share, or use --nodelist {record.controller}",
        )
    shipped = JobPaths(
        context.cluster,
        storage.root,
        tree.hash,
        runtime.hash,
        tree.workdir,
        environment.path if environment else "",
        context.shares,
        bool(resolved.containers),
        is_carried,
        image=image,
    )
    script = sbatch_script(resolved, shipped)
    return PreparedUserJob(PreparedJob(resolved, shipped, tree, runtime, script, environment), storage)


async def _own_storage(host: Host, record: ClusterRecord, job: JobSpec, code: str, runtime: str) -> UserStorage:
    """Make the user's directory and check that nobody else can change what is in it."""
    fix = "name a directory of your own with --directory; over SSH shares cannot have one"
    answer = await make_user_directory(host, record, fix, job.directory or "", code, runtime)
    root = answer["root"]
    share = next((path for path in record.shares if f"{root}/".startswith(f"{path}/")), None)
    if share is not None and not record.shares[share].private:
        raise UsageError(
            f"{root} is on {share}, where not all hosts keep the owners of files: others could change your code",
            hint="leave out --directory, or name one on another share",
        )
    return UserStorage(**answer, shared=share is not None)


async def make_user_directory(
    host: Host, record: ClusterRecord, fix: str, directory: str = "", code: str = "", runtime: str = ""
) -> dict[str, Any]:
    """Make the directory where a user keeps jobs and environments; which it is, and what it has of this code."""
    command = python_command("job_directory", "make", record.cluster, record.jobs, directory, code, runtime)
    result = await host.run(command, timeout=STORAGE_TIMEOUT_S, root=False)
    if result.status != 0:
        cause = result.error_text.strip() if result.status == EXIT_WITH_CAUSE else "python3 does not run there"
        raise UsageError(f"cannot keep files of yours on {host.name}: {cause}", hint=fix)
    answer: dict[str, Any] = json.loads(result.text)
    return answer


def _resolve(
    record: ClusterRecord,
    job: JobSpec,
    storage: UserStorage,
    nodes: Sequence[NodeState],
    partitions: Sequence[PartitionState],
) -> ResolvedJob:
    """The job with every number known.

    Rented containers have no share. So a job that has one runs on other nodes, where there are such.
    """
    boxes = {node.name for node in nodes if node.name in record.containers}
    if storage.shared or storage.on_each_host:
        job = replace(job, directory=storage.root)  # rented machines have it, or get the code
    if boxes and not storage.shared:
        return resolve(job, nodes, partitions, boxes)
    try:
        resolved = resolve(job, [node for node in nodes if node.name not in boxes], partitions)
    except UsageError:
        if not boxes:
            raise
        with contextlib.suppress(UsageError):
            return resolve(job, [node for node in nodes if node.name in boxes], partitions, boxes)
        raise
    inside = [name for node in nodes if (name := node.name) in boxes and resolved.partition in node.partitions]
    return replace(resolved, exclude=(*resolved.exclude, *inside))


async def _require_transferable(
    host: Host, record: ClusterRecord, job: ResolvedJob, environment: BuiltEnvironment | None
) -> None:
    """Reject a job whose files could not be copied to a rented container, or back from it."""
    names = compress(job.containers)
    output = job.spec.output or job.spec.error
    if output is not None:
        raise UsageError(
            f"{names} would be rented containers, which share no directory: --output {output} would go with them",
            hint="leave it out: `shoal logs` shows all output",
        )
    if environment is not None and not environment.path.startswith(f"{LOCAL_DIRECTORY}/"):
        raise UsageError(
            f"environment {environment.name} is in {environment.path}, which {names} would not have",
            hint="ask the operator to give it `place: local`, or use --python",
        )
    from shoal.roles.rented import PROGRAMS  # slow to import, and no other job needs it

    if (await host.run(("test", "-d", PROGRAMS), timeout=STORAGE_TIMEOUT_S, root=False)).status != 0:
        raise UsageError(
            f"{names} would be rented containers, which get their files from {record.controller}",
            hint=f"log in there: `shoal join USER@{record.controller}`",
        )


async def _write_code(host: Host, prepared: PreparedJob, storage: UserStorage) -> int:
    if storage.marked != storage.shared:
        await mark(host, storage.root, storage.shared, as_root=False)
    state = StorageState("", storage.shared, storage.code, storage.runtime)
    return await send(host, storage.root, prepared.tree, prepared.runtime, state, as_root=False)
