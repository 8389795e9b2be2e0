"""Users whom the file no longer names and who still have jobs: what becomes of these is said before a change."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.agent.document import User
from shoal.plan.model import Cost, HostPlan
from shoal.roles.cluster import Cluster
from shoal.roles.shares import homes_of, way_of
from shoal.slurm.state import JobState
from shoal.spec.finding import Finding

Jobs = Mapping[str, Sequence[JobState]]
"""Jobs by user, those that wait included."""


def of_leaving_users(
    cluster: Cluster, hosts: Sequence[HostPlan], jobs: Iterable[JobState]
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], list[Finding]]:
    """The plans with what it costs to lock users, the jobs that are lost with them, and what a person should know.

    An account is locked, never deleted, so jobs run on. But where hosts mount every home by itself, that of who leaves
    goes from them, and with it what a job writes there.
    """
    theirs = _jobs_of_locked(hosts, jobs)
    homes_go = _homes_go(cluster)
    findings = [_finding(name, some, cluster.controller.name, homes_go) for name, some in theirs.items()]
    if not homes_go:
        return tuple(hosts), (), findings
    lost = tuple(job.id for some in theirs.values() for job in some)
    keys = {key for host in hosts for key, name in _locks(host) if name in theirs}
    return tuple(host.at_cost(Cost.JOBS, keys) for host in hosts), lost, findings


def _jobs_of_locked(hosts: Iterable[HostPlan], jobs: Iterable[JobState]) -> Jobs:
    leaving = sorted({name for host in hosts for _, name in _locks(host)})
    queued = [job for job in jobs if job.state != "COMPLETING"]
    found = {name: [job for job in queued if job.user == name] for name in leaving}
    return {name: theirs for name, theirs in found.items() if theirs}


def _locks(host: HostPlan) -> list[tuple[str, str]]:
    """Users that are to be locked on a host and are not yet, as (key, name)."""
    due = {change.what for change in host.changes}
    items = [item for _, document in host.stages for item in document]
    return [(item.key, item.name) for item in items if isinstance(item, User) and item.locked and item.key in due]


def _homes_go(cluster: Cluster) -> bool:
    share = homes_of(cluster.spec)
    answered = [member.name for member in cluster.members if member.name in cluster.facts]
    return share is not None and any(way_of(cluster, share, name) == "sshfs" for name in answered)


def _finding(name: str, jobs: Sequence[JobState], controller: str, homes_go: bool) -> Finding:
    home, run = "nodes that have their home over SSH lose it", "their jobs still run, the waiting ones too"
    return Finding(
        "warning",
        f"{name} is no longer named and gets locked; {home if homes_go else run}",
        f"job {', '.join(job.id for job in jobs)}",
        f"`scancel -u {name}` on {controller} ends what they have in the queue",
        path="users",
    )
