"""New WireGuard keys for all hosts. Each makes its own, as ever; what the others must know changes everywhere at once.

A host's new key waits beside the old one until all have theirs. A mark on the controller says that they are being put
in place: from then on a run which was killed is finished by the next, and `shoal up` tells all what each host has.
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
from shoal.plan.diff import wanted
from shoal.plan.observe import observe
from shoal.plan.pause import no_job_starts
from shoal.plan.reachability import call, reached_addresses, slurm_ports
from shoal.plan.rotation import Rotated, Rotating, apply_all, raise_failed
from shoal.roles.cluster import Cluster
from shoal.roles.stage import Stage
from shoal.roles.wireguard import WireGuard, place_of

PATIENCE = 60
"""Seconds until every pair of hosts must have spoken under the new keys."""

MAKE_NEXT = f"set -eu; umask 077; test -s {NEXT_KEY} || {{ wg genkey > {NEXT_KEY}.new; mv {NEXT_KEY}.new {NEXT_KEY}; }}"
PUT_IN_PLACE = (
    f"set -eu; umask 077; test ! -s {NEXT_KEY} || mv {NEXT_KEY} {PRIVATE_KEY}; "
    f"wg pubkey < {PRIVATE_KEY} > {PUBLIC_KEY}.new; mv {PUBLIC_KEY}.new {PUBLIC_KEY}"
)
"""The interface goes on with the old key until it is told to read the files."""


async def rotate_wireguard(now: Rotating) -> Rotated:
    now = await _in_the_network(now)
    controller = await now.fleet.host(now.controller)
    unfinished = (await controller.run(("test", "-e", MARK), timeout=30)).status == 0
    async with no_job_starts(controller):
        if not unfinished:
            await _everywhere(now, MAKE_NEXT)
            await _shell(now, now.controller, f"touch {MARK}")
        await _everywhere(now, PUT_IN_PLACE)
        await _verify(now, await _tell_everybody(now))
    await _shell(now, now.controller, f"rm -f {MARK}")
    return Rotated(now.hosts, unfinished)


async def _in_the_network(now: Rotating) -> Rotating:
    """The hosts that have such a key. A container that only a tunnel leads into has none, and keeps what it has."""
    facts = (await observe(now.fleet, now.spec)).facts
    raise_failed(now)
    without = [name for name in now.hosts if needs_tunnel(now.spec.network.kind, facts[name])]
    for name in without:
        now.phase.done(name)
    return replace(now, hosts=tuple(name for name in now.hosts if name not in without))


async def _tell_everybody(now: Rotating) -> Cluster:
    """What `shoal up` does about the network, on all hosts at the same time."""
    observed = await observe(now.fleet, now.spec)
    raise_failed(now)
    cluster = wanted(now.spec, observed, reached_addresses(now.fleet)).now
    documents = {
        member.name: WireGuard().documents(cluster, member)[Stage.SERVICES]
        for member in cluster.members
        if member.name in now.hosts
    }
    await apply_all(now, documents, {})
    return cluster


async def _verify(now: Rotating, cluster: Cluster) -> None:
    """Every interface has its host's new key, and every pair of hosts speaks with each other under the new keys."""
    own_key = f'test "$(wg show {INTERFACE} public-key)" = "$(cat {PUBLIC_KEY})"'
    calls, ports = _calls(cluster, now.hosts), slurm_ports(now.spec, cluster.addresses)
    end = time.monotonic() + PATIENCE

    async def prove(name: str) -> None:
        again = "run the same command again"
        while (await (await now.fleet.host(name)).run(("sh", "-c", own_key), timeout=60)).status != 0:
            if time.monotonic() > end:
                raise HostError(name, "does not use its new key", hint=again)
            await asyncio.sleep(0.5)
        silent = [pair for pair in calls if pair[0] == name]
        while silent := list(await call(now.fleet, silent, ports)):
            if time.monotonic() > end:
                others = compress(asked for _, asked in silent)
                raise HostError(name, f"does not reach {others} with its new key", hint=again)
        now.phase.done(name)

    await now.fleet.each(now.hosts, prove)
    raise_failed(now)


def _calls(cluster: Cluster, hosts: Sequence[str]) -> list[tuple[str, str]]:
    """Of every pair, who calls whom. One of the two alone does: calls that cross are dropped by both.

    It is the one that knows where the other is, which nobody does of a host behind NAT.
    """
    known = {name: {peer.name for peer in place_of(cluster, name).peers if peer.endpoint} for name in hosts}
    return [
        (other, one) if one in known[other] and other not in known[one] else (one, other)
        for one, other in combinations(hosts, 2)
    ]


async def _everywhere(now: Rotating, script: str) -> None:
    async def one(name: str) -> None:
        await _shell(now, name, script)

    await now.fleet.each(now.hosts, one)
    raise_failed(now)


async def _shell(now: Rotating, name: str, script: str) -> str:
    result = await (await now.fleet.host(name)).run(("sh", "-c", script), timeout=60)
    if result.status != 0:
        raise HostError(name, result.error_text.strip() or f"status {result.status}", hint="run the same command again")
    return result.text
