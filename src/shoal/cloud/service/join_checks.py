"""Whether a machine can be a node: its Slurm version, its network, its GPUs, and its registration with slurmctld."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shoal.agent.facts import Facts, FileFact
from shoal.cloud.service.context import UNFIT_PREFIX
from shoal.hosts.api import Host
from shoal.network.wireguard import PEERS, peers_conf, peers_in
from shoal.plan.connections import Fleet
from shoal.plan.reachability import connection_addresses
from shoal.remote import python_command
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, choose_ids
from shoal.roles.current_conf import read_current_conf
from shoal.roles.registry import component_findings
from shoal.roles.rented import minimum_shape
from shoal.roles.user_ids import choose_user_ids
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.slurm.versions import version_findings
from shoal.spec.members import members, rented_members, rented_sets
from shoal.spec.model import Spec


def cluster_with_rented_nodes(spec: Spec, fleet: Fleet, facts: Mapping[str, Facts], known: Collection[str]) -> Cluster:
    """The cluster with the rented nodes of the fleet and the `known` ones, and no others."""
    controller = members(spec)[0].name
    before = read_current_conf(facts[controller])
    gone = {member.name for member in rented_members(spec)} - {*fleet.targets} - {*known}
    kept = {name: address for name, address in before.addresses.items() if name not in gone}
    own = spec.network.kind == "wireguard"  # a node keeps its WireGuard address also while it is absent
    before = before if own else replace(before, addresses=kept)
    reached = {**connection_addresses(fleet), controller: before.addresses.get(controller, "")}
    facts = {name: without_peers(fact, gone, spec.network.port) for name, fact in facts.items()}
    cluster = assemble(spec, facts, reached, before)
    addresses = {**cluster.addresses, **{m.name: kept[m.name] for m in members(spec) if m.name in kept}}
    # New machines take the ids of the controller, never the reverse.
    own_facts = {controller: facts[controller]}
    return replace(
        cluster,
        addresses=addresses,
        ids=choose_ids(controller, own_facts),
        conf=replace(cluster.conf, one_address=before.one_address),
        user_ids=choose_user_ids(spec, own_facts, controller),
    )


def incompatible_versions(cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
    """The errors of machines whose Slurm version does not fit the controller's."""
    controller = cluster.controller.name
    others = {name: version for name, version in cluster.versions.items() if name in new}
    findings = version_findings((controller, cluster.versions[controller]), others)
    return {
        finding.host: f"{UNFIT_PREFIX}{finding.what}: {finding.found}" for finding in findings if finding.host in new
    }


def excluded_machines(cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
    """The errors of machines that cannot be members, for example without a way into the network."""
    errors = [finding for finding in component_findings(cluster) if finding.level == "error" and finding.host in new]
    return {finding.host: f"{finding.what} {finding.found}".strip() for finding in errors}


def without_peers(facts: Facts, gone: Iterable[str], port: int) -> Facts:
    """The facts of a host without the WireGuard peers that are gone: their keys are dropped."""
    written = peers_in(facts.text(PEERS))
    if not written.keys() & {*gone}:
        return facts
    kept = [peer for name, peer in written.items() if name not in gone]
    return replace(facts, files={**facts.files, PEERS: FileFact(text=peers_conf(kept, port))})


GPU_CHECK_TIMEOUT_S = 180.0
REGISTRATION_TIMEOUT_S = 60.0
_POLL_INTERVAL_S = 0.5
_NOT_YET_UP_STATES = {"POWERING_UP", "POWERED_DOWN", "POWERING_DOWN", "DOWN", "NOT_RESPONDING"}


async def broken_gpus(spec: Spec, fleet: Fleet, names: Iterable[str]) -> dict[str, str]:
    """The errors of machines whose GPUs do not work, or are too few."""
    promises = {name: minimum_shape(spec, one).gpus for one in rented_sets(spec).values() for name in one.nodes}

    async def look(name: str) -> str:
        command = python_command("probes", "gpus", str(promises[name]))
        done = await (await fleet.host(name)).run(command, timeout=GPU_CHECK_TIMEOUT_S, root=True)
        error = " ".join((done.error_text or done.text).split())
        return f"{UNFIT_PREFIX}{error or 'the GPU check failed'}" if done.status else ""

    return {name: error for name, error in (await fleet.each(names, look)).items() if error}


async def unregistered(controller: Host, names: Iterable[str]) -> dict[str, str]:
    """Wait until the nodes have registered with slurmctld. Returns the errors of those that did not."""
    waiting = dict.fromkeys(names, "slurmd has not registered")
    end = asyncio.get_running_loop().time() + REGISTRATION_TIMEOUT_S
    while waiting and asyncio.get_running_loop().time() < end:
        done = await controller.run(NODES_COMMAND, timeout=30)
        states = {node.name: node for node in parse_nodes(done.text)} if done.status == 0 else {}
        for name in [*waiting]:
            node = states.get(name)
            if node is None:
                continue
            if "INVAL" in node.state or "INVALID_REG" in node.state:
                waiting[name] = f"{UNFIT_PREFIX}Slurm rejects it: {node.reason}"
            elif not _NOT_YET_UP_STATES & set(node.state):
                del waiting[name]
        if waiting:
            await asyncio.sleep(_POLL_INTERVAL_S)
    return waiting
