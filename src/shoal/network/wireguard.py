"""WireGuard: which members reach each other directly or through a hub, and the files of a host as text.

    wireguard.key   made on the host, never leaves it      wireguard-peers.conf  all other members, for `wg syncconf`
    wireguard.pub   given to the other members             wireguard-apply       brings the interface to what is written
                                                           wireguard-knock       sends packets to the peers it must call

Our own unit makes the interface: in the kernel where it has WireGuard, else with `wireguard-go`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.agent.document import HEADER, Settings, daemon_unit, render_unit
from shoal.agent.facts import Facts
from shoal.network.addresses import candidates, lan_addresses

OVERHEAD = 80
"""Bytes that WireGuard adds to a packet, over IPv6; over IPv4 it is 60, and a path may change from one to the other."""
INTERNET_MTU = 1500
KEEPALIVE_INTERVAL_S = 10
"""Seconds between packets that keep a NAT's mapping open.

A NAT that lost the mapping (restart, full table) drops packets to the host until the host sends one. Slurm gives up on
a node after twice its TCPTimeout, 20 s, so the next packet must come well before that.
"""


@dataclass(frozen=True)
class Peer:
    """Another member in one member's WireGuard configuration."""

    name: str
    public_key: str
    allowed: tuple[str, ...]
    """The addresses on our network reached through it, its own first."""
    endpoint: str = ""
    """Its `address:port`. Empty: it connects to us, and we answer to where it connected from."""
    keepalive: bool = False


@dataclass(frozen=True)
class MemberFacts:
    """What a member's configuration is derived from."""

    name: str
    address: str
    """Its address on our network."""
    public_key: str
    site: str = ""
    reaches: Mapping[str, str] | None = None
    """The addresses at which it reached others, by name. None: it has not answered us."""
    endpoint: str = ""
    """Where others reach it according to the spec, `address` or `address:port`."""
    mtu: int = INTERNET_MTU
    """The MTU of the interface it is reached on."""
    comes: bool = False
    """It is rented. Permanent members reach it through the hub, which alone knows when it exists."""


@dataclass(frozen=True)
class MemberConfig:
    """One member's WireGuard configuration."""

    address: str
    peers: tuple[Peer, ...]
    mtu: int
    slower: tuple[tuple[str, int], ...] = ()
    """Members, by address, whose path takes only packets smaller than `mtu`."""
    relays: bool = False
    """Whether it forwards packets between others."""


def member_config(
    name: str, ends: Mapping[str, MemberFacts], hub: str, port: int, known: Mapping[str, Peer]
) -> MemberConfig:
    """The configuration of a member that has answered. `known` has its former peers, for those that do not answer."""
    me = ends[name]
    through_hub_only = {other for other, end in ends.items() if end.comes != me.comes and hub not in (name, other)}
    links = {
        other: None if other in through_hub_only else _link(me, end, port, known)
        for other, end in ends.items()
        if other != name and (end.public_key or other in through_hub_only)
    }
    through = [end for other, end in ends.items() if other in links and links[other] is None]
    through_hub = [end.address for end in through]
    peers = [
        Peer(other, ends[other].public_key, (ends[other].address, *(through_hub if other == hub else ())), *link)
        for other, link in links.items()
        if link is not None
    ]
    mtu = me.mtu - OVERHEAD
    paths = [
        (end.address, _path_mtu(me, end, ends.get(hub) if end in through else None))
        for other, end in ends.items()
        if other in links
    ]
    slower = tuple((address, size) for address, size in paths if size < mtu)
    return MemberConfig(me.address, tuple(peers), mtu, slower, relays=name == hub)


def _link(me: MemberFacts, other: MemberFacts, port: int, former_peers: Mapping[str, Peer]) -> tuple[str, bool] | None:
    """The endpoint of another member, and whether to keep the path open; None where both use the hub."""
    if other.reaches is None and (former := former_peers.get(other.name)):
        return former.endpoint, former.keepalive  # it does not answer now: keep its configuration
    endpoint, reverse = _endpoint(me, other, port), _endpoint(other, me, port)
    if not endpoint and not reverse:
        return None
    # A member that others can reach needs no keepalive; one behind NAT does, also if the spec gives it an endpoint.
    return endpoint, bool(endpoint) and not reverse


def _endpoint(me: MemberFacts, other: MemberFacts, port: int) -> str:
    """Where `me` reaches `other`: between sites as the spec says, inside a site where it answered."""
    address = (me.reaches or {}).get(other.name, "")
    if other.endpoint and (me.site != other.site or not address):
        return with_port(other.endpoint, port)
    return with_port(address, port) if address else ""


def _path_mtu(me: MemberFacts, other: MemberFacts, hub: MemberFacts | None) -> int:
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


