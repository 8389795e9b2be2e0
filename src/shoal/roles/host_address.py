"""The address and the name of a host on the cluster's network. Slurm's daemons listen only there, and wait for it.

All daemons do or none, as they read one configuration. A daemon without its address does not start (`Cannot assign
requested address`). A running daemon survives when the address disappears and returns; a new address changes its unit,
which restarts it. Daemons and srun listen where their host's own name resolves, so `/etc/hosts` has it.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Iterator, Mapping

from shoal.agent.document import Block, Command, Document, File, Service, restart_drop_in
from shoal.agent.facts import Facts
from shoal.network.addresses import (
    MARK,
    SPLIT_LINE_MARK,
    hosts_block,
    names_program,
    names_unit,
    own_name_rule,
    own_names,
)
from shoal.network.tailscale import read_status
from shoal.roles.component import Cluster
from shoal.roles.current_conf import HOSTS, HOSTS_BLOCK, CurrentConf
from shoal.spec.finding import Finding
from shoal.spec.member import Member

ADDRESS_TIMEOUT_S = 60
"""Less than systemd's start timeout. Afterwards systemd restarts the daemon, without a limit."""
DAEMONS = ("slurmctld", "slurmd", "slurmdbd")
DROP_INS = {name: f"/etc/systemd/system/{name}.service.d/shoal-address.conf" for name in DAEMONS}

Obstacle = tuple[str, str]
"""What a host has, and the fix."""
CLOUD_INIT = "/etc/cloud/cloud.cfg"
"""Exists where cloud-init is installed, which on many images rewrites `/etc/hosts` at every boot."""
HOSTS_COPY = "/etc/shoal/hosts"
NAMES_PROGRAM = "/usr/local/lib/shoal/names"
NAMES_SERVICE = "shoal-names"
NAMES_UNIT = f"/etc/systemd/system/{NAMES_SERVICE}.service"
NAME_READERS = ("munge", "slurmdbd", "slurmctld", "slurmd")
"""Daemons that resolve the host's own name when they start. munged puts the address into every credential."""


def can_listen_at_one_address(
    kind: str, members: Iterable[Member], facts: Mapping[str, Facts], addresses: Mapping[str, str], before: CurrentConf
) -> bool:
    """Whether Slurm's daemons can listen on the network only. A host that does not answer counts as before."""
    members = tuple(members)
    if any(_obstacles(kind, members, facts, addresses)):
        return False
    return before.one_address or all(member.name in facts for member in members)


def address_findings(
    kind: str, members: Iterable[Member], facts: Mapping[str, Facts], addresses: Mapping[str, str]
) -> Iterator[Finding]:
    """The hosts because of which Slurm listens on all addresses. The role of Tailscale reports its own."""
    for name, (cause, fix) in _obstacles(kind, members, facts, addresses):
        if fix:
            what = "because of it Slurm listens on all addresses of all hosts, not only on the network's"
            yield Finding("warning", what, cause, fix, host=name)


def _obstacles(
    kind: str, members: Iterable[Member], facts: Mapping[str, Facts], addresses: Mapping[str, str]
) -> Iterator[tuple[str, Obstacle]]:
    names = [member.name for member in members]
    addresses = {name: addresses[name] for name in names if name in addresses}
    for name in names:
        if name in facts and (obstacle := _obstacle(kind, name, facts[name], addresses)):
            yield name, obstacle


def _obstacle(kind: str, name: str, facts: Facts, addresses: Mapping[str, str]) -> Obstacle | None:
    """What keeps a host's daemons, which resolve its own name, from listening at its address only."""
    hostname = facts.hostname.lower()
    if is_localhost(hostname):
        return "its host name is localhost", "give it a name: `hostnamectl set-hostname NAME`"
    if hostname != name.lower() and hostname in map(str.lower, addresses):
        return f"its host name is {hostname}, which is another member's", "give each host its own name in the file"
    if kind == "tailscale":
        # Without TUN, tailscaled delivers packets to the loopback address.
        return None if name not in addresses or read_status(facts.tailscale).tun else ("userspace networking", "")
    return _lan_obstacle(name, facts, addresses) if kind == "lan" else None


def _lan_obstacle(name: str, facts: Facts, addresses: Mapping[str, str]) -> Obstacle | None:
    address = addresses.get(name)
    if address is None:
        return "it has no address that others can reach", "connect it to the network of the others"
    own_networks = {a.address: ipaddress.ip_interface(f"{a.address}/{a.prefix}").network for a in facts.addresses}
    ip = _parse_ip(address)
    if address not in own_networks and not (ip and ip.is_loopback):
        return f"others reach it at {address}, which is not its own", "use `network: wireguard` for hosts behind NAT"
    for other, target in addresses.items():
        ip = _parse_ip(target)
        near = [own_address for own_address, network in own_networks.items() if ip and ip in network]
        if near and address not in near and other != name:
            return f"it is {address} to the others, and {near[0]} to {other}", "give all hosts addresses in one subnet"
    return None


