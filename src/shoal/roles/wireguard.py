"""WireGuard between all members: each makes its own key, knows everyone else's public one, and keeps its address."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import Command, Directory, Document, File, Packages, Service
from shoal.agent.facts import Facts
from shoal.network.addresses import candidates
from shoal.network.peers import INTERNET_MTU, End, Peer, Place, place
from shoal.network.wireguard import (
    APPLY,
    FOLDER,
    HUB_RULES,
    KNOCK,
    KNOCK_SERVICE,
    KNOCK_UNIT,
    MAKE_KEYS,
    MARK,
    MODULE,
    NEXT_KEY,
    NO_UNREACHABLE,
    PEERS,
    PRIVATE_KEY,
    PUBLIC_KEY,
    SERVICE,
    UNIT,
    UNREACHABLE,
    apply_script,
    hub_rules,
    knock_script,
    knock_unit,
    peers_conf,
    peers_in,
    unit,
)
from shoal.roles.part import How, Part
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.members import rented_members
from shoal.spec.model import Spec

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

SYNC = "wireguard peers"


class WireGuard(Part):
    """The network `wireguard`."""

    files: Mapping[str, How] = {UNIT: "there"}
    services = (KNOCK_SERVICE, SERVICE)
    by_members = True

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if spec.network.kind != "wireguard":
            return ()
        own = () if facts is not None and MODULE in facts.modules else ("wireguard-go",)
        relays = ("nftables",) if member.name == (spec.network.hub or members_of(spec)[0].name) else ()
        return ("iproute2", "wireguard-tools", *own, *relays)

    def facts_files(self, spec: Spec) -> Mapping[str, How]:
        return {PUBLIC_KEY: "text", PEERS: "text"} if spec.network.kind == "wireguard" else {}

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        if spec.network.kind != "wireguard" or file_text(facts, PUBLIC_KEY):
            return ()
        return (
            Packages(self.packages(spec, member, facts)),
            Directory(FOLDER),
            Command("wireguard key", ("sh", "-c", MAKE_KEYS), unless=("test", "-s", PUBLIC_KEY)),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if cluster.spec.network.kind != "wireguard":
            was = cluster.facts[member.name].files.get(UNIT)
            return {Stage.SERVICES: self.farewell()} if was and was.there else {}
        network = cluster.spec.network
        found = place_of(cluster, member.name)
        kernel = MODULE in cluster.facts[member.name].modules
        sync = (f"command {SYNC}",)
        return {
            Stage.SERVICES: (
                Directory(FOLDER),
                File(PEERS, peers_conf(found.peers, network.port), reloads=sync),
                File(HUB_RULES, hub_rules() if found.relays else None, reloads=sync),
                File(APPLY, apply_script(found, network.subnet), mode=0o755, reloads=sync),
                File(UNIT, unit(network.subnet, kernel=kernel), restarts=(SERVICE,)),
                Service(SERVICE),
                Command(SYNC, ("systemctl", "reload", SERVICE), on_change=True),
                File(KNOCK, knock_script(found.peers), mode=0o755, restarts=(KNOCK_SERVICE,)),
                File(KNOCK_UNIT, knock_unit(), restarts=(KNOCK_SERVICE,)),
                Service(KNOCK_SERVICE),
            )
        }

    def farewell(self) -> Document:
        keys = (PUBLIC_KEY, PRIVATE_KEY, NEXT_KEY, MARK)
        return (
            *(Service(name, enabled=False, running=False) for name in self.services),
            *(File(path) for path in (KNOCK_UNIT, KNOCK, UNIT, APPLY, PEERS, HUB_RULES, *keys)),
            Command("unreachable subnet", ("ip", "route", "flush", *UNREACHABLE), unless=("sh", "-c", NO_UNREACHABLE)),
        )

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(_findings(cluster)) if cluster.spec.network.kind == "wireguard" else ()


def place_of(cluster: Cluster, name: str) -> Place:
    """A member's place in the network."""
    spec = cluster.spec
    known = peers_in(file_text(cluster.facts[name], PEERS))
    return place(name, _ends(cluster, known), _hub(cluster), spec.network.port, known)


def _hub(cluster: Cluster) -> str:
    """The member through which go those that cannot reach each other."""
    return cluster.spec.network.hub or cluster.controller.name


def _ends(cluster: Cluster, known: Mapping[str, Peer]) -> dict[str, End]:
    """All members as one of them sees them. One that does not answer is known by what was written before."""
    controller = cluster.facts.get(cluster.controller.name)
    written = {**peers_in(file_text(controller, PEERS)), **known}
    members = {member.name: member for member in cluster.members}
    rented = {member.name: member for member in rented_members(cluster.spec)}
    ends = {}
    for name, address in cluster.addresses.items():
        member, facts = members.get(name) or rented.get(name), cluster.facts.get(name)
        key = file_text(facts, PUBLIC_KEY) if facts else written[name].public_key if name in written else ""
        ends[name] = End(
            name=name,
            address=address,
            public_key=key,
            site=member.site if member else "",
            reaches=facts.reaches if facts else None,
            endpoint=(member.endpoint or "") if member else "",
            mtu=min((a.mtu for a in candidates(facts)), default=INTERNET_MTU) if facts else INTERNET_MTU,
            comes=name in rented,
        )
    return ends


def _findings(cluster: Cluster) -> Iterator[Finding]:
    network, hub = cluster.spec.network, _hub(cluster)
    subnet = ipaddress.IPv4Network(network.subnet)
    for name, facts in cluster.facts.items():
        if MODULE not in facts.modules and not facts.tun:
            yield Finding(
                "error",
                "WireGuard cannot run",
                "neither WireGuard in the kernel nor /dev/net/tun",
                "load the module (`modprobe wireguard`), give the container /dev/net/tun, or use `network: tailscale`",
                host=name,
            )
        inside = [a.address for a in candidates(facts) if ipaddress.ip_address(a.address) in subnet]
        if inside:
            yield Finding(
                "error",
                f"{network.subnet} is in use on the host",
                inside[0],
                "give the network another: `network: {kind: wireguard, subnet: 10.78.0.0/16}`",
                host=name,
            )
        linked = {peer.name for peer in place_of(cluster, name).peers}
        if file_text(cluster.facts.get(hub), PUBLIC_KEY) and hub not in {name, *linked}:
            yield Finding(
                "error",
                f"neither reaches {hub} nor is reached by it, and nobody else passes its packets on",
                fix=f"forward UDP port {network.port} to {hub} and say where: `endpoint: router.example.org`; or "
                "choose a host that all can reach: `network: {kind: wireguard, hub: ...}`",
                host=name,
            )


def file_text(facts: Facts | None, path: str) -> str:
    """A file of the network as a host had it; empty where there is none. A key comes without the end of its line."""
    found = facts.files.get(path) if facts else None
    return ((found and found.text) or "").strip() if path == PUBLIC_KEY else (found and found.text) or ""
