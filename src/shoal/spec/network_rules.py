"""What must hold between the network and the rest of a spec."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shoal.spec.network import Network
from shoal.spec.problem import Problem, nearest
from shoal.spec.words import show

OWN = {"wireguard": ("subnet", "port", "hub"), "tailscale": ("auth_key", "login_server", "tags")}


def network_problems(data: Mapping[str, Any], hosts: Sequence[str], rented: int = 0) -> Iterator[Problem]:
    """Every rule about the network that does not hold. `hosts` are the names of all members.

    `rented` is how many nodes may come beside them.
    """
    network = data.get("network")
    if not isinstance(network, Mapping):
        return
    kind = network.get("kind")
    for owner, fields in OWN.items():
        for field in fields if owner != kind else ():
            if network.get(field) not in (None, Network.model_fields[field].default):
                yield Problem(("network", field), f"`{field}` is of {owner} alone", "", f"delete it, or use {owner}")
    hub = network.get("hub")
    if isinstance(hub, str) and hub not in hosts:
        yield Problem(("network", "hub"), "the hub is not a host of the cluster", show(hub), nearest(hub, list(hosts)))
    room = _room(network.get("subnet"))
    if kind == "wireguard" and room is not None and len(hosts) + rented > room:
        found = f"{len(hosts) + rented} hosts, and room for {room}"
        yield Problem(("network", "subnet"), "more hosts than the subnet has addresses", found, "give a larger one")


def _room(subnet: object) -> int | None:
    try:
        return ipaddress.IPv4Network(str(subnet)).num_addresses - 2
    except ValueError:
        return None