def _parse_ip(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(address)
    except ValueError:
        return None  # a name


def address_wait_file(cluster: Cluster, member: Member, daemon: str) -> File:
    """The drop-in that makes a daemon wait for its address; removed where it listens on all addresses."""
    address = listen_address(cluster, member)
    return File(DROP_INS[daemon], address_wait_drop_in(address) if address else None, restarts=(daemon,))


def listen_address(cluster: Cluster, member: Member) -> str | None:
    """Where Slurm's daemons listen on a host; None for all addresses."""
    return cluster.addresses.get(member.name) if cluster.conf.one_address else None


def address_wait_drop_in(address: str) -> str:
    # The units that create such an address are ordered before Slurm's.
    exists = f"ip -o address show to {address} | grep -q ."
    wait = f'timeout {ADDRESS_TIMEOUT_S} sh -c "until {exists}; do sleep 0.2; done"'
    message = f'echo "{address}, where this daemon listens, is not an address of this host yet" >&2'
    return restart_drop_in(service={"ExecStartPre": f"/bin/sh -c '{wait} || {{ {message}; exit 1; }}'"})


def host_name_items(cluster: Cluster, member: Member) -> Document:
    """The members' names in `/etc/hosts`, with the host's own, which may resolve to another address so far."""
    facts, alias = cluster.facts[member.name], _alias(cluster, member.name)
    text = hosts_block(cluster.addresses, {member.name: alias} if alias else {})
    if not _changes_hosts_file(cluster):
        return (Block(HOSTS, HOSTS_BLOCK, text),)
    own_hostnames = (member.name, alias) if alias else (member.name,)
    rule = own_name_rule(HOSTS_BLOCK, own_hostnames)
    other_lines = own_names(facts.text(HOSTS), HOSTS_BLOCK, own_hostnames, cluster.addresses.get(member.name, ""))
    change = Command("own name", ("sed", "-i", "-E", rule, HOSTS), restarts=_name_readers(cluster, member))
    return (
        Block(HOSTS, HOSTS_BLOCK, text),
        *([change] if other_lines else ()),
        *(_boot_items(text, rule) if facts.has_file(CLOUD_INIT) and facts.init == "systemd" else ()),
    )


def _name_readers(cluster: Cluster, member: Member) -> tuple[str, ...]:
    """The daemons to restart with the host's own name.

    Slurm's cannot listen at an address that the host gets only with the network. They restart after it, as their
    drop-ins name the address.
    """
    present = {address.address for address in cluster.facts[member.name].addresses}
    early = cluster.conf.one_address and cluster.addresses.get(member.name) not in present
    return tuple(name for name in NAME_READERS if not early or name not in DAEMONS)


def leftover_host_names(cluster: Cluster, member: Member) -> Document:
    """Undoes what an earlier run changed and is no longer needed, after the daemons."""
    facts = cluster.facts[member.name]
    changed = facts.has_file(NAMES_UNIT) or f"\n{MARK}" in f"\n{facts.text(HOSTS)}"
    return host_name_removal() if changed and not _changes_hosts_file(cluster) else ()


def host_name_removal() -> Document:
    """Removes the names, and restores the lines of `/etc/hosts`."""
    restore = ("sed", "-i", "-e", f"/{SPLIT_LINE_MARK}$/d", "-e", f"s/^{MARK}//", HOSTS)
    return (
        Service(NAMES_SERVICE, enabled=False, running=False),
        *map(File, (NAMES_UNIT, NAMES_PROGRAM, HOSTS_COPY)),
        Command("own name", restore, unless=("sh", "-c", f"! grep -q '^{MARK}' {HOSTS}")),
    )


def _boot_items(text: str, rule: str) -> Document:
    program = names_program(HOSTS, HOSTS_BLOCK, HOSTS_COPY, rule)
    return (
        File(HOSTS_COPY, text),
        File(NAMES_PROGRAM, program, mode=0o755),
        File(NAMES_UNIT, names_unit(NAMES_PROGRAM)),
        Service(NAMES_SERVICE),
    )


def is_localhost(name: str) -> bool:
    return name.lower().partition(".")[0] == "localhost"


def _alias(cluster: Cluster, name: str) -> str:
    """The host name where it is neither the member's name nor another member's."""
    hostname = cluster.facts[name].hostname
    member_names = {other.lower() for other in cluster.addresses}
    return "" if hostname.lower() in member_names or is_localhost(hostname) else hostname


def _changes_hosts_file(cluster: Cluster) -> bool:
    """Whether foreign lines of `/etc/hosts` may be changed: in a LAN only if Slurm needs it."""
    return cluster.spec.network.kind != "lan" or cluster.conf.one_address
