"""Observation: the facts of every host, and Slurm's nodes and jobs. Changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from shoal.agent.client import FactsRequest
from shoal.agent.facts import ConnectedAddress, Facts
from shoal.errors import AgentFailed, CommandTimeout
from shoal.hosts.api import Host
from shoal.network.tailscale import (
    PATH_TIMEOUT_S,
    path_command,
    read_status,
    tailscale_addresses,
    unsettled_paths,
)
from shoal.network.tunnel import needs_tunnel
from shoal.network.wireguard import MODULE
from shoal.plan.connections import Fleet
from shoal.plan.progress import Phase
from shoal.plan.reachability import SSH_PORT, add_reachability, connection_addresses
from shoal.roles.base import packages
from shoal.roles.documents import fact_files, fact_services
from shoal.roles.registry import component_filesystems
from shoal.roles.slurm_source import VERSIONED_PACKAGES
from shoal.roles.slurm_tree import uses_tree
from shoal.slurm.conf import LOG_DIRECTORY, SPOOL_DIRECTORY, STATE_DIRECTORY
from shoal.slurm.state import JOBS_COMMAND, NODES_COMMAND, JobState, NodeState, parse_jobs, parse_nodes
from shoal.spec.member import Member
from shoal.spec.members import all_members
from shoal.spec.model import Spec

DNF = "dnf"
SLURM_DIRECTORIES = (STATE_DIRECTORY, SPOOL_DIRECTORY, LOG_DIRECTORY)
"""Where Slurm's daemons write."""


@dataclass(frozen=True)
class SlurmView:
    """Nodes and jobs of the running slurmctld. `running` is False when none answers."""

    running: bool = False
    nodes: Mapping[str, NodeState] = field(default_factory=dict)
    jobs: tuple[JobState, ...] = ()


@dataclass(frozen=True)
class Observation:
    """The hosts that answered, as they are now."""

    facts: Mapping[str, Facts]
    slurm: SlurmView = SlurmView()


async def observe(fleet: Fleet, spec: Spec, phase: Phase | None = None, *, reachability: bool = True) -> Observation:
    """One round trip to each host, all at once; with WireGuard another one for which members reach which."""
    members = {member.name: member for member in all_members(spec)}
    controller = next(iter(members))
    request = FactsRequest(
        users=("*",),
        groups=("*",),
        files=fact_files(spec),
        services=fact_services(),
        directories=SLURM_DIRECTORIES,
        filesystems=component_filesystems(spec),
        modules=(MODULE,) if spec.network.kind == "wireguard" else (),
        tailscale=spec.network.kind == "tailscale",
    )
    addresses = {
        name: ConnectedAddress(address, fleet.targets[name].port or SSH_PORT)
        for name, address in connection_addresses(fleet).items()
    }

    async def observe_host(name: str) -> tuple[Facts, SlurmView | None]:
        agent = await fleet.agent(name)
        facts = _require_packages(spec, name, await agent.facts(_with_packages(request, spec, members[name])))
        facts = replace(facts, connected_at=addresses.get(name))
        # Slurm's commands wait long for a slurmctld that does not run.
        if name != controller or not facts.is_active("slurmctld"):
            return facts, None
        return facts, await slurm_view(await fleet.host(name))

    answers = await fleet.each(fleet.targets, observe_host, phase)
    facts = {name: fact for name, (fact, _) in answers.items()}
    if spec.network.kind == "wireguard" and reachability:
        mesh_facts = {name: fact for name, fact in facts.items() if not needs_tunnel(spec.network.kind, fact)}
        facts |= await add_reachability(spec, mesh_facts, fleet)
    if spec.network.kind == "tailscale" and controller in facts:
        tailnet = read_status(facts[controller].tailscale)
        if unsettled_addresses := unsettled_paths(tailnet, tailscale_addresses(facts).values()):
            host, agent = await fleet.host(controller), await fleet.agent(controller)
            await host.run(path_command(unsettled_addresses), timeout=PATH_TIMEOUT_S)
            new_facts = await agent.facts(FactsRequest(tailscale=True))
            facts[controller] = replace(facts[controller], tailscale=new_facts.tailscale)
    view = next((view for _, view in answers.values() if view is not None), SlurmView())
    return Observation(facts, view)


def _with_packages(request: FactsRequest, spec: Spec, member: Member) -> FactsRequest:
    """With the packages to ask for. What is available matters for those that bring Slurm and Tailscale."""
    names = packages(spec, member)
    if not uses_tree(spec):
        return replace(request, packages=names)
    return replace(request, packages=names if spec.network.kind == "tailscale" else (), installed=VERSIONED_PACKAGES)


async def slurm_view(host: Host) -> SlurmView:
    """Nodes and jobs as slurmctld has them; an empty view where there is no Slurm yet or it does not answer."""
    try:
        nodes, jobs = await asyncio.gather(host.run(NODES_COMMAND, timeout=20), host.run(JOBS_COMMAND, timeout=20))
    except CommandTimeout:
        return SlurmView()
    if nodes.status != 0 or jobs.status != 0:
        return SlurmView()
    return SlurmView(True, {node.name: node for node in parse_nodes(nodes.text)}, tuple(parse_jobs(jobs.text)))


def _require_packages(spec: Spec, name: str, facts: Facts) -> Facts:
    if facts.package_manager not in ("apt", DNF) or (facts.package_manager == DNF and not uses_tree(spec)):
        raise AgentFailed(
            name,
            f"packages are installed with apt; found {facts.package_manager or 'no package manager'} "
            f"({facts.os_id} {facts.os_version})",
            hint="use a Debian or Ubuntu host, or take it out of the file; a host with dnf needs "
            "`slurm: {from: shoal}` in the file",
        )
    return facts
