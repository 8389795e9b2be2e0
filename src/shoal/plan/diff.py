"""Diff: from the spec, the facts and the agents' dry runs to a plan. Pure, but for `make_plan`, which asks agents."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.agent.client import Report
from shoal.agent.document import Document, User
from shoal.errors import SlurmError, VersionMismatch
from shoal.hostlist import compress
from shoal.hosts.provider import Instance
from shoal.plan.cluster_findings import clock_findings, dnf_findings, edited_findings, member_version_findings
from shoal.plan.connections import Fleet
from shoal.plan.model import Change, Cost, HostPlan, Plan
from shoal.plan.observe import Observation
from shoal.plan.progress import Phase
from shoal.plan.secret_values import add_digests, missing_secret_findings
from shoal.roles.accounting import database_host
from shoal.roles.assembly import assemble
from shoal.roles.auth import KEY
from shoal.roles.base import MUNGE_KEY, munge_secret
from shoal.roles.component import Cluster, Stage
from shoal.roles.current_conf import SLURM_CONF, read_current_conf
from shoal.roles.documents import documents
from shoal.roles.elastic import SPEC
from shoal.roles.gpu_driver import driver_keys
from shoal.roles.registry import component_findings, shared_secrets, user_secrets
from shoal.roles.shares import access_kind, homes_of
from shoal.roles.slurm_source import records_finding, unreadable
from shoal.slurm.conf import JWKS, slurm_conf
from shoal.slurm.parsed_conf import change_cost, loses_jobs
from shoal.slurm.state import ACTIVE_STATES, JobState
from shoal.spec.finding import Finding
from shoal.spec.members import members as members_of
from shoal.spec.members import rented_members
from shoal.spec.model import Spec


@dataclass(frozen=True)
class ClusterGoal:
    """What the cluster should become: now, and once the leaving nodes are empty."""

    now: Cluster
    later: Cluster | None
    leaving: tuple[str, ...]
    left: tuple[str, ...] = ()
    """Hosts that an earlier run configured and the spec no longer names."""
    new: bool = False
    """Whether the controller has no configuration yet."""
    rented: tuple[str, ...] = ()
    """Those of `left` that were rented when a job needed them."""


def cluster_goal(spec: Spec, observed: Observation, reached: Mapping[str, str]) -> ClusterGoal:
    """The desired cluster. Raises VersionMismatch when the hosts' Slurm versions cannot talk to each other."""
    members = members_of(spec)
    current = read_current_conf(observed.facts.get(members[0].name))
    rented_names = {member.name for member in rented_members(spec)}
    compute_names = {member.name for member in members if "compute" in member.roles} | rented_names
    leaving_nodes = tuple(name for name in current.nodes if name not in compute_names)
    now = assemble(spec, observed.facts, reached, current, leaving_nodes)
    _check_versions(now)
    later = assemble(spec, observed.facts, reached, current) if leaving_nodes else None
    names = {member.name for member in members} | rented_names
    left_hosts = tuple(name for name in {**current.nodes, **current.addresses} if name not in names)
    released_rentals = tuple(name for name in left_hosts if name in current.nodes and current.nodes[name].cloud)
    return ClusterGoal(
        now, later, leaving_nodes, left_hosts, new=not (current.nodes or current.addresses), rented=released_rentals
    )


def network_addresses(spec: Spec, observed: Observation, reached: Mapping[str, str]) -> Mapping[str, str]:
    """Where the members are on the cluster's network, by name."""
    return cluster_goal(spec, observed, reached).now.addresses


