"""A new key for `auth: slurm`: first all hosts accept it, then all sign with it, then the old key is removed.

No message is rejected on the way: at every moment each host accepts what any other host signs.
"""

from __future__ import annotations

import asyncio
import hashlib

from shoal.agent.document import Document
from shoal.errors import CommandTimeout, HostError, ShoalError, SlurmError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.plan.nodes import NOT_READY
from shoal.plan.rotation import RotationContext, RotationResult, apply_all, digests, run_on
from shoal.roles.accounting import has_database
from shoal.roles.auth import KEY, KEY_DIGITS, KEY_SECRET, NEXT_KEY, NEXT_SECRET, key_files
from shoal.slurm.state import NODES_COMMAND, parse_nodes
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

RECONFIGURE_TIMEOUT_S = 90.0
"""For every slurmd to read its configuration again."""


async def rotate_slurm(now: RotationContext) -> RotationResult:
    """Every step can be repeated: a run that was killed is finished by the next one, with the same key."""
    agent = await now.fleet.agent(now.controller)
    is_unfinished = (await digests(now, KEY, NEXT_KEY))[now.controller][1] is not None
    next_key = await agent.secret(NEXT_KEY, make=KEY_DIGITS, text=True)
    secrets = {KEY_SECRET: await agent.secret(KEY), NEXT_SECRET: next_key}
    old_digest, new_digest = (hashlib.sha256(secrets[name]).hexdigest() for name in (KEY_SECRET, NEXT_SECRET))
    if old_digest != new_digest:
        await _apply_and_restart(now, key_files(old_digest, new_digest), secrets)
        await _apply_and_restart(now, key_files(old_digest, new_digest, flipped=True), secrets)
    final_files = key_files(new_digest)
    # The controller first: from then on `shoal up` distributes this key.
    await apply_all(now, {now.controller: final_files}, {KEY_SECRET: next_key})
    await _apply_and_restart(now, final_files, {KEY_SECRET: next_key})
    await _verify(now, new_digest)
    return RotationResult(now.hosts, is_unfinished)


async def _apply_and_restart(now: RotationContext, document: Document, secrets: dict[str, bytes]) -> None:
    """Apply the files on all hosts, then have all daemons read them."""
    await apply_all(now, dict.fromkeys(now.hosts, document), secrets)
    restarts = {name: daemons for name, daemons in _daemons_to_restart(now.spec).items() if name in now.hosts}

    async def restart(name: str) -> None:
        result = await (await now.fleet.host(name)).run(("systemctl", "restart", *restarts[name]), timeout=120)
        if result.status != 0:
            raise HostError(name, f"{' and '.join(restarts[name])} did not restart: {result.error_text.strip()}")

    await run_on(now, restarts, restart)
    controller = await now.fleet.host(now.controller)
    start_times = await _slurmd_start_times(controller)
    await asyncio.sleep(1.1)  # start times have whole seconds
    for _ in range(15):
        result = await controller.run(("scontrol", "reconfigure"), timeout=120)
        if result.status == 0:
            break
        await asyncio.sleep(2)
    else:
        raise SlurmError(
            f"slurmctld on {controller.name} does not read the new keys: {result.error_text.strip()}",
            hint="run the same command again",
        )
    await _wait_for_nodes(now, controller, start_times)


def _daemons_to_restart(spec: Spec) -> dict[str, tuple[str, ...]]:
    """The daemons that read the key file only when they start, by host."""
    restarts: dict[str, tuple[str, ...]] = {}
    for member in members_of(spec):
        daemons = (
            *(("sackd",) if "login" in member.roles else ()),
            *(("slurmdbd",) if has_database(spec, member) else ()),
        )
        if daemons:
            restarts[member.name] = daemons
    return restarts


async def _slurmd_start_times(controller: Host) -> dict[str, str]:
    """The start time of slurmd on each node that answers."""
    result = await controller.run(NODES_COMMAND, timeout=60)
    return {node.name: node.slurmd_start_time for node in parse_nodes(result.text) if not NOT_READY & set(node.state)}


async def _wait_for_nodes(now: RotationContext, controller: Host, old_start_times: dict[str, str]) -> None:
    """Wait until every slurmd has restarted, which it does when it reads its configuration."""
    names = [name for name in old_start_times if name in now.hosts]
    deadline = asyncio.get_running_loop().time() + RECONFIGURE_TIMEOUT_S
    while True:
        try:
            start_times = await _slurmd_start_times(controller)
        except CommandTimeout:
            start_times = {}
        late_names = [name for name in names if start_times.get(name) in (None, old_start_times[name])]
        if not late_names:
            return
        if asyncio.get_running_loop().time() > deadline:
            raise ShoalError(
                f"the rotation is not finished: slurmd on {compress(late_names)} has not read the new keys",
                hint="look at `shoal status`, then run the same command again",
            )
        await asyncio.sleep(0.5)


async def _verify(now: RotationContext, digest: str) -> None:
    """Every host has this key and no other, and slurmctld accepts what each of them signs."""
    other_names = [name for name, keys in (await digests(now, KEY, NEXT_KEY)).items() if keys != (digest, None)]
    if other_names:
        raise ShoalError(f"{compress(other_names)} still has another key", hint="run `shoal keys rotate slurm` again")

    async def verify(name: str) -> None:
        host = await now.fleet.host(name)
        for _ in range(15):
            result = await host.run(("timeout", "20", "sinfo", "-h"), timeout=60)
            if result.status == 0:
                now.phase.done(name)
                return
            await asyncio.sleep(1)
        raise SlurmError(f"slurmctld rejects what {name} signs: {result.error_text.strip()}", hint="run it again")

    await run_on(now, now.hosts, verify)
