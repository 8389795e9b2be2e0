"""The cluster with the rented nodes in it that are there, and which machines cannot be in it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from shoal.agent.facts import Facts, FileFact
from shoal.elastic.fleet import UNFIT
from shoal.network.wireguard import PEERS, peers_conf, peers_in
from shoal.plan.fleet import Fleet
from shoal.plan.reachability import reached_addresses
from shoal.roles.cluster import Cluster, assemble
from shoal.roles.ids import choose_ids
from shoal.roles.in_force import in_force
from shoal.roles.parts import part_findings
from shoal.roles.wireguard import file_text
from shoal.slurm.versions import window_findings
from shoal.spec.members import members, rented_members
from shoal.spec.model import Spec


def with_rented(spec: Spec, fleet: Fleet, facts: Mapping[str, Facts], known: Collection[str]) -> Cluster:
    """The cluster with the fleet's rented nodes and the `known` ones, and no others. Hosts that stay keep what is."""
    controller = members(spec)[0].name
    before = in_force(facts[controller])
    gone = {member.name for member in rented_members(spec)} - {*fleet.targets} - {*known}
    kept = {name: address for name, address in before.addresses.items() if name not in gone}
    own = spec.network.kind == "wireguard"  # there a node's address is its own whether or not it is there
    before = before if own else replace(before, addresses=kept)
    reached = {**reached_addresses(fleet), controller: before.addresses.get(controller, "")}
    facts = {name: without_peers(fact, gone, spec.network.port) for name, fact in facts.items()}
    cluster = assemble(spec, facts, reached, before)
    addresses = {**cluster.addresses, **{m.name: kept[m.name] for m in members(spec) if m.name in kept}}
    ids = choose_ids(controller, {controller: facts[controller]})
    return replace(cluster, addresses=addresses, ids=ids, conf=replace(cluster.conf, one_address=before.one_address))


def unfit_versions(cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
    """Machines whose Slurm the controller cannot talk to."""
    controller = cluster.controller.name
    others = {name: version for name, version in cluster.versions.items() if name in new}
    findings = window_findings((controller, cluster.versions[controller]), others)
    return {finding.host: f"{UNFIT}{finding.what}: {finding.found}" for finding in findings if finding.host in new}


def barred(cluster: Cluster, new: Iterable[str]) -> dict[str, str]:
    """Machines that have no way into the network, or else cannot be what they should."""
    found = [finding for finding in part_findings(cluster) if finding.level == "error" and finding.host in new]
    return {finding.host: f"{finding.what} {finding.found}".strip() for finding in found}


def without_peers(facts: Facts, gone: Iterable[str], port: int) -> Facts:
    """The facts of a host as if it had never heard of machines that are gone: their keys are not kept for them."""
    written = peers_in(file_text(facts, PEERS))
    if not written.keys() & {*gone}:
        return facts
    kept = [peer for name, peer in written.items() if name not in gone]
    return replace(facts, files={**facts.files, PEERS: FileFact(text=peers_conf(kept, port))})
