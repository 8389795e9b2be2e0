"""Rented nodes that the file no longer has: their machines are given back at once, and jobs on them start again.

The service on the controller gives a machine back as soon as its file has no such node; it does not wait as `up` waits
for jobs on other nodes that leave.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from shoal.hostlist import compress
from shoal.plan.model import Cost, HostPlan
from shoal.roles.elastic import SPEC
from shoal.slurm.state import ACTIVE_STATES, JobState
from shoal.spec.finding import Finding


def of_leaving_rented(
    names: Sequence[str], hosts: Sequence[HostPlan], jobs: Iterable[JobState]
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], list[Finding]]:
    """The plans with what the new file of the service costs, the jobs that lose their node, and what to say of it."""
    if not names:
        return tuple(hosts), (), []
    what = f"{compress(names)}: no longer rented for the cluster; the controller gives back what is there of them"
    told = [Finding("info", what)]
    lost = tuple(job.id for job in jobs if job.state in ACTIVE_STATES and {*names} & {*job.node_names})
    key = f"file {SPEC}"
    return tuple(host.at_cost(Cost.JOBS, {key}) for host in hosts) if lost else tuple(hosts), lost, told
