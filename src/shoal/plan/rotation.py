"""What every key rotation uses: its hosts, documents for all of them at once, and a pause in scheduling."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TypeVar

from shoal.agent.document import Document
from shoal.errors import HostError, ShoalError
from shoal.hosts.api import Host
from shoal.plan.fleet import Fleet
from shoal.plan.progress import Phase
from shoal.spec.model import Spec

T = TypeVar("T")
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
        now,
        documents,
        lambda name: now.fleet.converge(name, documents[name], secrets, now.phase, "shoal keys rotate"),
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
