"""A new key for `auth: slurm`. First all hosts take messages signed with it, then they sign with it, then the old goes.

Nothing fails on the way: at every moment each host takes what any other signs.
"""

from __future__ import annotations

import asyncio
import hashlib

from shoal.agent.client import Ask
from shoal.agent.document import Document
from shoal.errors import HostError, ShoalError, SlurmError, TimedOut
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.plan.nodes import NOT_READY
from shoal.plan.rotation import Rotated, Rotating, apply_all, raise_failed
from shoal.roles.accounting import has_database
from shoal.roles.auth import DIGITS, KEY, KEY_SECRET, NEXT, NEXT_SECRET, key_files
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

PATIENCE = 90.0
"""Seconds for all slurmd to have read the file again."""


async def rotate_slurm(now: Rotating) -> Rotated:
    """Every stage can be done twice: what a killed run left is gone through again, with the key it had made."""
    agent = await now.fleet.agent(now.controller)
    unfinished = (await digests(now, KEY, NEXT))[now.controller][1] is not None
    following = await agent.secret(NEXT, make=DIGITS, text=True)
    secrets = {KEY_SECRET: await agent.secret(KEY), NEXT_SECRET: following}
    old, new = (hashlib.sha256(secrets[name]).hexdigest() for name in (KEY_SECRET, NEXT_SECRET))
    if old != new:
        await _everywhere(now, key_files(old, new), secrets)
        await _everywhere(now, key_files(old, new, flipped=True), secrets)
    last = key_files(new)
    # The controller first: from then on this is the key that `shoal up` gives to everybody.
    await apply_all(now, {now.controller: last}, {KEY_SECRET: following})
    await _everywhere(now, last, {KEY_SECRET: following})
    await _verify(now, new)
    return Rotated(now.hosts, unfinished)


async def _everywhere(now: Rotating, document: Document, secrets: dict[str, bytes]) -> None:
    """The files on all hosts, and then all daemons with them."""
    await apply_all(now, dict.fromkeys(now.hosts, document), secrets)
    restarts = {name: daemons for name, daemons in _restarts(now.spec).items() if name in now.hosts}

    async def restart(name: str) -> None:
        result = await (await now.fleet.host(name)).run(("systemctl", "restart", *restarts[name]), timeout=120)
        if result.status != 0:
            raise HostError(name, f"{' and '.join(restarts[name])} did not restart: {result.error_text.strip()}")

    await now.fleet.each(restarts, restart)
    raise_failed(now)
    controller = await now.fleet.host(now.controller)
    before = await _starts(controller)
    await asyncio.sleep(1.1)  # starts are told in seconds
    for _ in range(15):
        result = await controller.run(("scontrol", "reconfigure"), timeout=120)
        if result.status == 0:
            break
        await asyncio.sleep(2)
    else:
        raise SlurmError(
            f"slurmctld on {controller.name} did not read the new keys: {result.error_text.strip()}",
            hint="run the same command again",
        )
    await _wait_for_nodes(now, controller, before)


def _restarts(spec: Spec) -> dict[str, tuple[str, ...]]:
    """The daemons that read the file only when they start, by host."""
    found: dict[str, tuple[str, ...]] = {}
    for member in members_of(spec):
        daemons = (
            *(("sackd",) if "login" in member.roles else ()),
            *(("slurmdbd",) if has_database(spec, member) else ()),
        )
        if daemons:
            found[member.name] = daemons
    return found


async def _starts(controller: Host) -> dict[str, str]:
    """When the slurmd of each node that answers has started."""
    result = await controller.run(NODES_COMMAND, timeout=60)
    return {node.name: node.slurmd_start_time for node in parse_nodes(result.text) if not NOT_READY & set(node.state)}


async def _wait_for_nodes(now: Rotating, controller: Host, before: dict[str, str]) -> None:
    """A slurmd starts again when it reads its configuration."""
    due = [name for name in before if name in now.hosts]
    end = asyncio.get_running_loop().time() + PATIENCE
    while True:
        try:
            starts = await _starts(controller)
        except TimedOut:
            starts = {}
        late = [name for name in due if starts.get(name) in (None, before[name])]
        if not late:
            return
        if asyncio.get_running_loop().time() > end:
            raise ShoalError(
                f"the rotation is not finished: slurmd on {compress(late)} has not read the new keys",
                hint="look at `shoal status`, then run the same command again",
            )
        await asyncio.sleep(0.5)


async def _verify(now: Rotating, digest: str) -> None:
    """Every host has the key and no other, and slurmctld takes what each of them signs."""
    other = [name for name, found in (await digests(now, KEY, NEXT)).items() if found != (digest, None)]
    if other:
        raise ShoalError(f"{compress(other)} still has another key", hint="run `shoal keys rotate slurm` again")

    async def try_it(name: str) -> None:
        host = await now.fleet.host(name)
        for _ in range(15):
            result = await host.run(("timeout", "20", "sinfo", "-h"), timeout=60)
            if result.status == 0:
                now.phase.done(name)
                return
            await asyncio.sleep(1)
        raise SlurmError(f"slurmctld does not take what {name} signs: {result.error_text.strip()}", hint="run it again")

    await now.fleet.each(now.hosts, try_it)
    raise_failed(now)


async def digests(now: Rotating, key: str, following: str) -> dict[str, tuple[str | None, str | None]]:
    """The digests of the files with the key and with the one to come, by host."""

    async def look(name: str) -> tuple[str | None, str | None]:
        facts = await (await now.fleet.agent(name)).facts(Ask(files={key: "hash", following: "hash"}))
        found = [facts.files[path].sha256 if path in facts.files else None for path in (key, following)]
        return found[0], found[1]

    found = await now.fleet.each(now.hosts, look)
    raise_failed(now)
    return found
