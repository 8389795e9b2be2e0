"""Addresses and names: which address of a host the members use, and the lines of /etc/hosts that name them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping

from shoal.agent.document import render_unit
from shoal.agent.facts import Address, Facts
from shoal.remote import program_text
from shoal.remote.agent.file_io import block_marks

# Bridges and tunnels of one host: two hosts can have the same subnet there without reaching each other. Also our own
# network, which must not be built on itself.
LOCAL_ONLY = ("lo", "docker", "br-", "virbr", "podman", "cni", "veth", "lxc", "lxdbr", "flannel", "cali", "shoal")


def lan_addresses(facts: Mapping[str, Facts], reached: Mapping[str, str]) -> dict[str, str]:
    """The address of each member: on the subnet that most members share, preferring the one we connected to.

    `reached` has the address of our SSH connection; a host behind NAT does not own it.
    """
    usable = {name: candidates(fact) for name, fact in facts.items()}
    shared: dict[str, int] = {}
    for addresses in usable.values():
        for network in {_network(address) for address in addresses}:
            shared[network] = shared.get(network, 0) + 1

    by_name = {}
    for name, addresses in usable.items():
        if not addresses:
            by_name[name] = reached.get(name, "")
            continue
        best = max(addresses, key=lambda a: (shared[_network(a)], a.address == reached.get(name), ":" not in a.address))
        by_name[name] = best.address
    return by_name


def candidates(facts: Facts) -> list[Address]:
    """The addresses at which other hosts may reach this one: no loopback, and no bridge or tunnel of its own."""
    return [
        address
        for address in facts.addresses
        if not address.interface.startswith(LOCAL_ONLY) and not ipaddress.ip_address(address.address).is_link_local
    ]


def strangers(facts: Mapping[str, Facts], addresses: Mapping[str, str]) -> dict[str, list[str]]:
    """The neighbours of each host that are no members, on the segment where it has its address in `addresses`."""
    members = {address.address for fact in facts.values() for address in fact.addresses} | {*addresses.values()}
    result = {}
    for name, fact in facts.items():
        segments = [
            ipaddress.ip_interface(f"{one.address}/{one.prefix}").network
            for one in candidates(fact)
            if one.address == addresses.get(name)
        ]
        others = [one.address for one in fact.neighbours if one.address not in members]
        result[name] = [one for one in others if any(ipaddress.ip_address(one) in segment for segment in segments)]
    return {name: others for name, others in result.items() if others}


def _network(address: Address) -> str:
    return str(ipaddress.ip_network(f"{address.address}/{address.prefix}", strict=False))


MARK = "#shoal "
"""Comments out a line of `/etc/hosts`."""
SPLIT_LINE_MARK = " #shoal: the rest of the line above"
"""Marks the line that keeps the `localhost` part of such a line."""


def hosts_block(addresses: Mapping[str, str], aliases: Mapping[str, str] | None = None) -> str:
    """The lines of `/etc/hosts` for the members; `aliases` are further names, by member."""
    width = max((len(address) for address in addresses.values()), default=0)
    names = {name: f"{name} {alias}" for name, alias in (aliases or {}).items()}
    return "".join(f"{address:<{width}}  {names.get(name, name)}\n" for name, address in addresses.items() if address)


def addresses_in(hosts: str, block: str) -> dict[str, str]:
    """The addresses that an earlier run wrote into the named block of `/etc/hosts`, by name."""
    begin, end = block_marks(block)
    inside = hosts.partition(f"{begin}\n")[2].partition(f"{end}\n")[0]
    lines = [line.split() for line in inside.splitlines()]
    return {fields[1]: fields[0] for fields in lines if len(fields) > 1}


def own_names(hosts: str, block: str, names: Iterable[str], address: str) -> tuple[str, ...]:
    """The lines of `/etc/hosts` that give the host's own names an address outside our network.

    Debian maps the host's name to 127.0.1.1, and programs that resolve their own name would listen there.
    """
    begin, end = block_marks(block)
    lower_names, inside, lines = {name.lower() for name in names}, False, []
    for line in hosts.splitlines():
        inside = line == begin or (inside and line != end)
        fields = line.partition("#")[0].lower().split()
        if not inside and fields and fields[0] != address and lower_names.intersection(fields[1:]):
            lines.append(line)
    return tuple(lines)


def own_name_rule(block: str, names: Iterable[str]) -> str:
    """A `sed -E` script that comments out such lines, and keeps their `localhost` part in a line of its own."""
    begin, end = block_marks(block)
    alternatives = "|".join(name.replace(".", "[.]") for name in dict.fromkeys(names))
    return (
        f"/^{begin}$/,/^{end}$/ b\n"
        f"/^[0-9a-fA-F.:]+[[:blank:]]+([^#]*[[:blank:]])?({alternatives})([[:blank:]#]|$)/I! b\n"
        "h\n"
        f"s/^/{MARK}/\n"
        "/[[:blank:]](ip6-)?localhost/! b\n"
        "p\n"
        "g\n"
        "s/[[:blank:]]*#.*//\n"
        ":next\n"
        f"s/[[:blank:]]+({alternatives})([[:blank:]]|$)/\\2/I\n"
        "t next\n"
        f"s/$/{SPLIT_LINE_MARK}/\n"
    )


def names_program(hosts: str, block: str, kept: str, rule: str) -> str:
    """A program that restores the members' names from the copy `kept` where they are missing, and applies the rule."""
    begin, end = block_marks(block)
    return program_text("member_names.sh", BEGIN=begin, END=end, HOSTS=hosts, KEPT=kept, RULE=rule)


def names_unit(program: str) -> str:
    """Runs the program at boot, after cloud-init, which rewrites `/etc/hosts` on many images at every boot."""
    return render_unit(
        Unit={
            "Description": "Names of the cluster's members in /etc/hosts",
            "After": "cloud-init.service cloud-init-network.service",
            "Before": "munge.service slurmdbd.service slurmctld.service slurmd.service",
        },
        Service={"Type": "oneshot", "RemainAfterExit": "yes", "ExecStart": f"/bin/sh {program}"},
        Install={"WantedBy": "multi-user.target"},
    )
