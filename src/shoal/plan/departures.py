"""Users and rented nodes that the spec no longer names, and what their removal costs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.agent.document import User
from shoal.hostlist import compress
from shoal.plan.model import Cost, HostPlan
from shoal.roles.cluster import Cluster
from shoal.roles.elastic import SPEC
from shoal.roles.shares import access_kind, homes_of
from shoal.slurm.state import ACTIVE_STATES, JobState
from shoal.spec.finding import Finding

JobsByUser = Mapping[str, Sequence[JobState]]
"""Jobs by user, those that wait included."""


def plan_user_departures(
    cluster: Cluster, hosts: Sequence[HostPlan], jobs: Iterable[JobState]
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], list[Finding]]:
    """The host plans with the cost of locking users, the jobs lost by it, and the findings.

    A user is locked, never deleted, so jobs run on. But where hosts mount every home by itself, a removed user's home
    is unmounted, and with it what a job writes there.
    """
    by_user = _jobs_of_locked(hosts, jobs)
    unmounts = _unmounts_homes(cluster)
    findings = [_finding(name, its_jobs, cluster.controller.name, unmounts) for name, its_jobs in by_user.items()]
    if not unmounts:
        return tuple(hosts), (), findings
    lost = tuple(job.id for its_jobs in by_user.values() for job in its_jobs)
    keys = {key for host in hosts for key, name in _locks(host) if name in by_user}
    return tuple(host.with_cost(Cost.JOBS, keys) for host in hosts), lost, findings


def _jobs_of_locked(hosts: Iterable[HostPlan], jobs: Iterable[JobState]) -> JobsByUser:
    leaving = sorted({name for host in hosts for _, name in _locks(host)})
    queued = [job for job in jobs if job.state != "COMPLETING"]
    by_user = {name: [job for job in queued if job.user == name] for name in leaving}
    return {name: its_jobs for name, its_jobs in by_user.items() if its_jobs}


def _locks(host: HostPlan) -> list[tuple[str, str]]:
    """Users that are to be locked on a host and are not yet, as (key, name)."""
    due = {change.what for change in host.changes}
    items = [item for _, document in host.stages for item in document]
    return [(item.key, item.name) for item in items if isinstance(item, User) and item.locked and item.key in due]


def _unmounts_homes(cluster: Cluster) -> bool:
    share = homes_of(cluster.spec)
    answered = [member.name for member in cluster.members if member.name in cluster.facts]
    return share is not None and any(access_kind(cluster, share, name) == "sshfs" for name in answered)


def _finding(name: str, jobs: Sequence[JobState], controller: str, unmounts: bool) -> Finding:
    home, run = "nodes that have their home over SSH lose it", "their jobs still run, the waiting ones too"
    return Finding(
        "warning",
        f"{name} is no longer named and gets locked; {home if unmounts else run}",
        f"job {', '.join(job.id for job in jobs)}",
        f"`scancel -u {name}` on {controller} ends what they have in the queue",
        path="users",
    )


def plan_rental_departures(
    names: Sequence[str], hosts: Sequence[HostPlan], jobs: Iterable[JobState]
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], list[Finding]]:
    """The host plans with the cost of the service's new spec, the jobs that lose their node, and the findings.

    The rental service releases a machine as soon as its spec has no such node; it does not wait for jobs.
    """
    if not names:
        return tuple(hosts), (), []
    what = f"{compress(names)}: no longer rented for the cluster; the controller gives back what is there of them"
    findings = [Finding("info", what)]
    lost = tuple(job.id for job in jobs if job.state in ACTIVE_STATES and {*names} & {*job.node_names})
    key = f"file {SPEC}"
    return tuple(host.with_cost(Cost.JOBS, {key}) for host in hosts) if lost else tuple(hosts), lost, findings
