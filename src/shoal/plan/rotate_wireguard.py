"""New WireGuard keys for all hosts. Each makes its own, as ever; what the others must know changes everywhere at once.

A host's new key waits beside the old one until all have theirs. A mark on the controller says that they are being put
in place: from then on a run which was killed is finished by the next, and `shoal up` tells all what each host has.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from shoal.errors import HostError
from shoal.network.tunnel import needs_tunnel
from shoal.network.wireguard import INTERFACE, MARK, NEXT_KEY, PRIVATE_KEY, PUBLIC_KEY
from shoal.plan.diff import wanted
from shoal.plan.observe import observe
from shoal.plan.pairs import ANSWERS, LOOK_SECONDS, reached_addresses
from shoal.plan.pause import no_job_starts
from shoal.plan.rotating import Rotated, Rotating, apply_all, raise_failed
from shoal.roles.stage import Stage
from shoal.roles.wireguard import WireGuard
from shoal.slurm.conf import SLURMCTLD_PORT

PATIENCE = 60
"""Seconds until every host must have reached the controller with its new key."""

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


async def _tell_everybody(now: Rotating) -> str:
    """What `shoal up` does about the network, on all hosts at the same time; the controller's address on it."""
    observed = await observe(now.fleet, now.spec)
    raise_failed(now)
    cluster = wanted(now.spec, observed, reached_addresses(now.fleet)).now
    documents = {
        member.name: WireGuard().documents(cluster, member)[Stage.SERVICES]
        for member in cluster.members
        if member.name in now.hosts
    }
    await apply_all(now, documents, {})
    return cluster.addresses[now.controller]


async def _verify(now: Rotating, address: str) -> None:
    """Every interface has its host's new key, and every host reaches the controller through it."""
    key = f'test "$(wg show {INTERFACE} public-key)" = "$(cat {PUBLIC_KEY})"'

    async def through(name: str) -> bool:
        if (await (await now.fleet.host(name)).run(("sh", "-c", key), timeout=60)).status != 0:
            return False
        [said] = await (await now.fleet.agent(name)).reach([(address, SLURMCTLD_PORT)], LOOK_SECONDS)
        return said in ANSWERS

    async def reach(name: str) -> None:
        end = time.monotonic() + PATIENCE
        while not await through(name):
            if time.monotonic() > end:
                again = "run the same command again"
                raise HostError(name, "does not reach the controller with its new key", hint=again)
            await asyncio.sleep(0.5)
        now.phase.done(name)

    await now.fleet.each(now.hosts, reach)
    raise_failed(now)


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
