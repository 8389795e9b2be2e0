"""Observe: ask every host what it is, and the controller what Slurm thinks. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from shoal.agent.client import Ask
from shoal.agent.facts import Door, Facts
from shoal.errors import AgentFailed, HostError, TimedOut
from shoal.hosts.api import Host
from shoal.hosts.fanout import Outcome
from shoal.network.tunnel import needs_tunnel
from shoal.network.wireguard import MODULE
from shoal.plan.fleet import Fleet
from shoal.plan.reachability import SSH_PORT, reached_addresses, surroundings
from shoal.roles.base import packages
from shoal.roles.documents import fact_files, fact_services
from shoal.roles.parts import part_filesystems
from shoal.slurm.state import JOBS_COMMAND, NODES_COMMAND, JobState, NodeState, parse_jobs, parse_nodes
from shoal.spec.members import all_members
from shoal.spec.model import Spec


@dataclass(frozen=True)
class SlurmView:
    """What the running slurmctld says. `running` is False when none answers."""

    running: bool = False
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    jobs: tuple[JobState, ...] = ()

    def jobs_on(self, node: str) -> tuple[JobState, ...]:
        return tuple(job for job in self.jobs if node in job.node_names)


@dataclass(frozen=True)
class Observed:
    """The hosts as they are now."""

    facts: Mapping[str, Facts]
    failures: Mapping[str, HostError]
    slurm: SlurmView = SlurmView()


async def observe(fleet: Fleet, spec: Spec, on_done: Callable[[Outcome[Any]], None] | None = None) -> Observed:
    """One round trip to each host, all at once. `on_done` is told of every host that has answered or dropped out."""
    members = {member.name: member for member in all_members(spec)}
    controller = next(iter(members))
    modules = (MODULE,) if spec.network.kind == "wireguard" else ()
    ask = Ask(
        users=("*",),
        groups=("*",),
        files=fact_files(spec),
        services=fact_services(),
        filesystems=part_filesystems(spec),
        modules=modules,
    )

    if spec.network.kind == "tailscale":
        ask = replace(ask, tailscale=True)

    doors = {
        name: Door(address, fleet.targets[name].port or SSH_PORT) for name, address in reached_addresses(fleet).items()
    }

    async def look(name: str) -> tuple[Facts, SlurmView | None]:
        agent = await fleet.agent(name)
        facts = _accepted(name, await agent.facts(replace(ask, packages=packages(spec, members[name]))))
        facts = replace(facts, door=doors.get(name))
        # Slurm's commands wait long for a slurmctld that is not there, so they are asked only where one runs.
        if name != controller or facts.services.get("slurmctld") != "active":
            return facts, None
        return facts, await slurm_view(await fleet.host(name))

    answers = await fleet.each(fleet.targets, look, on_done)
    facts = {name: fact for name, (fact, _) in answers.items()}
    if spec.network.kind == "wireguard":
        meshed = {name: fact for name, fact in facts.items() if not needs_tunnel(spec.network.kind, fact)}
        facts |= await surroundings(spec, meshed, fleet)
    view = next((view for _, view in answers.values() if view is not None), SlurmView())
    return Observed(facts, dict(fleet.failures), view)


async def slurm_view(host: Host) -> SlurmView:
    """Nodes and jobs as slurmctld has them; an empty view where there is no Slurm yet or it does not answer."""
    try:
        nodes, jobs = await asyncio.gather(host.run(NODES_COMMAND, timeout=20), host.run(JOBS_COMMAND, timeout=20))
    except TimedOut:
        return SlurmView()
    if nodes.status != 0 or jobs.status != 0:
        return SlurmView()
    return SlurmView(True, {node.name: node for node in parse_nodes(nodes.text)}, tuple(parse_jobs(jobs.text)))


def _accepted(name: str, facts: Facts) -> Facts:
    if facts.package_manager != "apt":
        raise AgentFailed(
            name,
            f"packages are installed with apt; found {facts.package_manager or 'no package manager'} "
            f"({facts.os_id} {facts.os_version})",
            hint="use a Debian or Ubuntu host, or take it out of the file",
        )
    return facts
