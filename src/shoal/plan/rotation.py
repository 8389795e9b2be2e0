"""Key rotations: what all of them use, and those of munge and Tailscale. Each verifies the new key on every host.

The new key is stored on the controller before anything changes, so that the next run finishes one that was killed,
and `shoal up` in between brings all hosts to the key that the controller has.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from shoal.agent.client import FactsRequest
from shoal.agent.document import Document, File, Service
from shoal.agent.facts import Facts
from shoal.errors import AgentFailed, HostError, ShoalError
from shoal.hostlist import compress
from shoal.hosts.api import Host
from shoal.network.tailscale import read_status, tailscale_addresses, unreachable_command
from shoal.plan.connections import Fleet
from shoal.plan.progress import Phase
from shoal.plan.secret_values import fetch_secrets
from shoal.roles.base import MUNGE_KEY, MUNGE_KEY_BYTES, MUNGE_KEY_NEXT, MUNGE_SECRET, MUNGED, munge_file
from shoal.roles.tailscale import JOINED, SECRET, join
from shoal.spec.members import members as members_of
from shoal.spec.model import Spec

T = TypeVar("T")
TAILSCALE_FACTS = FactsRequest(files={JOINED: "text"}, tailscale=True)
LINKS_TIMEOUT_S = 60.0
TAILSCALE_COMMAND = "shoal keys rotate tailscale"
SETTLE_S = 0.5
"""For a job that was just started to reach its node."""
PAUSE_COMMAND = (
    "bash",
    "-c",
    # Partitions go up again on a line of input, when the input ends, or after two minutes.
    "up=$(timeout 20 sinfo -h -o '%R %a' | sort -u | awk '$2 == \"up\" {print $1}'); "
    'for name in $up; do timeout 20 scontrol update "partitionname=$name" state=down || break; done; '
    "echo paused; read -r -t 120 _; trap '' HUP PIPE; "
    'for name in $up; do for i in $(seq 30); do timeout 20 scontrol update "partitionname=$name" state=up && break; '
    "sleep 1; done; done; echo resumed",
)


@dataclass(frozen=True)
class RotationContext:
    """What a rotation works with."""

    spec: Spec
    fleet: Fleet
    controller: str
    hosts: tuple[str, ...]
    """The hosts that get the new key."""
    phase: Phase


@dataclass(frozen=True)
class RotationResult:
    """How a rotation went."""

    hosts: tuple[str, ...]
    """The hosts with the new key, each verified."""
    finished: bool = False
    """Whether the key is that of an earlier run that was interrupted."""


@dataclass(frozen=True)
class Rotation:
    """A key that can be rotated."""

    what: str
    """Shown to the user: `munge key`."""
    used: Callable[[Spec], bool]
    """Whether the cluster has such a key."""
    instead: str
    """The fix to show where it has none."""
    run: Callable[[RotationContext], Awaitable[RotationResult]]
    cuts_off: bool = True
    """Whether a host with the old key can no longer talk to the others."""


async def run_on(now: RotationContext, names: Iterable[str], action: Callable[[str], Awaitable[T]]) -> dict[str, T]:
    """Run an action on hosts at the same time. One that fails ends the rotation, once the others are done."""
    results = await now.fleet.each(names, action)
    raise_failed(now)
    return results


async def apply_all(now: RotationContext, documents: Mapping[str, Document], secrets: Mapping[str, bytes]) -> None:
    """Apply each host's document, on all hosts at the same time."""
    await run_on(
        now, documents, lambda name: now.fleet.converge(name, documents[name], secrets, now.phase, "shoal keys rotate")
    )


def raise_failed(now: RotationContext) -> None:
    """Raises when a host has dropped out: a rotation must reach every host."""
    for name in now.hosts:
        if name in now.fleet.failures:
            error = now.fleet.failures[name]
            hint = error.hint or "run the same command again"
            raise ShoalError(f"the rotation is not finished: {error.message}", hint=hint)


@asynccontextmanager
async def scheduling_paused(controller: Host) -> AsyncIterator[None]:
    """Partitions are down during the block: running jobs go on, new ones wait."""
    process = await controller.start(PAUSE_COMMAND)
    try:
        await process.readline()
        await asyncio.sleep(SETTLE_S)
        yield
    finally:
        with contextlib.suppress(HostError):
            await process.write(b"\n")
            await process.readline()
            await process.wait()


async def digests(now: RotationContext, key: str, following: str) -> dict[str, tuple[str | None, str | None]]:
    """The digests of the key file and of the file with the next key, by host."""

    async def read_digests(name: str) -> tuple[str | None, str | None]:
        facts = await (await now.fleet.agent(name)).facts(FactsRequest(files={key: "hash", following: "hash"}))
        return facts.digest(key), facts.digest(following)

    return await run_on(now, now.hosts, read_digests)


