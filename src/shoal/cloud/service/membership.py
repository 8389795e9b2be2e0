"""What a change of the members means for each host: the cluster with its rented nodes, and every host's document. Pure.

A rented machine reports its own facts, and it may be broken or hostile. Where one of them makes this fail, it drops
out with the cause, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from shoal.agent.document import Document
from shoal.agent.facts import Facts, FileFact
from shoal.cloud.service.context import log
from shoal.errors import HostError, ShoalError
from shoal.hosts.api import Target
from shoal.network.wireguard import PEERS, peers_conf, peers_in
from shoal.plan.connections import Fleet
from shoal.plan.reachability import SSH_PORT, connection_addresses
from shoal.roles.assembly import assemble
from shoal.roles.component import Cluster, Stage, choose_ids
from shoal.roles.current_conf import read_current_conf
from shoal.roles.documents import documents, membership, permanent_membership
from shoal.roles.node_logins import recorded_keys
from shoal.roles.registry import component_findings
from shoal.roles.user_ids import choose_user_ids
from shoal.spec.members import members, rented_members
from shoal.spec.model import Spec

T = TypeVar("T")


@dataclass(frozen=True)
class MembershipChange:
    """The cluster with its new members, and what each host becomes."""

    cluster: Cluster
    refused: Mapping[str, str]
    """New machines that cannot be members, with the reason."""
    stages: Mapping[str, Mapping[Stage, Document]]
    """The documents of new machines, stage by stage."""
    others: Mapping[str, Document]
    """What changes on the controller and on rented nodes that are members already."""


def membership_change(
    spec: Spec, fleet: Fleet, facts: Mapping[str, Facts], known: Collection[str], new: Iterable[str]
) -> MembershipChange:
    """The change that makes the `new` machines members, beside the `known` ones."""
    cluster = cluster_with_rented_nodes(spec, fleet, facts, known)
    refused = excluded_machines(cluster, new)
    by_name = {member.name: member for member in cluster.members}
    due = [name for name in facts if name in by_name and name not in refused]
    return MembershipChange(
        cluster,
        refused,
        {name: documents(cluster, by_name[name]) for name in due if name in new},
        {name: membership(cluster, by_name[name]) for name in due if name not in new},
    )


def permanent_targets(cluster: Cluster) -> dict[str, Target]:
    """Where the controller reaches the permanent hosts: at the addresses and with the host keys that it has of them."""
    keys = recorded_keys(cluster.controller_facts)
    return {
        member.name: Target(
            member.name, cluster.addresses[member.name], member.port or SSH_PORT, "root", host_key=keys[member.name][0]
        )
        for member in members(cluster.spec)[1:]
        if member.name in cluster.addresses and keys.get(member.name)
    }


def permanent_changes(
    spec: Spec, fleet: Fleet, facts: Mapping[str, Facts], known: Collection[str], hosts: Collection[str]
) -> dict[str, Document]:
    """What changes on permanent hosts for the `known` rented nodes."""
    cluster = cluster_with_rented_nodes(spec, fleet, facts, known)
    due = [member for member in cluster.members if member.name in hosts and member.name in facts]
    return {member.name: permanent_membership(cluster, member) for member in due}


def without_faulty_machines(
    fleet: Fleet, controller: str, facts: Mapping[str, Facts], build: Callable[[Mapping[str, Facts]], T]
) -> T:
    """Build something from facts. A machine whose facts make that fail drops out of the fleet, and counts no more."""
    try:
        return build(facts)
    except ShoalError:
        raise
    except Exception:
        faulty = [name for name in facts if name != controller and _fails(fleet, controller, name, facts, build)]
        if not faulty:
            raise
        return build({name: fact for name, fact in facts.items() if name not in faulty})


def _fails(
    fleet: Fleet, controller: str, name: str, facts: Mapping[str, Facts], build: Callable[[Mapping[str, Facts]], T]
) -> bool:
    """Whether building fails with the facts of this machine and the controller only."""
    try:
        build({controller: facts[controller], name: facts[name]})
    except ShoalError:
        return False  # raised again with all facts, if it concerns all
    except Exception as error:
        log.exception("%s: cannot make it a member", name)
        cause = f"a bug in Shoal, with what this machine reports: {type(error).__name__}: {error}"
        fleet.failures[name] = HostError(name, cause, hint="report it with the lines of `journalctl -u shoal-elastic`")
        return True
    return False


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
