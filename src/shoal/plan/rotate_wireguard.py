"""New WireGuard keys for all hosts. Each makes its own, as ever; what the others must know changes everywhere at once.

A host's new key waits beside the old one until all have theirs. A mark on the controller says that they are being put
in place: from then on a run which was killed is finished by the next, and `shoal up` tells all what each host has.
"""

from __future__ import annotations

import asyncio

from shoal.errors import HostError
from shoal.network.wireguard import INTERFACE, PRIVATE_KEY, PUBLIC_KEY
from shoal.plan.diff import wanted
from shoal.plan.observe import observe
from shoal.plan.pairs import reached_addresses
from shoal.plan.pause import no_job_starts
from shoal.plan.rotating import Rotated, Rotating, apply_all, raise_failed
from shoal.roles.stage import Stage
from shoal.roles.wireguard import WireGuard

NEXT = f"{PRIVATE_KEY}.next"
MARK = "/etc/shoal/wireguard.rotating"
PATIENCE = 60
"""Seconds until every host must have reached the controller with its new key."""

MAKE_NEXT = f"set -eu; umask 077; test -s {NEXT} || {{ wg genkey > {NEXT}.new; mv {NEXT}.new {NEXT}; }}"
PUT_IN_PLACE = (
    f"set -eu; umask 077; test ! -s {NEXT} || mv {NEXT} {PRIVATE_KEY}; "
    f"wg pubkey < {PRIVATE_KEY} > {PUBLIC_KEY}.new; mv {PUBLIC_KEY}.new {PUBLIC_KEY}"
)
"""The interface goes on with the old key until it is told to read the files."""


async def rotate_wireguard(now: Rotating) -> Rotated:
    controller = await now.fleet.host(now.controller)
    unfinished = (await controller.run(("test", "-e", MARK), timeout=30)).status == 0
    async with no_job_starts(controller):
        if not unfinished:
            await _everywhere(now, MAKE_NEXT)
            await _shell(now, now.controller, f"touch {MARK}")
        await _everywhere(now, PUT_IN_PLACE)
        await _tell_everybody(now)
        await _verify(now)
    await _shell(now, now.controller, f"rm -f {MARK}")
    return Rotated(now.hosts, unfinished)


async def _tell_everybody(now: Rotating) -> None:
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


async def _verify(now: Rotating) -> None:
    """Every interface has its host's new key, and every host reaches the controller through it."""
    key = f'test "$(wg show {INTERFACE} public-key)" = "$(cat {PUBLIC_KEY})"'
    address = (await _shell(now, now.controller, f"ip -4 -o address show dev {INTERFACE}")).split(" inet ")[-1]
    address = address.partition("/")[0].strip()

    async def reach(name: str) -> None:
        for _ in range(PATIENCE):
            try:
                await _shell(now, name, f"{key} && ping -c 1 -W 1 {address} > /dev/null")
            except HostError:
                await asyncio.sleep(0.5)
                continue
            now.phase.done(name)
            return
        raise HostError(name, "does not reach the controller with its new key", hint="run the same command again")

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
