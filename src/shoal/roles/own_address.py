"""Slurm's daemons listen at one address of their host, the one on the cluster's network, and wait for it.

All of them do or none, as they read one configuration. A daemon whose address is not there does not start (`Cannot
assign requested address`). One that listens goes on when the address goes and comes back; where the host gets another
one, its unit names that, and so it is started again.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from shoal.agent.document import File
from shoal.agent.facts import Facts
from shoal.network.tailscale import read_status
from shoal.roles.in_force import InForce
from shoal.roles.own_name import is_localhost
from shoal.spec.finding import Finding
from shoal.spec.member import Member

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

WAIT_SECONDS = 60
"""Less than systemd gives a service to start. Then it is tried again, for as long as it takes."""
DAEMONS = ("slurmctld", "slurmd", "slurmdbd")
DROP_INS = {name: f"/etc/systemd/system/{name}.service.d/shoal-address.conf" for name in DAEMONS}

Obstacle = tuple[str, str]
"""What was found on a host, and how to mend it."""


def listens_at_one(
    kind: str, members: Iterable[Member], facts: Mapping[str, Facts], addresses: Mapping[str, str], before: InForce
) -> bool:
    """Whether Slurm's daemons may listen on the network alone. A host that does not answer is taken for what it was."""
    members = tuple(members)
    if any(_obstacles(kind, members, facts, addresses)):
        return False
    return before.one_address or all(member.name in facts for member in members)


def obstacles(
    kind: str, members: Iterable[Member], facts: Mapping[str, Facts], addresses: Mapping[str, str]
) -> Iterator[Finding]:
    """Because of whom Slurm listens on all addresses everywhere. What a tailnet lacks its own role tells."""
    for name, (found, fix) in _obstacles(kind, members, facts, addresses):
        if fix:
            what = "because of it Slurm listens on all addresses of all hosts, and not on the network's alone"
            yield Finding("warning", what, found, fix, host=name)


def _obstacles(
    kind: str, members: Iterable[Member], facts: Mapping[str, Facts], addresses: Mapping[str, str]
) -> Iterator[tuple[str, Obstacle]]:
    names = [member.name for member in members]
    addresses = {name: addresses[name] for name in names if name in addresses}
    for name in names:
        found = _obstacle(kind, name, facts[name], addresses) if name in facts else None
        if found:
            yield name, found


def _obstacle(kind: str, name: str, facts: Facts, addresses: Mapping[str, str]) -> Obstacle | None:
    """What keeps a host's daemons, which go by its own name, from listening at its address alone."""
    hostname = facts.hostname.lower()
    if is_localhost(hostname):
        return "its host name is localhost", "give it a name: `hostnamectl set-hostname NAME`"
    if hostname != name.lower() and hostname in map(str.lower, addresses):
        return f"its host name is {hostname}, which is another member's", "give each host its own name in the file"
    if kind == "tailscale":
        # What comes for a host without TUN is handed to its loopback.
        return None if name not in addresses or read_status(facts.tailscale).tun else ("userspace networking", "")
    return _lan_obstacle(name, facts, addresses) if kind == "lan" else None


def _lan_obstacle(name: str, facts: Facts, addresses: Mapping[str, str]) -> Obstacle | None:
    address = addresses.get(name)
    if address is None:
        return "no address of its own that others could reach", "connect it to the others' network"
    own = {one.address: ipaddress.ip_interface(f"{one.address}/{one.prefix}").network for one in facts.addresses}
    if address not in own and not _is_loopback(address):
        return f"others reach it at {address}, which is not its own", "hosts behind NAT want `network: wireguard`"
    for other, there in addresses.items():
        near = [source for source, network in own.items() if _is_in(there, network)]
        if near and address not in near and other != name:
            return f"it is {address} to the others, and {near[0]} to {other}", "give all hosts addresses in one subnet"
    return None


def _is_loopback(address: str) -> bool:
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def _is_in(address: str, network: ipaddress.IPv4Network | ipaddress.IPv6Network) -> bool:
    try:
        return ipaddress.ip_address(address) in network
    except ValueError:
        return False


def awaits_address(cluster: Cluster, member: Member, daemon: str) -> File:
    """What the unit of a daemon says of the address; nothing where it listens at all that its host has."""
    address = own_address(cluster, member)
    return File(DROP_INS[daemon], drop_in(address) if address else None, restarts=(daemon,))


def own_address(cluster: Cluster, member: Member) -> str | None:
    """Where Slurm's daemons listen on a host; None where they do at all addresses."""
    return cluster.addresses.get(member.name) if cluster.conf.one_address else None


def drop_in(address: str) -> str:
    # The units that make such an address say that they come before Slurm's.
    there = f"ip -o address show to {address} | grep -q ."
    wait = f'timeout {WAIT_SECONDS} sh -c "until {there}; do sleep 0.2; done"'
    say = f'echo "{address}, where this daemon listens, is not an address of this host yet" >&2'
    return (
        "# Written by shoal; changes here are lost.\n"
        "[Unit]\n"
        "StartLimitIntervalSec=0\n"
        "\n"
        "[Service]\n"
        f"ExecStartPre=/bin/sh -c '{wait} || {{ {say}; exit 1; }}'\n"
        "Restart=on-failure\n"
        "RestartSec=3\n"
    )
