"""New keys for a running cluster: a table of rotations. Each changes one key on all hosts and verifies it.

The new key is stored on the controller before anything changes, so that the next run finishes one that was killed,
and `shoal up` in between brings all hosts to the key that the controller has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from shoal.agent.client import FactsRequest
from shoal.agent.document import Document, File, Service
from shoal.agent.facts import Facts
from shoal.errors import AgentFailed, HostError, ShoalError
from shoal.hostlist import compress
from shoal.network.tailscale import read_status
from shoal.plan.fleet import Fleet
from shoal.plan.progress import Phase
from shoal.plan.rotation import (
    Rotation,
    RotationContext,
    RotationResult,
    apply_all,
    raise_failed,
    run_on,
    scheduling_paused,
)
from shoal.plan.rotation_slurm import digests, rotate_slurm
from shoal.plan.rotation_wireguard import rotate_wireguard
from shoal.plan.secret_values import fetch_secrets
from shoal.roles.base import MUNGE_KEY, MUNGE_KEY_BYTES, MUNGE_KEY_NEXT, MUNGE_SECRET, MUNGED, munge_file
from shoal.roles.tailscale import JOINED, SECRET, join
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

TAILSCALE_FACTS = FactsRequest(files={JOINED: "text"}, tailscale=True)
TAILSCALE_COMMAND = "shoal keys rotate tailscale"


async def rotate_munge(now: RotationContext) -> RotationResult:
    """A new munge key for all hosts at once. Daemons keep running: they ask munged for every message."""
    fleet, controller = now.fleet, now.controller
    agent = await fleet.agent(controller)
    by_host = await digests(now, MUNGE_KEY, MUNGE_KEY_NEXT)
    key, following = by_host[controller]
    unfinished = following is not None or any(other != key for other, _ in by_host.values())
    if unfinished and following is None:
        secret = await agent.secret(MUNGE_KEY)  # the controller has the new key, some other hosts do not
    else:
        secret = await agent.secret(MUNGE_KEY_NEXT, make=MUNGE_KEY_BYTES)
    digest = hashlib.sha256(secret).hexdigest()
    document: Document = (munge_file(digest), Service("munge", command=MUNGED))
    async with scheduling_paused(await fleet.host(controller)):
        await apply_all(now, dict.fromkeys(now.hosts, document), {MUNGE_SECRET: secret})
        await _verify(now, digest)
    await apply_all(now, {controller: (File(MUNGE_KEY_NEXT),)}, {})
    return RotationResult(now.hosts, unfinished)


async def rotate_in_tailnet(now: RotationContext) -> RotationResult:
    """A new key in the tailnet for every host, by the auth key that the file names."""
    await rotate_tailscale(now.spec, now.fleet, now.controller, now.hosts, now.phase)
    raise_failed(now)
    return RotationResult(now.hosts)


async def _verify(now: RotationContext, digest: str) -> None:
    """Every host has the key, and its munged accepts a credential of the controller."""
    by_host = await digests(now, MUNGE_KEY, MUNGE_KEY_NEXT)
    other = [name for name, (key, _) in by_host.items() if key != digest]
    if other:
        raise ShoalError(f"{compress(other)} still has another munge key", hint="run `shoal keys rotate munge` again")
    credential = (await (await now.fleet.host(now.controller)).run(("munge", "-n"), timeout=30)).stdout

    async def verify(name: str) -> None:
        host = await now.fleet.host(name)
        result = await host.run(("unmunge", "-o", "/dev/null"), stdin=credential, timeout=30)
        if result.status != 0:
            output = result.error_text.strip() or f"status {result.status}"
            raise HostError(name, f"munged rejects a credential of the controller: {output}", hint="run it again")
        now.phase.done(name)

    await run_on(now, now.hosts, verify)


async def rotate_tailscale(spec: Spec, fleet: Fleet, controller: str, hosts: Sequence[str], phase: Phase) -> None:
    """Log hosts in again, the controller last, and verify that each has its old address. Connections stay open.

    Hosts that fail are in the fleet's failures. Hosts do not depend on each other here: after an interruption the next
    run does all of them again.
    """
    assert spec.network.auth_key is not None
    members = {member.name: member for member in members_of(spec)}
    before = await fleet.each(hosts, lambda name: _tailscale_facts(fleet, name))
    documents = {name: join(spec, members[name], facts, again=True) for name, facts in before.items()}
    secrets = await fetch_secrets(documents.values(), {}, {SECRET: spec.network.auth_key}, fleet)

    async def rejoin(name: str) -> None:
        await fleet.converge(name, documents[name], secrets, phase, TAILSCALE_COMMAND)
        old, new = read_status(before[name].tailscale), read_status((await _tailscale_facts(fleet, name)).tailscale)
        if not new.running:
            cause = new.problem or new.state
            raise AgentFailed(
                name, f"is not in the tailnet with its new key: {cause}", hint=f"run `{TAILSCALE_COMMAND}` again"
            )
        if old.address not in ("", new.address):
            moved = f"came back into the tailnet as {new.address}; it was {old.address}"
            raise AgentFailed(name, moved, hint="run `shoal up`, which updates the other hosts")
        phase.done(name)

    await fleet.each([name for name in documents if name != controller], rejoin)
    await fleet.each([name for name in documents if name == controller], rejoin)


async def _tailscale_facts(fleet: Fleet, name: str) -> Facts:
    facts = await (await fleet.agent(name)).facts(TAILSCALE_FACTS)
    problem = read_status(facts.tailscale).problem if facts.tailscale else "it is not installed"
    if problem:
        raise AgentFailed(name, f"Tailscale does not answer there: {problem}", hint="run `shoal up`")
    return facts


ROTATIONS: Mapping[str, Rotation] = {
    "munge": Rotation("munge key", lambda spec: True, "", rotate_munge),
    "slurm": Rotation(
        "key of auth/slurm", lambda spec: spec.auth == "slurm", "write `auth: slurm` into the file", rotate_slurm
    ),
    "wireguard": Rotation(
        "WireGuard keys",
        lambda spec: spec.network.kind == "wireguard",
        "it needs `network: wireguard` in the file",
        rotate_wireguard,
    ),
    "tailscale": Rotation(
        "key in a tailnet",
        lambda spec: spec.network.kind == "tailscale" and spec.network.auth_key is not None,
        "it needs `network: {kind: tailscale, auth_key: env:TS_AUTHKEY}` in the file",
        rotate_in_tailnet,
        cuts_off=False,
    ),
}
"""All keys, in the order in which `all` rotates them."""