def addresses_to_try(
    facts: Mapping[str, Facts], sites: Mapping[str, str], reached: Mapping[str, str]
) -> dict[str, list[str]]:
    """The addresses at which others may reach each member, the best first.

    Its own ones; and behind NAT the address that we used, if it is public and no other member has the same.
    """
    inside: dict[str, str] = {}
    for site in set(sites.values()):
        inside |= lan_addresses({name: fact for name, fact in facts.items() if sites[name] == site}, reached)
    tries: dict[str, list[str]] = {}
    for name, fact in facts.items():
        own_addresses = [address.address for address in candidates(fact)]
        outer = reached.get(name, "")
        shared = [other for other, address in reached.items() if address == outer and other != name]
        public = bool(outer) and ipaddress.ip_address(outer).is_global and not shared
        tries[name] = list(
            dict.fromkeys(filter(None, (inside.get(name), *own_addresses, *([outer] if public else ()))))
        )
    return tries


def worth_trying(me: Facts, my_site: str, other_site: str, address: str) -> bool:
    """Whether only the member can answer at this address.

    A private address of another site that is also in our own network would be another machine.
    """
    parsed = ipaddress.ip_address(address)
    if my_site == other_site or parsed.is_global:
        return True
    return not any(parsed in ipaddress.ip_interface(f"{a.address}/{a.prefix}").network for a in candidates(me))


def assign_addresses(subnet: str, names: Iterable[str], before: Mapping[str, str]) -> dict[str, str]:
    """An address of the subnet for each member. Members keep theirs; new ones get the first free addresses."""
    network = ipaddress.IPv4Network(subnet)
    names = list(names)
    assigned = {
        name: before[name] for name in names if name in before and ipaddress.ip_address(before[name]) in network
    }
    free = (str(address) for address in network.hosts() if str(address) not in set(assigned.values()))
    return {name: assigned[name] if name in assigned else next(free) for name in names}


INTERFACE = "shoal0"
FOLDER = "/etc/shoal"
PRIVATE_KEY = f"{FOLDER}/wireguard.key"
PUBLIC_KEY = f"{FOLDER}/wireguard.pub"
NEXT_KEY = f"{PRIVATE_KEY}.next"
"""Exists only while keys are rotated."""
MARK = f"{FOLDER}/wireguard.rotating"
"""On the controller, while new keys are installed."""
PEERS = f"{FOLDER}/wireguard-peers.conf"
APPLY = f"{FOLDER}/wireguard-apply"
HUB_RULES = f"{FOLDER}/wireguard-hub.nft"
KNOCK = f"{FOLDER}/wireguard-knock"
UNIT = "/etc/systemd/system/shoal-wireguard.service"
SERVICE = "shoal-wireguard"
KNOCK_UNIT = "/etc/systemd/system/shoal-wireguard-knock.service"
KNOCK_SERVICE = "shoal-wireguard-knock"
MODULE = "wireguard"

KNOCK_INTERVAL_S = 5

METRIC = 4278198272
"""So high that any other route takes precedence."""
UNREACHABLE = ("type", "unreachable", "proto", "77")
"""Selects our unreachable route in `ip`. No other program uses this number."""
NO_UNREACHABLE = f"! ip route show {' '.join(UNREACHABLE)} | grep -q ."


MAKE_KEYS = (
    "set -eu; umask 077; "
    f"test -s {PRIVATE_KEY} || {{ wg genkey > {PRIVATE_KEY}.new; mv {PRIVATE_KEY}.new {PRIVATE_KEY}; }}; "
    f"wg pubkey < {PRIVATE_KEY} > {PUBLIC_KEY}.new; mv {PUBLIC_KEY}.new {PUBLIC_KEY}"
)
"""A shell line that makes the missing keys. No key is ever an argument."""


def peers_conf(peers: Iterable[Peer], port: int) -> str:
    """The configuration for `wg`, without the private key."""
    sections = [f"{HEADER}[Interface]\nListenPort = {port}\n"]
    for peer in peers:
        lines = [f"# {peer.name}", "[Peer]", f"PublicKey = {peer.public_key}"]
        lines.append(f"AllowedIPs = {', '.join(f'{address}/32' for address in peer.allowed)}")
        if peer.endpoint:
            lines.append(f"Endpoint = {peer.endpoint}")
        if peer.keepalive:
            lines.append(f"PersistentKeepalive = {KEEPALIVE_INTERVAL_S}")
        sections.append("\n".join(lines) + "\n")
    return "\n".join(sections)


def peers_in(text: str) -> dict[str, Peer]:
    """The peers that an earlier run wrote, by name."""
    peers: dict[str, Peer] = {}
    for part in text.split("\n\n")[1:]:
        name = part.partition("\n")[0].removeprefix("# ")
        values = dict(line.split(" = ", 1) for line in part.splitlines() if " = " in line)
        if "PublicKey" in values:
            allowed_ips = tuple(address.partition("/")[0] for address in values.get("AllowedIPs", "").split(", "))
            keepalive = "PersistentKeepalive" in values
            peers[name] = Peer(name, values["PublicKey"], allowed_ips, values.get("Endpoint", ""), keepalive)
    return peers


