"""Who reaches whom on a network of our own, directly or by way of a hub. Pure: it goes by what the hosts found out."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.agent.facts import Facts
from shoal.network.addresses import candidates, lan_addresses

OVERHEAD = 80
"""Bytes that WireGuard adds to a packet, over IPv6; over IPv4 it is 60, and a path may change from one to the other."""
INTERNET_MTU = 1500
KEEPALIVE = 10
"""Seconds between packets that keep a NAT's door open.

A NAT that has forgotten a host (it was restarted, its table was full) lets nobody in until the host calls again. Slurm
gives up on a node after twice its TCPTimeout, 20 s: the next call must come well before that.
"""


@dataclass(frozen=True)
class Peer:
    """Another member, as one member's WireGuard knows it."""

    name: str
    public_key: str
    allowed: tuple[str, ...]
    """The addresses on our network that are reached through it, its own first."""
    endpoint: str = ""
    """Where its packets go, `address:port`. Empty: it calls us, and we answer where it called from."""
    keepalive: bool = False


@dataclass(frozen=True)
class End:
    """What a member's place in the network is made from."""

    name: str
    address: str
    """Its address on our network."""
    public_key: str
    site: str = ""
    reaches: Mapping[str, str] | None = None
    """Where others answered it, by name. None: it has not answered us."""
    endpoint: str = ""
    """Where the spec says that others reach it, `address` or `address:port`."""
    mtu: int = INTERNET_MTU
    """The largest packet of the interface it is reached on."""
    comes: bool = False
    """It comes and goes. Members that are always there reach it through the hub, which alone knows when it is there."""


@dataclass(frozen=True)
class Place:
    """One member's place in the network."""

    address: str
    peers: tuple[Peer, ...]
    mtu: int
    slower: tuple[tuple[str, int], ...] = ()
    """Members, by address, to which only smaller packets than `mtu` go."""
    relays: bool = False
    """Whether others reach each other through it."""


def place(name: str, ends: Mapping[str, End], hub: str, port: int, known: Mapping[str, Peer]) -> Place:
    """The place of a member that has answered. `known` holds its peers of before: those that do not answer now."""
    me = ends[name]
    apart = {other for other, end in ends.items() if end.comes != me.comes and hub not in (name, other)}
    links = {
        other: None if other in apart else _link(me, end, port, known)
        for other, end in ends.items()
        if other != name and (end.public_key or other in apart)
    }
    through = [end for other, end in ends.items() if other in links and links[other] is None]
    peers = [
        Peer(
            other,
            ends[other].public_key,
            (ends[other].address, *(end.address for end in through if other == hub)),
            link.endpoint,
            link.keepalive,
        )
        for other, link in links.items()
        if link is not None
    ]
    mtu = me.mtu - OVERHEAD
    paths = {end.address: _path_mtu(me, end, ends.get(hub) if end in through else None) for end in ends.values()}
    slower = tuple((end.address, paths[end.address]) for other, end in ends.items() if other in links)
    return Place(
        address=me.address,
        peers=tuple(peers),
        mtu=mtu,
        slower=tuple((address, size) for address, size in slower if size < mtu),
        relays=name == hub,
    )


@dataclass(frozen=True)
class _Link:
    endpoint: str = ""
    keepalive: bool = False


def _link(me: End, other: End, port: int, known: Mapping[str, Peer]) -> _Link | None:
    """How the two reach each other; None where they cannot, and go through the hub."""
    if other.reaches is None:  # it does not answer now: all stays as it was
        before = known.get(other.name)
        if before:
            return _Link(before.endpoint, before.keepalive)
    there, back = _endpoint(me, other, port), _endpoint(other, me, port)
    if not there and not back:
        return None
    # Who can be called needs not keep a door open; who cannot, does, and also one that only says it can.
    return _Link(there, keepalive=bool(there) and not back)


def _endpoint(me: End, other: End, port: int) -> str:
    """Where `me` calls `other`. What the spec says holds between sites; inside one, what answered."""
    found = (me.reaches or {}).get(other.name, "")
    if other.endpoint and (me.site != other.site or not found):
        return with_port(other.endpoint, port)
    return with_port(found, port) if found else ""


def _path_mtu(me: End, other: End, hub: End | None) -> int:
    sizes = [me.mtu, other.mtu, *([hub.mtu] if hub else [])]
    sites = {me.site, other.site, *([hub.site] if hub else [])}
    return min(*sizes, INTERNET_MTU if len(sites) > 1 else max(sizes)) - OVERHEAD


def with_port(text: str, port: int) -> str:
    """An endpoint as WireGuard writes it: `address:port`, and an IPv6 address in brackets."""
    bare = text.strip("[]")
    if bare.count(":") > 1 and "]:" not in text:
        return f"[{bare}]:{port}"
    return text if ":" in text else f"{text}:{port}"


def without_port(endpoint: str) -> str:
    """The address of an endpoint as WireGuard writes it."""
    return endpoint.rpartition(":")[0].strip("[]")


def to_try(facts: Mapping[str, Facts], sites: Mapping[str, str], reached: Mapping[str, str]) -> dict[str, list[str]]:
    """The addresses at which each member may be reached by others, the best first.

    Its own; and where it is behind a translation that we came through, the address we used, if it is public and no
    other member is behind the same.
    """
    inside: dict[str, str] = {}
    for site in set(sites.values()):
        inside |= lan_addresses({name: fact for name, fact in facts.items() if sites[name] == site}, reached)
    tries: dict[str, list[str]] = {}
    for name, fact in facts.items():
        own = [address.address for address in candidates(fact)]
        outer = reached.get(name, "")
        shared = [other for other, address in reached.items() if address == outer and other != name]
        public = bool(outer) and ipaddress.ip_address(outer).is_global and not shared
        tries[name] = list(dict.fromkeys(filter(None, (inside.get(name), *own, *([outer] if public else ())))))
    return tries


def worth_trying(me: Facts, my_site: str, other_site: str, address: str) -> bool:
    """Whether an answer from this address can only be the member's.

    A private address of another site that also fits our own network would be somebody else's machine.
    """
    found = ipaddress.ip_address(address)
    if my_site == other_site or found.is_global:
        return True
    return not any(found in ipaddress.ip_interface(f"{a.address}/{a.prefix}").network for a in candidates(me))


def assign(subnet: str, names: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """An address of the subnet for each member. Who has one keeps it; the others get the first that are free."""
    network = ipaddress.IPv4Network(subnet)
    names = list(names)
    kept = {name: before[name] for name in names if name in before and _inside(before[name], network)}
    free = (str(address) for address in network.hosts() if str(address) not in set(kept.values()))
    return {name: kept[name] if name in kept else next(free) for name in names}


def _inside(address: str, network: ipaddress.IPv4Network) -> bool:
    found = ipaddress.ip_address(address)
    return isinstance(found, ipaddress.IPv4Address) and found in network
