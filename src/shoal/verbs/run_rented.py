"""What a job may need on nodes that are rented only then: nothing can be sent there before it is queued.

A machine finds all of it on shares. A container mounts none: when the job starts, the controller sends it the code and
an environment that nodes have for themselves, and fetches what the job writes.
"""

from __future__ import annotations

from collections.abc import Sequence

from shoal.environments.store import LOCAL_DIRECTORY, BuiltEnvironment
from shoal.errors import UsageError
from shoal.hostlist import compress
from shoal.jobs.model import JobSpec, ResolvedJob, job_root
from shoal.jobs.record import JOBS_DIRECTORY
from shoal.jobs.resolve import resolve
from shoal.roles.rented import rented_containers
from shoal.slurm.state import NodeState, PartitionState
from shoal.spec.rental import SANDBOX
from shoal.spec.storage import SANDBOX_SHARED
from shoal.verbs.context import Context


def resolve_rented(
    context: Context,
    job: JobSpec,
    nodes: Sequence[NodeState],
    partitions: Sequence[PartitionState],
    environment: BuiltEnvironment | None,
) -> ResolvedJob:
    """The job with every number known. Raises UsageError where nodes that are yet to be rented could not run it."""
    resolved_job = resolve(job, nodes, partitions, rented_containers(context.spec))
    if resolved_job.rented:
        shares = _shares(context)
        writable_shares = [share for share, is_writable in shares.items() if is_writable]
        _require_on_share(job_root(job, context.cluster), "the job's code", writable_shares, resolved_job.rented)
        if environment is not None:
            _require_on_share(environment.path, f"environment {environment.name}", list(shares), resolved_job.rented)
    if resolved_job.containers:
        _require_transferable(context, resolved_job, environment)
    return resolved_job


def _require_transferable(context: Context, job: ResolvedJob, environment: BuiltEnvironment | None) -> None:
    """Reject a job whose files could not be copied to a rented container, or back from it."""
    nodes = compress(job.containers)
    for option, value in (("--directory", job.spec.directory), ("--output", job.spec.output or job.spec.error)):
        if value is not None:
            raise UsageError(
                f"{nodes} would be rented containers, which share no directory: what {option} {value} names goes with"
                " them",
                hint=f"leave {option} out: logs and checkpoints come back to {JOBS_DIRECTORY}/{context.cluster} on"
                f" {context.controller.name}",
            )
    if environment is not None and not environment.path.startswith(f"{LOCAL_DIRECTORY}/"):
        copied_shares = [path for path, share in context.spec.storage.items() if not share.homes]
        if not _is_inside(environment.path, copied_shares):
            raise UsageError(
                f"{environment.path} is on no share of the cluster, so {nodes} would not have environment"
                f" {environment.name}",
                hint=f"give it `place: local` in the file, and run `shoal env build {environment.name}`",
            )


def _shares(context: Context) -> dict[str, bool]:
    """The directories that rented machines have when they come, and whether they may write there."""
    shares = {path: not share.read_only for path, share in context.spec.storage.items() if share.kind != "stage"}
    has_sandbox = any(member.provider == SANDBOX for member in context.members)
    return shares | ({SANDBOX_SHARED: True} if has_sandbox else {})


def _require_on_share(path: str, what: str, shares: Sequence[str], nodes: Sequence[str]) -> None:
    if not _is_inside(path, shares):
        hint = "give the cluster a share: `storage` in the file"
        if shares:
            hint = f"put it on one, such as {shares[0]}, or name other nodes with --nodelist"
        raise UsageError(f"{path} is on no share of the cluster, so {compress(nodes)} would not have {what}", hint=hint)


def _is_inside(path: str, directories: Sequence[str]) -> bool:
    return any(path == directory or path.startswith(f"{directory}/") for directory in directories)