async def make_plan(
    spec: Spec,
    observed: Observation,
    fleet: Fleet,
    reached: Mapping[str, str],
    orphans: Sequence[tuple[str, Instance]] = (),
    phase: Phase | None = None,
) -> Plan:
    """Ask each host how it differs from what it should be: in one round trip, or in two while a node leaves."""
    goal = cluster_goal(spec, observed, reached)
    stages = _stages(goal.now)
    later_stages = _stages(goal.later) if goal.later is not None else {}

    async def dry_run(name: str) -> tuple[Report, Report]:
        agent = await fleet.agent(name)
        now = await agent.check(_join_stages(stages[name]))
        return now, await agent.check(_join_stages(later_stages[name])) if name in later_stages else now

    answers = await fleet.each(stages, dry_run, phase)
    reports = {name: now for name, (now, _) in answers.items()}
    ends_jobs, conf_jobs = _lost_jobs(goal.now, observed)
    # On a login host the file is only read by commands.
    costs = {goal.now.controller.name: _conf_cost(goal.now, ends_jobs)}
    hosts = tuple(
        HostPlan(name, stages[name], host_changes(name, report, costs.get(name, Cost.NOTHING)))
        for name, report in reports.items()
    )
    drivers = {key for name in reports for key in driver_keys(goal.now.facts_of(name))}
    hosts = tuple(host.with_cost(Cost.DRAIN, drivers) for host in hosts)
    hosts, user_jobs, user_findings = _lock_users(goal.now, hosts, observed.slurm.jobs)
    hosts, rental_jobs, rental_findings = _release_rentals(goal.rented, hosts, observed.slurm.jobs)
    later_hosts = tuple(
        HostPlan(name, later_stages[name], _later_changes(goal, host, later_stages[name], answers[name][1]))
        for host in hosts
        if (name := host.name) in later_stages
    )
    return Plan(
        cluster=spec.cluster,
        drain=goal.leaving,
        delete=tuple((provider, instance.name) for provider, instance in orphans),
        foreign=tuple(
            instance.name
            for provider_name, instance in orphans
            if goal.new and provider_name != goal.now.controller.provider
        ),
        hosts=hosts,
        after_drain=later_hosts,
        lost_jobs=tuple(dict.fromkeys((*conf_jobs, *user_jobs, *rental_jobs))),
        shared_secrets={**munge_secret(goal.now.controller.name), **shared_secrets(spec)},
        user_secrets=user_secrets(spec),
        findings=(
            *clock_findings(observed.facts),
            *member_version_findings(spec, goal.now.versions),  # errors were raised before
            *dnf_findings(spec, observed.facts),
            *goal.now.findings,
            *filter(None, [records_finding(goal.now, database_host(spec))]),
            *component_findings(goal.now),
            *user_findings,
            *rental_findings,
            *_failure_findings(reports),
            *edited_findings(reports),
            *missing_secret_findings(hosts, user_secrets(spec)),
            *_left_host_findings(goal, orphans),
        ),
        unreached=dict(fleet.failures),
    )


def _left_host_findings(goal: ClusterGoal, orphans: Sequence[tuple[str, Instance]]) -> list[Finding]:
    """Hosts that leave and are not deleted: Shoal has no address for them any more, and its files stay there."""
    findings = []
    for name in goal.left:
        if name in goal.rented or name in {instance.name for _, instance in orphans}:
            continue
        has_munge = goal.now.conf.munge
        key = "the munge key" if has_munge else "Slurm's key"
        if name in goal.leaving:
            what = f"slurmd and {key} stay on it"
            fix = f"put it back into the file and run `shoal node remove {name}`"
        else:
            what = f"{key} stays on it"
            remove = f"systemctl disable --now munge && rm {MUNGE_KEY}" if has_munge else f"rm {JWKS} {KEY}"
            fix = f"on it, as root: {remove}"
        findings.append(Finding("warning", f"leaves the cluster, and {what}", fix=fix, host=name))
    return findings


def _failure_findings(reports: Mapping[str, Report]) -> list[Finding]:
    """Items of which the agents already know that they will fail."""
    return [
        Finding("error", f"cannot apply {item.key}", item.detail, item.fix, host=name)
        for name, report in reports.items()
        for item in report.items
        if item.status == "failed"
    ]


