"""Doing one thing on many hosts at once, keeping every host's outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from shoal.errors import HostError

T = TypeVar("T")


class HasName(Protocol):
    """Anything with a name: a Target, a Host, a Member."""

    @property
    def name(self) -> str: ...


X = TypeVar("X", bound="str | HasName")


@dataclass(frozen=True)
class HostOutcome(Generic[T]):
    """What came of one host."""

    name: str
    value: T | None
    error: HostError | None
    seconds: float

    @property
    def ok(self) -> bool:
        return self.error is None


async def fan_out(
    hosts: Iterable[X],
    action: Callable[[X], Awaitable[T]],
    *,
    limit: int = 64,
    on_done: Callable[[HostOutcome[T]], None] | None = None,
) -> dict[str, HostOutcome[T]]:
    """Run `action` on every host, at most `limit` at a time, and return the outcomes in the order given.

    A HostError is that host's outcome and stops no other. Anything else (another ShoalError, a bug, a cancellation)
    cancels the rest and is raised.
    """
    slots = asyncio.Semaphore(limit)

    async def run_on(host: X) -> HostOutcome[T]:
        value: T | None = None
        error: HostError | None = None
        async with slots:
            start = time.monotonic()
            try:
                value = await action(host)
            except HostError as failure:
                error = failure
        name = host if isinstance(host, str) else host.name
        outcome = HostOutcome(name, value, error, time.monotonic() - start)
        if on_done:
            on_done(outcome)
        return outcome

    tasks = [asyncio.create_task(run_on(host)) for host in hosts]
    try:
        # Not gather: it would go on waiting for slow hosts after a bug has shown itself on another.
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION) if tasks else None
        failed = next((task for task in tasks if task.done() and not task.cancelled() and task.exception()), None)
        if failed:
            failed.result()
        outcomes = [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        # Also retrieves the exceptions of those that failed while we were cancelling.
        await asyncio.gather(*tasks, return_exceptions=True)
    return {outcome.name: outcome for outcome in outcomes}


def group_equal(outputs: Mapping[str, bytes]) -> list[tuple[list[str], bytes]]:
    """Hosts with the same output together, the largest group first, as clush -b shows them."""
    groups: dict[bytes, list[str]] = {}
    for name, output in outputs.items():
        groups.setdefault(output, []).append(name)
    return sorted(((names, output) for output, names in groups.items()), key=lambda group: -len(group[0]))