async def rotate_munge(now: RotationContext) -> RotationResult:
    """A new munge key for all hosts at once. Daemons keep running: they ask munged for every message."""
    fleet, controller = now.fleet, now.controller
    agent = await fleet.agent(controller)
    digests_by_host = await digests(now, MUNGE_KEY, MUNGE_KEY_NEXT)
    key, next_key = digests_by_host[controller]
    is_unfinished = next_key is not None or any(host_key != key for host_key, _ in digests_by_host.values())
    if is_unfinished and next_key is None:
        secret = await agent.secret(MUNGE_KEY)  # the controller has the new key, some other hosts do not
    else:
        secret = await agent.secret(MUNGE_KEY_NEXT, make=MUNGE_KEY_BYTES)
    digest = hashlib.sha256(secret).hexdigest()
    document: Document = (munge_file(digest), Service("munge", command=MUNGED))
    async with scheduling_paused(await fleet.host(controller)):
        await apply_all(now, dict.fromkeys(now.hosts, document), {MUNGE_SECRET: secret})
        await _verify(now, digest)
    await apply_all(now, {controller: (File(MUNGE_KEY_NEXT),)}, {})
    return RotationResult(now.hosts, is_unfinished)


async def _verify(now: RotationContext, digest: str) -> None:
    """Every host has the key, and its munged accepts a credential of the controller."""
    digests_by_host = await digests(now, MUNGE_KEY, MUNGE_KEY_NEXT)
    other_names = [name for name, (key, _) in digests_by_host.items() if key != digest]
    if other_names:
        raise ShoalError(
            f"{compress(other_names)} still has another munge key", hint="run `shoal keys rotate munge` again"
        )
    credential = (await (await now.fleet.host(now.controller)).run(("munge", "-n"), timeout=30)).stdout

    async def verify(name: str) -> None:
        host = await now.fleet.host(name)
        result = await host.run(("unmunge", "-o", "/dev/null"), stdin=credential, timeout=30)
        if result.status != 0:
            output = result.error_text.strip() or f"status {result.status}"
            raise HostError(name, f"munged rejects a credential of the controller: {output}", hint="run it again")
        now.phase.done(name)

    await run_on(now, now.hosts, verify)


async def rotate_tailscale(now: RotationContext) -> RotationResult:
    """A new key in the tailnet for every host, one at a time and the controller last, by the auth key of the file.

    The next host waits until all others reach this one again, so that Slurm always answers. The first failure stops it:
    a bad key would cut every host off. After an interruption the next run does all of them again.
    """
    spec, fleet, phase = now.spec, now.fleet, now.phase
    assert spec.network.auth_key is not None
    members = {member.name: member for member in members_of(spec)}
    facts_by_host = await fleet.each(now.hosts, lambda name: _tailscale_facts(fleet, name))
    documents = {name: join(spec, members[name], facts, again=True) for name, facts in facts_by_host.items()}
    secrets = await fetch_secrets(documents.values(), {}, {SECRET: spec.network.auth_key}, fleet)
    addresses = tailscale_addresses(facts_by_host)

    async def rejoin(name: str) -> None:
        await fleet.converge(name, documents[name], secrets, phase, TAILSCALE_COMMAND)
        old_status = read_status(facts_by_host[name].tailscale)
        new_status = read_status((await _tailscale_facts(fleet, name)).tailscale)
        if not new_status.running:
            cause = new_status.problem or new_status.state
            raise AgentFailed(
                name, f"is not in the tailnet with its new key: {cause}", hint=f"run `{TAILSCALE_COMMAND}` again"
            )
        if old_status.address not in ("", new_status.address):
            cause = f"came back into the tailnet as {new_status.address}; it was {old_status.address}"
            raise AgentFailed(name, cause, hint="run `shoal up`, which updates the other hosts")
        await _await_links(now, name, {peer: ip for peer, ip in addresses.items() if peer != name})
        phase.done(name)

    for name in sorted(documents, key=lambda name: name == now.controller):
        await run_on(now, [name], rejoin)
    raise_failed(now)
    return RotationResult(now.hosts)


async def _await_links(now: RotationContext, name: str, addresses: Mapping[str, str]) -> None:
    """Wait until packets pass between the host and every other one."""
    host, deadline = await now.fleet.host(name), time.monotonic() + LINKS_TIMEOUT_S
    missing = dict(addresses)
    while missing:
        now.phase.update(name, f"waits for its links to {compress(missing)}")
        answer = await host.run(unreachable_command(missing.values()), timeout=LINKS_TIMEOUT_S)
        silent_addresses = {*answer.text.split()}
        missing = {peer: ip for peer, ip in missing.items() if ip in silent_addresses}
        if missing and time.monotonic() > deadline:
            raise AgentFailed(
                name,
                f"has no link to {compress(missing)} {LINKS_TIMEOUT_S:.0f} s after it logged in again",
                hint=f"run `tailscale ping` there; then run `{TAILSCALE_COMMAND}` again",
            )


async def _tailscale_facts(fleet: Fleet, name: str) -> Facts:
    facts = await (await fleet.agent(name)).facts(TAILSCALE_FACTS)
    problem = read_status(facts.tailscale).problem if facts.tailscale else "it is not installed"
    if problem:
        raise AgentFailed(name, f"Tailscale does not answer there: {problem}", hint="run `shoal up`")
    return facts
