"""Which of a host's addresses the other members use."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping

from shoal.agent.facts import Address, Facts

# Bridges and tunnels that exist on one host only: two hosts can share such a subnet without reaching each other. And
# our own network: it is not what it is built on.
LOCAL_ONLY = ("lo", "docker", "br-", "virbr", "podman", "cni", "veth", "lxc", "lxdbr", "flannel", "cali", "shoal")


def lan_addresses(facts: Mapping[str, Facts], reached: Mapping[str, str]) -> dict[str, str]:
    """One address a member: the one on the subnet that most members share, and among equals the one we reached it by.

    `reached` holds the address our own SSH connection went to; a host behind address translation does not own it.
    """
    known = {name: candidates(fact) for name, fact in facts.items()}
    shared: dict[str, int] = {}
    for addresses in known.values():
        for network in {_network(address) for address in addresses}:
            shared[network] = shared.get(network, 0) + 1

    chosen = {}
    for name, addresses in known.items():
        if not addresses:
            chosen[name] = reached.get(name, "")
            continue
        best = max(addresses, key=lambda a: (shared[_network(a)], a.address == reached.get(name), ":" not in a.address))
        chosen[name] = best.address
    return chosen


def candidates(facts: Facts) -> list[Address]:
    """The addresses at which other hosts may find this one: not loopback, nor a bridge or tunnel of its own."""
    return [
        address
        for address in facts.addresses
        if not address.interface.startswith(LOCAL_ONLY) and not ipaddress.ip_address(address.address).is_link_local
    ]


def _network(address: Address) -> str:
    return str(ipaddress.ip_network(f"{address.address}/{address.prefix}", strict=False))
