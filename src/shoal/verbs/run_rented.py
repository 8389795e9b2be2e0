"""What a job may need on nodes that are rented only then: all of it must be on shares, as nothing can be sent there."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.environments.place import Made
from shoal.errors import UsageError
from shoal.hostlist import compress
from shoal.jobs.model import ResolvedJob
from shoal.roles.rented import rented_containers
from shoal.spec.rented import SANDBOX
from shoal.spec.storage_rules import SANDBOX_SHARED
from shoal.verbs.context import Context


def expect_on_shares(context: Context, job: ResolvedJob, root: str, environment: Made | None) -> None:
    """Refuse a job whose rented nodes would lack its code or its environment. `root` is the jobs' directory."""
    containers = [name for name in rented_containers(context.spec) if name in job.rented]
    if containers:
        raise UsageError(
            f"{compress(containers)} would be rented containers, which mount no share: the job's code is not there",
            hint="name other nodes with --nodelist or --partition, or give a script of your own to sbatch",
        )
    shares = _shares(context)
    _expect(root, "the job's code", [share for share, writable in shares.items() if writable], job)
    if environment is not None:
        _expect(environment.path, f"environment {environment.name}", list(shares), job)


def _shares(context: Context) -> dict[str, bool]:
    """The directories that rented nodes have when they come, and whether they may write there."""
    found = {path: not one.read_only for path, one in context.spec.storage.items() if one.kind != "stage"}
    sandbox = any(member.provider == SANDBOX for member in context.members)
    return found | ({SANDBOX_SHARED: True} if sandbox else {})


def _expect(path: str, what: str, shares: Sequence[str], job: ResolvedJob) -> None:
    if not any(path == share or path.startswith(f"{share}/") for share in shares):
        raise UsageError(
            f"{path} is on no share of the cluster, so {compress(job.rented)} would not have {what}",
            hint=f"put it on one, such as {shares[0]}, or name other nodes with --nodelist"
            if shares
            else "give the cluster a share: `storage` in the file",
        )
