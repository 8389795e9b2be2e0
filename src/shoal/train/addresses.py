"""The addresses by which rank 0 may be found on the network between the nodes."""

from __future__ import annotations

from shoal.train.env import Env
from shoal.train.interfaces import is_loopback, local_addresses, source_address

_PEERS_ASKED = 4
"""A few of the other nodes are enough to see which way the network lies."""


def own_addresses(env: Env, interface: str = "") -> list[str]:
    """Where the others may find this host, best first: as told, on the interface named, by the route to the others.

    The rest of the host's addresses come last. They do no harm: whoever answers there without the word that rank 0
    wrote down is not taken for it.
    """
    if env.node_count == 1:
        return ["127.0.0.1"]
    local = [(name, address) for name, address in local_addresses() if not address.startswith("fe80:")]
    best = env.addresses_of(env.node) if env.node in env.addresses else []
    best += [address for name, address in local if name == interface]
    peers = [node for node in env.nodes if node != env.node][:_PEERS_ASKED]
    best += [source_address(address) for node in peers for address in env.addresses_of(node)]
    best += [address for _, address in local if address == env.master_address]
    best += [address for _, address in local]
    return [address for address in dict.fromkeys(best) if address and not is_loopback(address)]


def master_addresses(env: Env) -> list[str]:
    """Where to look for rank 0 when nothing is shared but its name. On its own node loopback leads there too."""
    if env.node_count == 1:
        return ["127.0.0.1"]
    found = env.addresses_of(env.master_address)
    return [*found, "127.0.0.1"] if env.node == env.node_of(0) else found
