"""The files of our WireGuard network on a host, as text.

    wireguard.key   made on the host, never leaves it      wireguard-peers.conf  everyone else, for `wg syncconf`
    wireguard.pub   what the others must know              wireguard-apply       brings the interface to what is written
                                                           wireguard-knock       asks those it calls for a sign of life

A unit of our own makes the interface: by the kernel where it has WireGuard, else by `wireguard-go`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

from shoal.network.peers import KEEPALIVE, Peer, Place

INTERFACE = "shoal0"
FOLDER = "/etc/shoal"
PRIVATE_KEY = f"{FOLDER}/wireguard.key"
PUBLIC_KEY = f"{FOLDER}/wireguard.pub"
NEXT_KEY = f"{PRIVATE_KEY}.next"
"""There only while keys are rotated."""
MARK = f"{FOLDER}/wireguard.rotating"
"""On the controller, while new keys are being put in place."""
PEERS = f"{FOLDER}/wireguard-peers.conf"
APPLY = f"{FOLDER}/wireguard-apply"
HUB_RULES = f"{FOLDER}/wireguard-hub.nft"
KNOCK = f"{FOLDER}/wireguard-knock"
UNIT = "/etc/systemd/system/shoal-wireguard.service"
SERVICE = "shoal-wireguard"
KNOCK_UNIT = "/etc/systemd/system/shoal-wireguard-knock.service"
KNOCK_SERVICE = "shoal-wireguard-knock"
MODULE = "wireguard"

KNOCK_SECONDS = 5

METRIC = 4278198272
"""So high that any other route goes before it."""
UNREACHABLE = ("type", "unreachable", "proto", "77")
"""By which `ip` finds the route of ours that leads nowhere. The number stands for nobody else."""
NO_UNREACHABLE = f"! ip route show {' '.join(UNREACHABLE)} | grep -q ."

_OURS = "# Written by shoal; changes here are lost.\n"

MAKE_KEYS = (
    "set -eu; umask 077; "
    f"test -s {PRIVATE_KEY} || {{ wg genkey > {PRIVATE_KEY}.new; mv {PRIVATE_KEY}.new {PRIVATE_KEY}; }}; "
    f"wg pubkey < {PRIVATE_KEY} > {PUBLIC_KEY}.new; mv {PUBLIC_KEY}.new {PUBLIC_KEY}"
)
"""A shell line that makes what is missing of the two keys. No key is ever an argument."""


def peers_conf(peers: Iterable[Peer], port: int) -> str:
    """All that `wg` is told, but for the private key."""
    parts = [f"{_OURS}[Interface]\nListenPort = {port}\n"]
    for peer in peers:
        lines = [f"# {peer.name}", "[Peer]", f"PublicKey = {peer.public_key}"]
        lines.append(f"AllowedIPs = {', '.join(f'{address}/32' for address in peer.allowed)}")
        if peer.endpoint:
            lines.append(f"Endpoint = {peer.endpoint}")
        if peer.keepalive:
            lines.append(f"PersistentKeepalive = {KEEPALIVE}")
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def peers_in(text: str) -> dict[str, Peer]:
    """The peers that an earlier run wrote, by name."""
    found: dict[str, Peer] = {}
    for part in text.split("\n\n")[1:]:
        name = part.partition("\n")[0].removeprefix("# ")
        said = dict(line.split(" = ", 1) for line in part.splitlines() if " = " in line)
        if "PublicKey" in said:
            allowed = tuple(address.partition("/")[0] for address in said.get("AllowedIPs", "").split(", "))
            keepalive = "PersistentKeepalive" in said
            found[name] = Peer(name, said["PublicKey"], allowed, said.get("Endpoint", ""), keepalive)
    return found


def apply_script(place: Place, subnet: str) -> str:
    """Brings the interface to what the files say. Whoever stays a peer keeps the session."""
    prefix = ipaddress.IPv4Network(subnet).prefixlen
    lines = [
        "#!/bin/sh",
        _OURS.rstrip(),
        "set -eu",
        f"{{ printf '[Interface]\\nPrivateKey = '; cat {PRIVATE_KEY} {PEERS}; }} | wg syncconf {INTERFACE} /dev/stdin",
        f"ip link set {INTERFACE} mtu {place.mtu} up",
        f"ip address replace {place.address}/{prefix} dev {INTERFACE}",
        f"ip -4 -o address show dev {INTERFACE} | while read -r _ _ _ old _; do",
        f'    [ "$old" = {place.address}/{prefix} ] || ip address delete "$old" dev {INTERFACE}',
        "done",
        f"ip route show {' '.join(UNREACHABLE)} | while read -r _ old _; do",
        f'    [ "$old" = {subnet} ] || ip route delete unreachable "$old" metric {METRIC}',
        "done",
        # Routes of our own are there only for paths with smaller packets than the interface's.
        f"ip route flush dev {INTERFACE} proto static",
        *(f"ip route replace {to}/32 dev {INTERFACE} proto static mtu {size}" for to, size in place.slower),
    ]
    # Only what comes in by this interface is passed on, and only by the hub: nobody becomes a router otherwise.
    forwarding = f"> /proc/sys/net/ipv4/conf/{INTERFACE}/forwarding"
    if place.relays:
        lines += [f"nft -f {HUB_RULES}", f"echo 1 {forwarding}"]
    else:
        lines += [f"echo 0 {forwarding}", "nft delete table inet shoal-hub 2> /dev/null || true"]
    return "\n".join(lines) + "\n"


def knock_script(peers: Iterable[Peer]) -> str:
    """Sends a packet to each peer that this host must call, again and again.

    A peer whose WireGuard was restarted knows no session with us, and not where we are: behind NAT nobody can call us.
    The packets that keep the NAT's door open want no answer; a packet of data does, and where none comes in 15 s
    WireGuard begins a new session. Without it that takes up to two minutes.
    """
    called = " ".join(peer.allowed[0] for peer in peers if peer.keepalive)
    # bash itself sends it, to the port that throws everything away.
    knock = f"    for peer in {called}; do echo > /dev/udp/$peer/9; done 2> /dev/null\n"
    wait = f"while sleep {KNOCK_SECONDS}; do\n{knock}done\n" if called else "exec sleep infinity\n"
    return f"#!/bin/bash\n{_OURS}{wait}"


def knock_unit() -> str:
    return (
        f"{_OURS}"
        "[Unit]\n"
        "Description=Signs of life for the private network of the cluster (WireGuard)\n"
        f"After={SERVICE}.service\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"ExecStart={KNOCK}\n"
        "Restart=always\n"
        "RestartSec=1\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )


def hub_rules() -> str:
    """What a hub passes on: from member to member, in segments that fit."""
    return (
        f"{_OURS}"
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

    Packets for the subnet must not leave by the default route while there is no interface, be it for the second that a
    restart takes: beneath its route is one that leads nowhere, and stays.
    """
    made = (
        f"Type=oneshot\nRemainAfterExit=yes\nExecStart=/sbin/ip link add {INTERFACE} type wireguard\n"
        if kernel
        else f"Type=forking\nRestart=always\nRestartSec=1\nExecStart=/usr/bin/wireguard-go {INTERFACE}\n"
    )
    return (
        f"{_OURS}"
        "[Unit]\n"
        "Description=The private network of the cluster (WireGuard)\n"
        "After=network.target\n"
        "StartLimitIntervalSec=0\n"
        "Before=network-online.target slurmctld.service slurmd.service\n"
        "\n"
        "[Service]\n"
        f"ExecStartPre=/sbin/ip route replace unreachable {subnet} metric {METRIC} proto {UNREACHABLE[-1]}\n"
        f"ExecStartPre=-/sbin/ip link delete {INTERFACE}\n"
        f"{made}"
        f"ExecStartPost={APPLY}\n"
        f"ExecReload={APPLY}\n"
        f"ExecStopPost=-/sbin/ip link delete {INTERFACE}\n"
        "\n"
        "[Install]\n"
        "WantedBy=multi-user.target\n"
    )