def apply_script(config: MemberConfig, subnet: str) -> str:
    """A script that applies the files to the interface. Peers that stay keep their session."""
    prefix = ipaddress.IPv4Network(subnet).prefixlen
    lines = [
        "#!/bin/sh",
        HEADER.rstrip(),
        "set -eu",
        f"{{ printf '[Interface]\\nPrivateKey = '; cat {PRIVATE_KEY} {PEERS}; }} | wg syncconf {INTERFACE} /dev/stdin",
        f"ip link set {INTERFACE} mtu {config.mtu} up",
        f"ip address replace {config.address}/{prefix} dev {INTERFACE}",
        f"ip -4 -o address show dev {INTERFACE} | while read -r _ _ _ old _; do",
        f'    [ "$old" = {config.address}/{prefix} ] || ip address delete "$old" dev {INTERFACE}',
        "done",
        f"ip route show {' '.join(UNREACHABLE)} | while read -r _ old _; do",
        f'    [ "$old" = {subnet} ] || ip route delete unreachable "$old" metric {METRIC}',
        "done",
        # Static routes exist only for paths with a smaller MTU than the interface.
        f"ip route flush dev {INTERFACE} proto static",
        *(f"ip route replace {to}/32 dev {INTERFACE} proto static mtu {size}" for to, size in config.slower),
    ]
    # Only the hub forwards, and only packets from this interface: no other host becomes a router.
    forwarding = f"> /proc/sys/net/ipv4/conf/{INTERFACE}/forwarding"
    if config.relays:
        lines += [f"nft -f {HUB_RULES}", f"echo 1 {forwarding}"]
    else:
        lines += [f"echo 0 {forwarding}", "nft delete table inet shoal-hub 2> /dev/null || true"]
    return "\n".join(lines) + "\n"


def knock_script(peers: Iterable[Peer]) -> str:
    """A script that repeatedly sends a packet to each peer that this host must call.

    A peer whose WireGuard restarted has no session with us, and cannot reach us behind NAT. Keepalive packets expect no
    answer; a data packet does, and without one WireGuard starts a new session after 15 s. Else it takes two minutes.
    """
    addresses = " ".join(peer.allowed[0] for peer in peers if peer.keepalive)
    # bash sends it, to the discard port.
    knock = f"    for peer in {addresses}; do echo > /dev/udp/$peer/9; done 2> /dev/null\n"
    wait = f"while sleep {KNOCK_INTERVAL_S}; do\n{knock}done\n" if addresses else "exec sleep infinity\n"
    return f"#!/bin/bash\n{HEADER}{wait}"


def knock_unit() -> str:
    what = "Signs of life for the private network of the cluster (WireGuard)"
    return daemon_unit(what, KNOCK, 1, {"After": f"{SERVICE}.service"})


def hub_rules() -> str:
    """The forwarding rules of a hub: from member to member, with segments that fit."""
    return (
        f"{HEADER}"
        "table inet shoal-hub\n"
        "delete table inet shoal-hub\n"
        "table inet shoal-hub {\n"
        "\tchain forward {\n"
        "\t\ttype filter hook forward priority filter - 5; policy accept;\n"
        f'\t\tiifname "{INTERFACE}" oifname != "{INTERFACE}" drop\n'
        f'\t\tiifname != "{INTERFACE}" oifname "{INTERFACE}" drop\n'
        f'\t\tiifname "{INTERFACE}" tcp flags syn tcp option maxseg size set rt mtu\n'
        "\t}\n"
        "\tchain output {\n"
        "\t\ttype filter hook output priority filter - 5; policy accept;\n"
        f'\t\toifname "{INTERFACE}" icmp type redirect drop\n'
        "\t}\n"
        "}\n"
    )


def unit(subnet: str, *, kernel: bool) -> str:
    """A systemd unit that makes the interface at boot, before anything that listens on it.

    Packets for the subnet must not leave by the default route while the interface restarts: an unreachable route below
    its own prevents that.
    """
    start: Settings = {"Type": "forking", "Restart": "always", "RestartSec": 1}
    command = f"/usr/bin/wireguard-go {INTERFACE}"
    if kernel:
        start = {"Type": "oneshot", "RemainAfterExit": "yes"}
        command = f"/sbin/ip link add {INTERFACE} type wireguard"
    return render_unit(
        Unit={
            "Description": "The private network of the cluster (WireGuard)",
            "After": "network.target",
            "StartLimitIntervalSec": 0,
            "Before": "network-online.target slurmctld.service slurmd.service",
        },
        Service={
            "ExecStartPre": (
                f"/sbin/ip route replace unreachable {subnet} metric {METRIC} proto {UNREACHABLE[-1]}",
                f"-/sbin/ip link delete {INTERFACE}",
            ),
            **start,
            "ExecStart": command,
            "ExecStartPost": APPLY,
            "ExecReload": APPLY,
            "ExecStopPost": f"-/sbin/ip link delete {INTERFACE}",
        },
        Install={"WantedBy": "multi-user.target"},
    )