def _check_versions(cluster: Cluster) -> None:
    name = cluster.controller.name
    if name not in cluster.versions:
        raise SlurmError(
            f"{name}: apt offers no slurmctld there; nothing was changed",
            hint="add a package source that has Slurm (Debian's main, Ubuntu's universe), or make another host the "
            "controller",
        )
    findings = member_version_findings(cluster.spec, cluster.versions)
    reject_versions(findings)


def reject_versions(findings: Sequence[Finding]) -> None:
    """Raise VersionMismatch where Slurm versions cannot talk to each other."""
    if any(finding.level == "error" for finding in findings):
        raise VersionMismatch(
            "the hosts' Slurm versions cannot talk to each other; nothing was changed\n"
            + "\n".join(f"  {finding.labelled}" for finding in findings),
            findings=tuple(findings),
        )


def _stages(cluster: Cluster) -> dict[str, tuple[tuple[Stage, Document], ...]]:
    secrets = user_secrets(cluster.spec)
    return {
        member.name: tuple(
            (stage, add_digests(document, secrets)) for stage, document in sorted(documents(cluster, member).items())
        )
        for member in cluster.members
        if member.name in cluster.facts
    }


def _join_stages(stages: tuple[tuple[Stage, Document], ...]) -> Document:
    return tuple(item for _, document in stages for item in document)


def _lost_jobs(cluster: Cluster, observed: Observation) -> tuple[bool, tuple[str, ...]]:
    """Whether the new slurm.conf ends jobs, and which of the present jobs those are.

    slurmctld fails every job, running or waiting, whose partition is gone when it reads the file.
    """
    old_conf = _slurm_conf(cluster)
    if not old_conf:
        return False, ()
    jobs = [job for job in observed.slurm.jobs if job.state != "COMPLETING"]
    if unreadable(cluster, cluster.controller.name, "slurmctld"):
        return True, tuple(job.id for job in jobs)
    if loses_jobs(old_conf, slurm_conf(cluster.conf)):
        return True, tuple(job.id for job in jobs if job.state in ACTIVE_STATES)
    old_partitions = read_current_conf(cluster.facts[cluster.controller.name]).partitions.values()
    removed_partitions = {name for names in old_partitions for name in names} - {
        partition.name for partition in cluster.conf.partitions
    }
    job_ids = tuple(job.id for job in jobs if set(job.partition.split(",")) <= removed_partitions)
    return bool(job_ids), job_ids


def _conf_cost(cluster: Cluster, ends_jobs: bool) -> Cost:
    """What the new slurm.conf costs."""
    old_conf = _slurm_conf(cluster)
    if not old_conf:
        return Cost.NOTHING
    return Cost.JOBS if ends_jobs else _step_cost(old_conf, slurm_conf(cluster.conf))


def _step_cost(old_conf: str, new_conf: str) -> Cost:
    return Cost.RESTART if change_cost(old_conf, new_conf) == "restart" else Cost.NOTHING


def _slurm_conf(cluster: Cluster) -> str:
    return cluster.facts[cluster.controller.name].text(SLURM_CONF)


def host_changes(name: str, report: Report, conf_cost: Cost = Cost.NOTHING) -> tuple[Change, ...]:
    """What a dry run found to do on a host; `conf_cost` is what a new slurm.conf costs there."""
    return tuple(
        Change(
            name,
            item.key,
            item.action if item.status != "failed" else f"cannot be applied: {item.detail}",
            _cost(item.key, item.action, conf_cost),
            item.diff,
        )
        for item in report.items
        if item.status != "ok"
    )


