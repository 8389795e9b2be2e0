"""New WireGuard keys for all hosts. Each host makes its own; the public keys change everywhere at once.

A host's new key lies beside the old one until all hosts have theirs. A mark on the controller says that they are being
installed: from then on the next run finishes one that was killed, and `shoal up` distributes the keys that hosts have.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations

from shoal.errors import HostError
from shoal.hostlist import compress
from shoal.network.tunnel import needs_tunnel
from shoal.network.wireguard import INTERFACE, MARK, NEXT_KEY, PRIVATE_KEY, PUBLIC_KEY
from shoal.plan.diff import cluster_goal
from shoal.plan.observe import observe
from shoal.plan.reachability import connection_addresses, slurm_ports, try_connections
from shoal.plan.rotation import RotationContext, RotationResult, apply_all, raise_failed, run_on, scheduling_paused
from shoal.roles.component import Cluster, Stage
from shoal.roles.wireguard import WireGuardComponent, config_of

HANDSHAKE_TIMEOUT_S = 60
"""For every pair of hosts to have a handshake with the new keys."""

MAKE_NEXT = f"set -eu; umask 077; test -s {NEXT_KEY} || {{ wg genkey > {NEXT_KEY}.new; mv {NEXT_KEY}.new {NEXT_KEY}; }}"
INSTALL_NEXT = (
    f"set -eu; umask 077; test ! -s {NEXT_KEY} || mv {NEXT_KEY} {PRIVATE_KEY}; "
    f"wg pubkey < {PRIVATE_KEY} > {PUBLIC_KEY}.new; mv {PUBLIC_KEY}.new {PUBLIC_KEY}"
)
"""The interface keeps the old key until it reads the files."""


async def rotate_wireguard(now: RotationContext) -> RotationResult:
    now = await _with_wireguard(now)
    controller = await now.fleet.host(now.controller)
    is_unfinished = (await controller.run(("test", "-e", MARK), timeout=30)).status == 0
    async with scheduling_paused(controller):
        if not is_unfinished:
            await run_on(now, now.hosts, lambda name: _shell(now, name, MAKE_NEXT))
            await _shell(now, now.controller, f"touch {MARK}")
        await run_on(now, now.hosts, lambda name: _shell(now, name, INSTALL_NEXT))
        await _verify(now, await _update_peers(now))
    await _shell(now, now.controller, f"rm -f {MARK}")
    return RotationResult(now.hosts, is_unfinished)


async def _with_wireguard(now: RotationContext) -> RotationContext:
    """The same for the hosts with a WireGuard key. Containers behind a tunnel have none."""
    facts = (await observe(now.fleet, now.spec)).facts
    raise_failed(now)
    names_without_key = [name for name in now.hosts if needs_tunnel(now.spec.network.kind, facts[name])]
    for name in names_without_key:
        now.phase.done(name)
    return replace(now, hosts=tuple(name for name in now.hosts if name not in names_without_key))


async def _update_peers(now: RotationContext) -> Cluster:
    """Apply the network's documents as `shoal up` does, on all hosts at the same time."""
    observed = await observe(now.fleet, now.spec)
    raise_failed(now)
    cluster = cluster_goal(now.spec, observed, connection_addresses(now.fleet)).now
    documents = {
        member.name: WireGuardComponent().documents(cluster, member)[Stage.SERVICES]
        for member in cluster.members
        if member.name in now.hosts
    }
    await apply_all(now, documents, {})
    return cluster


async def _verify(now: RotationContext, cluster: Cluster) -> None:
    """Every interface has its host's new key, and every pair of hosts connects with the new keys."""
    key_check = f'test "$(wg show {INTERFACE} public-key)" = "$(cat {PUBLIC_KEY})"'
    pairs, ports = _directed_pairs(cluster, now.hosts), slurm_ports(now.spec, cluster.addresses)
    deadline = time.monotonic() + HANDSHAKE_TIMEOUT_S

    async def verify(name: str) -> None:
        fix = "run the same command again"
        while (await (await now.fleet.host(name)).run(("sh", "-c", key_check), timeout=60)).status != 0:
            if time.monotonic() > deadline:
                raise HostError(name, "does not use its new key", hint=fix)
            await asyncio.sleep(0.5)
        silent_pairs = [pair for pair in pairs if pair[0] == name]
        while silent_pairs := list(await try_connections(now.fleet, silent_pairs, ports)):
            if time.monotonic() > deadline:
                peer_names = compress(target for _, target in silent_pairs)
                raise HostError(name, f"cannot reach {peer_names} with its new key", hint=fix)
        now.phase.done(name)

    await run_on(now, now.hosts, verify)


def _directed_pairs(cluster: Cluster, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """For every pair, which host starts the handshake. Only one does: both drop handshakes that cross.

    It is the host that knows the endpoint of the other: a host behind NAT has none.
    """
    endpoint_peers = {name: {peer.name for peer in config_of(cluster, name).peers if peer.endpoint} for name in hosts}
    return [
        (other, host) if host in endpoint_peers[other] and other not in endpoint_peers[host] else (host, other)
        for host, other in combinations(hosts, 2)
    ]


async def _shell(now: RotationContext, name: str, script: str) -> str:
    result = await (await now.fleet.host(name)).run(("sh", "-c", script), timeout=60)
    if result.status != 0:
        raise HostError(name, result.error_text.strip() or f"status {result.status}", hint="run the same command again")
    return result.text
