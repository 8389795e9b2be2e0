"""Diff: from the spec, the facts and the agents' dry runs to a plan. Pure, but for `make_plan`, which asks agents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.agent.client import Report
from shoal.agent.document import Document
from shoal.errors import VersionWindow
from shoal.plan.fleet import Fleet
from shoal.plan.model import Change, Cost, HostPlan, Plan
from shoal.plan.observe import Observed
from shoal.providers.api import Instance, Request
from shoal.roles.cluster import Cluster, assemble
from shoal.roles.controller import GRES_CONF, SLURM_CONF
from shoal.roles.documents import Stage, documents
from shoal.slurm.conf import change_cost, loses_jobs, slurm_conf
from shoal.slurm.known import known_nodes
from shoal.slurm.model import Node
from shoal.slurm.versions import window_findings
from shoal.spec.finding import Finding
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

CLOCK_LIMIT = 60.0
"""Seconds of skew from which on we warn; munge refuses a credential at 300."""


@dataclass(frozen=True)
class Wanted:
    """What the cluster should become: at once, and once the leaving nodes are empty."""

    now: Cluster
    later: Cluster | None
    leaving: tuple[str, ...]


def wanted(spec: Spec, observed: Observed, reached: Mapping[str, str]) -> Wanted:
    """The desired cluster. Raises VersionWindow when the hosts' Slurm versions cannot talk to each other."""
    known = _known(spec, observed)
    names = {member.name for member in members_of(spec)}
    leaving = {name: _partitions_of(name, observed) for name in known if name not in names}
    now = assemble(spec, observed.facts, reached, known, leaving)
    _refuse_skew(now)
    later = assemble(spec, observed.facts, reached, known) if leaving else None
    return Wanted(now, later, tuple(leaving))


async def make_plan(
    spec: Spec,
    observed: Observed,
    fleet: Fleet,
    reached: Mapping[str, str],
    orphans: Sequence[tuple[str, Instance]] = (),
) -> Plan:
    """Ask each host, in one round trip, how it differs from what it should be."""
    goal = wanted(spec, observed, reached)
    stages = _stages(goal.now)

    async def dry_run(name: str) -> Report:
        agent = await fleet.agent(name)
        return await agent.check(_all(stages[name]))

    reports = await fleet.each(stages, dry_run)
    controller_cost = _controller_cost(goal.now)
    hosts = tuple(
        HostPlan(name, stages[name], _changes(name, report, controller_cost)) for name, report in reports.items()
    )
    after: tuple[HostPlan, ...] = ()
    if goal.later is not None:
        after = tuple(HostPlan(name, planned) for name, planned in _stages(goal.later).items() if name in reports)
    return Plan(
        cluster=spec.cluster,
        drain=goal.leaving,
        delete=tuple((provider, instance.name) for provider, instance in orphans),
        hosts=hosts,
        after_drain=after,
        findings=(*clock_findings(observed), *goal.now.findings),
        unreached={name: error.cause for name, error in fleet.failures.items()},
    )


def creation_plan(cluster: str, create: Sequence[tuple[str, Request]], orphans: Sequence[tuple[str, Instance]]) -> Plan:
    """The plan while hosts are still to be made: what they need can be said once they answer."""
    return Plan(
        cluster=cluster,
        create=tuple(create),
        delete=tuple((provider, instance.name) for provider, instance in orphans),
    )


def clock_findings(observed: Observed) -> list[Finding]:
    """Hosts whose clock is so far off that munge refuses their messages, or soon will."""
    return [
        Finding(
            level="error" if abs(fact.clock_offset) > 4 * CLOCK_LIMIT else "warning",
            what="the clock is off",
            found=f"{fact.clock_offset:+.0f} s against this machine",
            fix="run `timedatectl set-ntp true` on it; munge refuses messages from 300 s on",
            host=name,
        )
        for name, fact in observed.facts.items()
        if abs(fact.clock_offset) > CLOCK_LIMIT
    ]


def _known(spec: Spec, observed: Observed) -> dict[str, Node]:
    fact = observed.facts.get(members_of(spec)[0].name)
    if fact is None or SLURM_CONF not in fact.files:
        return {}
    conf, gres = fact.files[SLURM_CONF].text, fact.files.get(GRES_CONF)
    return known_nodes(conf or "", (gres.text if gres else None) or "")


def _partitions_of(name: str, observed: Observed) -> tuple[str, ...]:
    node = observed.slurm.nodes.get(name)
    return tuple(node.partitions) if node else ()


def _refuse_skew(cluster: Cluster) -> None:
    name = cluster.controller.name
    if name not in cluster.versions:
        return
    others = {host: version for host, version in cluster.versions.items() if host != name}
    findings = window_findings((name, cluster.versions[name]), others)
    if any(finding.level == "error" for finding in findings):
        raise VersionWindow(
            "the hosts' Slurm versions cannot talk to each other; nothing was changed\n"
            + "\n".join(f"  {finding}" for finding in findings)
        )


def _stages(cluster: Cluster) -> dict[str, tuple[tuple[Stage, Document], ...]]:
    return {
        member.name: tuple(sorted(documents(cluster, member).items()))
        for member in cluster.members
        if member.name in cluster.facts
    }


def _all(stages: tuple[tuple[Stage, Document], ...]) -> Document:
    return tuple(item for _, document in stages for item in document)


def _controller_cost(cluster: Cluster) -> Cost:
    """What the new slurm.conf costs, whole."""
    fact = cluster.facts[cluster.controller.name]
    old = fact.files[SLURM_CONF].text if SLURM_CONF in fact.files else None
    if old is None:
        return Cost.NOTHING
    new = slurm_conf(cluster.conf)
    if loses_jobs(old, new):
        return Cost.JOBS
    return Cost.RESTART if change_cost(old, new) == "restart" else Cost.NOTHING


def _changes(name: str, report: Report, controller_cost: Cost) -> tuple[Change, ...]:
    return tuple(
        Change(name, item.key, item.action, _cost(item.key, item.action, controller_cost), item.diff)
        for item in report.items
        if item.status != "ok"
    )


def _cost(key: str, action: str, controller_cost: Cost) -> Cost:
    if key == f"file {SLURM_CONF}":
        return controller_cost
    return Cost.RESTART if key.startswith("service ") and "restart" in action else Cost.NOTHING
