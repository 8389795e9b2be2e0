"""WireGuard between all members: each has its own key, the public keys of the others, and a permanent address."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping

from shoal.agent.document import Command, Directory, Document, File, Packages, Service
from shoal.agent.facts import Facts
from shoal.network import wireguard as wg
from shoal.network.addresses import candidates
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.members import rented_members
from shoal.spec.model import Spec

SYNC = "wireguard peers"
WITHOUT_PACKAGE = (("debian", "11"), ("ubuntu", "20.04"))
"""Systems without wireguard-go. The kernels that they bring have WireGuard; that of a container's machine may not."""


class WireGuardComponent(Component):
    """The network `wireguard`."""

    files: Mapping[str, FileQuery] = {wg.UNIT: "there", wg.HUB_RULES: "there"}
    services = (wg.KNOCK_SERVICE, wg.SERVICE)
    changes_with_members = True

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        if spec.network.kind != "wireguard":
            return ()
        userspace = () if facts is not None and wg.MODULE in facts.modules else ("wireguard-go",)
        relays = ("nftables",) if member.name == (spec.network.hub or members_of(spec)[0].name) else ()
        return ("iproute2", "wireguard-tools", *userspace, *relays)

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        return {wg.PUBLIC_KEY: "text", wg.PEERS: "text"} if spec.network.kind == "wireguard" else {}

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        if spec.network.kind != "wireguard" or facts.text(wg.PUBLIC_KEY).strip():
            return ()
        return (
            Packages(self.packages(spec, member, facts)),
            Directory(wg.FOLDER),
            Command("wireguard key", ("sh", "-c", wg.MAKE_KEYS), unless=("test", "-s", wg.PUBLIC_KEY)),
        )

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        if cluster.spec.network.kind != "wireguard":
            return {Stage.SERVICES: self.removal()} if cluster.facts[member.name].has_file(wg.UNIT) else {}
        network = cluster.spec.network
        own_place = config_of(cluster, member.name)
        kernel = wg.MODULE in cluster.facts[member.name].modules
        sync = (f"command {SYNC}",)
        return {
            Stage.SERVICES: (
                Directory(wg.FOLDER),
                File(wg.PEERS, wg.peers_conf(own_place.peers, network.port), reloads=sync),
                File(wg.HUB_RULES, wg.hub_rules() if own_place.relays else None, reloads=sync),
                File(wg.APPLY, wg.apply_script(own_place, network.subnet), mode=0o755, reloads=sync),
                File(wg.UNIT, wg.unit(network.subnet, kernel=kernel), restarts=(wg.SERVICE,)),
                Service(wg.SERVICE),
                Command(SYNC, ("systemctl", "reload", wg.SERVICE), on_change=True),
                File(wg.KNOCK, wg.knock_script(own_place.peers), mode=0o755, restarts=(wg.KNOCK_SERVICE,)),
                File(wg.KNOCK_UNIT, wg.knock_unit(), restarts=(wg.KNOCK_SERVICE,)),
                Service(wg.KNOCK_SERVICE),
            )
        }

    def removal(self) -> Document:
        keys = (wg.PUBLIC_KEY, wg.PRIVATE_KEY, wg.NEXT_KEY, wg.MARK)
        return (
            *(Service(name, enabled=False, running=False) for name in self.services),
            *(File(path) for path in (wg.KNOCK_UNIT, wg.KNOCK, wg.UNIT, wg.APPLY, wg.PEERS, wg.HUB_RULES, *keys)),
            Command(
                "unreachable subnet", ("ip", "route", "flush", *wg.UNREACHABLE), unless=("sh", "-c", wg.NO_UNREACHABLE)
            ),
        )

    def cluster_services(self, facts: Facts) -> tuple[str, ...]:
        return ("the hub of its network",) if facts.has_file(wg.HUB_RULES) else ()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        return tuple(_findings(cluster)) if cluster.spec.network.kind == "wireguard" else ()


def missing_wireguard(spec: Spec, facts: Mapping[str, Facts]) -> list[Finding]:
    """The hosts with WireGuard neither in their kernel nor among the packages of their system."""
    if spec.network.kind != "wireguard":
        return []
    return [
        Finding(
            "error",
            "WireGuard cannot run",
            f"the kernel has none, and {fact.os_id} {fact.os_version} has no package wireguard-go",
            "load the module on the machine whose kernel it is (`modprobe wireguard`), use a newer system, or another "
            "network",
            host=name,
            path="network",
        )
        for name, fact in facts.items()
        if (fact.os_id, fact.os_version) in WITHOUT_PACKAGE and wg.MODULE not in fact.modules
    ]


def config_of(cluster: Cluster, name: str) -> wg.MemberConfig:
    """A member's WireGuard configuration."""
    spec = cluster.spec
    former_peers = wg.peers_in(cluster.facts[name].text(wg.PEERS))
    return wg.member_config(name, _member_facts(cluster, former_peers), _hub(cluster), spec.network.port, former_peers)


def _hub(cluster: Cluster) -> str:
    """The member that relays between members that cannot reach each other."""
    return cluster.spec.network.hub or cluster.controller.name


def _member_facts(cluster: Cluster, former_peers: Mapping[str, wg.Peer]) -> dict[str, wg.MemberFacts]:
    """All members as one of them sees them. A member that does not answer keeps its configured key."""
    configured = {**wg.peers_in(cluster.controller_facts.text(wg.PEERS)), **former_peers}
    members = {member.name: member for member in cluster.members}
    rented = {member.name: member for member in rented_members(cluster.spec)}
    ends = {}
    for name, address in cluster.addresses.items():
        member, facts = members.get(name) or rented.get(name), cluster.facts.get(name)
        key = facts.text(wg.PUBLIC_KEY).strip() if facts else configured[name].public_key if name in configured else ""
        ends[name] = wg.MemberFacts(
            name=name,
            address=address,
            public_key=key,
            site=member.site if member else "",
            reaches=facts.reaches if facts else None,
            endpoint=(member.endpoint or "") if member else "",
            mtu=min((a.mtu for a in candidates(facts)), default=wg.INTERNET_MTU) if facts else wg.INTERNET_MTU,
            comes=name in rented,
        )
    return ends


def _findings(cluster: Cluster) -> Iterator[Finding]:
    network, hub = cluster.spec.network, _hub(cluster)
    subnet = ipaddress.IPv4Network(network.subnet)
    for name, facts in cluster.facts.items():
        if wg.MODULE not in facts.modules and not facts.tun:
            evidence = "neither WireGuard in the kernel nor /dev/net/tun"
            fix = "load the module (`modprobe wireguard`), give the container /dev/net/tun, or use `network: tailscale`"
            yield Finding("error", "WireGuard cannot run", evidence, fix, host=name)
        inside = [a.address for a in candidates(facts) if ipaddress.ip_address(a.address) in subnet]
        if inside:
            fix = "set another subnet: `network: {kind: wireguard, subnet: 10.78.0.0/16}`"
            yield Finding("error", f"{network.subnet} is in use on the host", inside[0], fix, host=name)
        linked = {peer.name for peer in config_of(cluster, name).peers}
        if cluster.facts_of(hub).text(wg.PUBLIC_KEY).strip() and hub not in {name, *linked}:
            what = f"cannot connect to {hub} in either direction, and no other member relays for it"
            fix = (
                f"forward UDP port {network.port} to {hub} and set `endpoint: router.example.org`; or "
                "choose a host that all can reach: `network: {kind: wireguard, hub: ...}`"
            )
            yield Finding("error", what, fix=fix, host=name)
