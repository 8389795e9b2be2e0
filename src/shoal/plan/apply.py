"""Apply: bring the hosts to what a plan says, stage by stage, and wait until Slurm sees every node."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.agent.client import Report
from shoal.errors import SlurmError, TimedOut
from shoal.hosts.api import Host
from shoal.hosts.fanout import Outcome
from shoal.plan.fleet import Fleet
from shoal.plan.model import HostPlan, Plan
from shoal.plan.nodes import LEAVING, ask_again, drain, jobs_on, resume, unready
from shoal.plan.progress import Phase, Progress
from shoal.plan.secrets import secrets_for
from shoal.roles.stage import Stage

TITLES = {
    Stage.BASE: "packages, keys, names",
    Stage.SERVICES: "services",
    Stage.CONTROLLER: "controller",
    Stage.NODES: "nodes",
}


@dataclass(frozen=True)
class Patience:
    """How long to wait for what does not depend on us."""

    nodes: float = 60.0
    """Seconds until every node must have registered."""
    drain: float | None = None
    """Seconds until a leaving node must be empty; None waits for its jobs however long they run."""


@dataclass(frozen=True)
class Applied:
    """What an apply came to."""

    changed: tuple[str, ...] = ()
    """Hosts on which something was changed."""
    unready: tuple[tuple[str, str], ...] = ()
    """Nodes that Slurm does not see ready, with the reason."""
    staying: tuple[str, ...] = ()
    """Nodes that are drained and still busy; the next run takes them out."""


async def apply(
    plan: Plan, fleet: Fleet, controller: str, nodes: Sequence[str], progress: Progress, patience: Patience
) -> Applied:
    """Do what the plan says. `nodes` are the compute nodes that must be ready at the end."""
    drained = await _drain(plan.drain, fleet, controller)
    changed = await _converge(
        plan, plan.hosts, [host.name for host in plan.hosts if host.changes], fleet, controller, progress
    )
    staying: tuple[str, ...] = ()
    if plan.drain:
        if not drained:
            await drain(await fleet.host(controller), plan.drain)
        staying = await _wait_until_empty(plan.drain, fleet, controller, progress, patience)
        if not staying:
            everyone = [host.name for host in plan.after_drain]
            changed += await _converge(plan, plan.after_drain, everyone, fleet, controller, progress)
    missing = await _wait_for_nodes(nodes, fleet, controller, progress, patience)
    return Applied(tuple(dict.fromkeys(changed)), missing, staying)


async def _drain(leaving: Sequence[str], fleet: Fleet, controller: str) -> bool:
    """Drain first, so that no job starts on a leaving node. Where slurmctld does not run it is repaired before that."""
    try:
        await drain(await fleet.host(controller), leaving)
    except (SlurmError, TimedOut):
        return False
    return True


async def _converge(
    plan: Plan, hosts: Sequence[HostPlan], names: Sequence[str], fleet: Fleet, controller: str, progress: Progress
) -> list[str]:
    """All stages on the named hosts; a host that fails drops out, a controller that fails ends the run."""
    if not names:
        return []
    changed: list[str] = []
    plans = {host.name: host for host in hosts}
    for stage in Stage:
        due = [name for name in names if name not in fleet.failures and plans[name].document(stage)]
        wanted = [plans[name].document(stage) for name in due]
        secrets = await secrets_for(wanted, plan.kept, plan.given, fleet, hosts_have_theirs=True)
        fleet.require(controller)
        if not due:
            continue
        with progress.phase(TITLES[stage], len(due)) as phase:

            async def converge(
                name: str, stage: Stage = stage, secrets: dict[str, bytes] = secrets, phase: Phase = phase
            ) -> Report:
                return await fleet.converge(name, plans[name].document(stage), secrets, phase)

            reports = await fleet.each(due, converge, on_done=ending(phase))
        changed += [name for name, report in reports.items() if report.changed]
        fleet.require(controller)
    return changed


def ending(phase: Phase) -> Callable[[Outcome[Any]], None]:
    """Tells a phase of every host that has finished it."""
    return lambda outcome: phase.done(outcome.name, outcome.error.cause if outcome.error else "")


async def _wait_until_empty(
    leaving: Sequence[str], fleet: Fleet, controller: str, progress: Progress, patience: Patience
) -> tuple[str, ...]:
    """Wait for the jobs on leaving nodes. Whatever still runs at the end of our patience stays, drained."""
    host = await fleet.host(controller)
    clock = asyncio.get_running_loop()
    end = None if patience.drain is None else clock.time() + patience.drain
    with progress.phase("jobs on leaving nodes", len(leaving)) as phase:
        empty: set[str] = set()
        while True:
            for node in leaving:
                jobs = await jobs_on(host, node)
                if jobs:
                    phase.say(node, f"waiting for job {', '.join(jobs)}")
                elif node not in empty:
                    empty.add(node)
                    phase.done(node)
            if len(empty) == len(leaving):
                return ()
            if end is not None and clock.time() > end:
                return tuple(node for node in leaving if node not in empty)
            await asyncio.sleep(1)


async def _wait_for_nodes(
    nodes: Sequence[str], fleet: Fleet, controller: str, progress: Progress, patience: Patience
) -> tuple[tuple[str, str], ...]:
    """Wait until slurmctld has heard from every node that we could reach."""
    due = [name for name in nodes if name not in fleet.failures]
    host = await fleet.host(controller)
    end = asyncio.get_running_loop().time() + patience.nodes
    missing = await _unready(host, due, end)
    if not missing:
        return ()
    with progress.phase("nodes register with Slurm", len(due)) as phase:
        await ask_again(host, list(missing))
        seen: set[str] = set()
        while True:
            for name in due:
                if name not in missing and name not in seen:
                    seen.add(name)
                    phase.done(name)
            if not missing or asyncio.get_running_loop().time() > end:
                return tuple(missing.items())
            ours = [name for name, reason in missing.items() if LEAVING in reason]
            if ours:
                await resume(host, ours)
            await asyncio.sleep(0.25)
            missing = await _unready(host, due, end)


async def _unready(host: Host, due: Sequence[str], end: float) -> dict[str, str]:
    """As `unready`, with patience for a slurmctld that is between two lives."""
    while True:
        try:
            return await unready(host, due)
        except (SlurmError, TimedOut):
            if asyncio.get_running_loop().time() > end:
                raise
            await asyncio.sleep(0.25)