def _later_changes(
    goal: ClusterGoal, host: HostPlan, stages: tuple[tuple[Stage, Document], ...], report: Report
) -> tuple[Change, ...]:
    """What changes on a host once the leaving nodes are empty, beyond what has changed by then."""
    assert goal.later is not None
    cost = Cost.NOTHING
    if host.name == goal.now.controller.name:
        cost = _step_cost(slurm_conf(goal.now.conf), slurm_conf(goal.later.conf))
    items = {item.key: item for item in _join_stages(host.stages)}
    applied_keys = {change.what for change in host.changes}
    applied_keys &= {item.key for item in _join_stages(stages) if items.get(item.key) == item}
    condition = f"once {compress(goal.leaving)} is empty"
    return tuple(
        replace(change, action=f"{change.action}, {condition}")
        for change in host_changes(host.name, report, cost)
        if change.what not in applied_keys
    )


def _cost(key: str, action: str, conf_cost: Cost) -> Cost:
    if key == f"file {SLURM_CONF}":
        return conf_cost
    if key.startswith("service ") and "restart" in action:
        return Cost.RESTART
    # Nothing may run under an account while its id changes.
    return Cost.RESTART if action.startswith("change the id of ") else Cost.NOTHING


def _lock_users(
    cluster: Cluster, hosts: Sequence[HostPlan], jobs: Iterable[JobState]
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], list[Finding]]:
    """The host plans with the cost of locking users, the jobs lost by it, and the findings.

    A user is locked, never deleted, so jobs run on. But where hosts mount every home by itself, a removed user's home
    is unmounted, and with it what a job writes there.
    """
    user_names = sorted({name for host in hosts for _, name in _locks(host)})
    queue = [job for job in jobs if job.state != "COMPLETING"]
    jobs_by_user = {name: user_jobs for name in user_names if (user_jobs := [job for job in queue if job.user == name])}
    share, host_names = homes_of(cluster.spec), [m.name for m in cluster.members if m.name in cluster.facts]
    unmounts = share is not None and any(access_kind(cluster, share, name) == "sshfs" for name in host_names)
    findings = [
        _lock_finding(name, user_jobs, cluster.controller.name, unmounts) for name, user_jobs in jobs_by_user.items()
    ]
    if not unmounts:
        return tuple(hosts), (), findings
    job_ids = tuple(job.id for user_jobs in jobs_by_user.values() for job in user_jobs)
    keys = {key for host in hosts for key, name in _locks(host) if name in jobs_by_user}
    return tuple(host.with_cost(Cost.JOBS, keys) for host in hosts), job_ids, findings


def _locks(host: HostPlan) -> list[tuple[str, str]]:
    """Users that are to be locked on a host and are not yet, as (key, name)."""
    changed_keys = {change.what for change in host.changes}
    items = [item for _, document in host.stages for item in document]
    return [
        (item.key, item.name) for item in items if isinstance(item, User) and item.locked and item.key in changed_keys
    ]


def _lock_finding(name: str, jobs: Sequence[JobState], controller: str, unmounts: bool) -> Finding:
    home_text, jobs_text = "nodes that have their home over SSH lose it", "their jobs still run, the waiting ones too"
    return Finding(
        "warning",
        f"{name} is no longer named and gets locked; {home_text if unmounts else jobs_text}",
        f"job {', '.join(job.id for job in jobs)}",
        f"`scancel -u {name}` on {controller} ends what they have in the queue",
        path="users",
    )


def _release_rentals(
    names: Sequence[str], hosts: Sequence[HostPlan], jobs: Iterable[JobState]
) -> tuple[tuple[HostPlan, ...], tuple[str, ...], list[Finding]]:
    """The host plans with the cost of the service's new spec, the jobs that lose their node, and the findings.

    The rental service releases a machine as soon as its spec has no such node; it does not wait for jobs.
    """
    if not names:
        return tuple(hosts), (), []
    what = f"{compress(names)}: no longer rented for the cluster; the controller releases their machines"
    job_ids = tuple(job.id for job in jobs if job.state in ACTIVE_STATES and {*names} & {*job.node_names})
    costly_keys = {f"file {SPEC}"} if job_ids else ()
    return tuple(host.with_cost(Cost.JOBS, costly_keys) for host in hosts), job_ids, [Finding("info", what)]
