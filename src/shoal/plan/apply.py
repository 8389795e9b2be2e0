"""Apply: bring the hosts to what a plan says, stage by stage, and wait until Slurm sees every node."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.agent.client import Report
from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.errors import CommandTimeout, SlurmError
from shoal.hosts.api import Host
from shoal.plan.connections import Fleet
from shoal.plan.diff import host_changes
from shoal.plan.model import Change, HostPlan, Plan
from shoal.plan.nodes import LEAVING_REASON, drain_nodes, jobs_on, resume_nodes, resume_not_responding, unready_nodes
from shoal.plan.progress import ProgressReporter
from shoal.plan.secret_values import fetch_secrets
from shoal.roles.component import Stage
from shoal.roles.registry import preparation, shared_secrets, user_secrets
from shoal.spec.members import all_members
from shoal.spec.model import Spec

TITLES = {
    Stage.BASE: "packages, keys, names",
    Stage.SERVICES: "services",
    Stage.CONTROLLER: "controller",
    Stage.NODES: "nodes",
}


@dataclass(frozen=True)
class ApplyTimeouts:
    """How long to wait for Slurm, in seconds."""

    nodes_s: float = 60.0
    """For every node to register."""
    drain_s: float | None = None
    """For a leaving node to become empty; None waits for its jobs without a limit."""


@dataclass(frozen=True)
class ApplyResult:
    """What an apply changed, and what it left undone."""

    changed: tuple[str, ...] = ()
    """Hosts with at least one change."""
    unready: tuple[tuple[str, str], ...] = ()
    """Nodes that are not ready in Slurm, with the reason."""
    staying: tuple[str, ...] = ()
    """Nodes that are drained and still busy; the next run removes them."""


async def apply(
    plan: Plan, fleet: Fleet, controller: str, nodes: Sequence[str], progress: ProgressReporter, timeouts: ApplyTimeouts
) -> ApplyResult:
    """Apply the plan. `nodes` are the compute nodes that must be ready at the end."""
    is_drained = await _drain(plan.drain, fleet, controller)
    changed_names = await _converge(plan, [host for host in plan.hosts if host.changes], fleet, controller, progress)
    busy_nodes: tuple[str, ...] = ()
    if plan.drain:
        if not is_drained:
            await drain_nodes(await fleet.host(controller), plan.drain)
        busy_nodes = await _wait_until_empty(plan.drain, fleet, controller, progress, timeouts)
        if not busy_nodes:
            changed_names += await _converge(plan, plan.after_drain, fleet, controller, progress)
    unready = await _wait_for_nodes(nodes, fleet, controller, progress, timeouts)
    return ApplyResult(tuple(dict.fromkeys(changed_names)), unready, busy_nodes)


async def _drain(names: Sequence[str], fleet: Fleet, controller: str) -> bool:
    """Drain first, so that no job starts on a leaving node. False where slurmctld does not answer yet."""
    try:
        await drain_nodes(await fleet.host(controller), names)
    except (SlurmError, CommandTimeout):
        return False
    return True


async def _converge(
    plan: Plan, hosts: Sequence[HostPlan], fleet: Fleet, controller: str, progress: ProgressReporter
) -> list[str]:
    """All stages on these hosts; a host that fails drops out, a controller that fails ends the run."""
    changed_names: list[str] = []
    for stage in Stage if hosts else ():
        documents = {host.name: host.document(stage) for host in hosts if host.name not in fleet.failures}
        documents = {name: document for name, document in documents.items() if document}
        secrets = await fetch_secrets(
            documents.values(), plan.shared_secrets, plan.user_secrets, fleet, hosts_have_theirs=True
        )
        fleet.require(controller)
        if not documents:
            continue
        with progress.phase(TITLES[stage], len(documents)) as phase:
            reports = await fleet.converge_all(documents, secrets, phase)
        changed_names += [name for name, report in reports.items() if report.changed]
        fleet.require(controller)
    return changed_names


async def _wait_until_empty(
    names: Sequence[str], fleet: Fleet, controller: str, progress: ProgressReporter, timeouts: ApplyTimeouts
) -> tuple[str, ...]:
    """Wait for the jobs on leaving nodes. Returns the nodes that are still busy after the timeout."""
    host, clock = await fleet.host(controller), asyncio.get_running_loop()
    deadline = None if timeouts.drain_s is None else clock.time() + timeouts.drain_s
    with progress.phase("jobs on leaving nodes", len(names)) as phase:
        empty_nodes: set[str] = set()
        while True:
            for name in names:
                jobs = await jobs_on(host, name)
                if jobs:
                    phase.update(name, f"waiting for job {', '.join(jobs)}")
                elif name not in empty_nodes:
                    empty_nodes.add(name)
                    phase.done(name)
            if len(empty_nodes) == len(names):
                return ()
            if deadline is not None and clock.time() > deadline:
                return tuple(name for name in names if name not in empty_nodes)
            await asyncio.sleep(1)


async def _wait_for_nodes(
    nodes: Sequence[str], fleet: Fleet, controller: str, progress: ProgressReporter, timeouts: ApplyTimeouts
) -> tuple[tuple[str, str], ...]:
    """Wait until every node that we could reach has registered with slurmctld."""
    names = [name for name in nodes if name not in fleet.failures]
    host, clock = await fleet.host(controller), asyncio.get_running_loop()
    deadline = clock.time() + timeouts.nodes_s
    unready = await _find_unready(host, names, deadline)
    if not unready:
        return ()
    with progress.phase("nodes register with Slurm", len(names)) as phase:
        await resume_not_responding(host, list(unready))
        ready: set[str] = set()
        while True:
            for name in names:
                if name not in unready and name not in ready:
                    ready.add(name)
                    phase.done(name)
            if not unready or clock.time() > deadline:
                return tuple(unready.items())
            drained_names = [name for name, reason in unready.items() if LEAVING_REASON in reason]
            if drained_names:
                await resume_nodes(host, drained_names)
            await asyncio.sleep(0.25)
            unready = await _find_unready(host, names, deadline)


async def _find_unready(host: Host, names: Sequence[str], deadline: float) -> dict[str, str]:
    """As `unready_nodes`, repeated until `deadline` while slurmctld restarts."""
    while True:
        try:
            return await unready_nodes(host, names)
        except (SlurmError, CommandTimeout):
            if asyncio.get_running_loop().time() > deadline:
                raise
            await asyncio.sleep(0.25)


async def preparations(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet) -> dict[str, tuple[Change, ...]]:
    """What is still to be prepared, by host. Changes nothing."""
    return await _changes(_documents(spec, facts), fleet)


async def prepare(spec: Spec, facts: Mapping[str, Facts], fleet: Fleet, progress: ProgressReporter) -> tuple[str, ...]:
    """Prepare the hosts that need it. Returns their names: their facts have changed since they were observed."""
    documents = _documents(spec, facts)
    due_documents = {name: documents[name] for name in await _changes(documents, fleet)}
    if due_documents:
        secrets = await fetch_secrets(due_documents.values(), shared_secrets(spec), user_secrets(spec), fleet)
        with progress.phase("preparation", len(due_documents)) as phase:
            await fleet.converge_all(due_documents, secrets, phase)
    return tuple(due_documents)


async def _changes(documents: Mapping[str, Document], fleet: Fleet) -> dict[str, tuple[Change, ...]]:
    async def dry_run(name: str) -> Report:
        return await (await fleet.agent(name)).check(documents[name])

    reports = await fleet.each(documents, dry_run)
    return {name: changes for name, report in reports.items() if (changes := host_changes(name, report))}


def _documents(spec: Spec, facts: Mapping[str, Facts]) -> dict[str, Document]:
    members = [member for member in all_members(spec) if member.name in facts]
    documents = {member.name: preparation(spec, member, facts[member.name], facts) for member in members}
    return {name: document for name, document in documents.items() if document}
