"""What rents, as the operator's machine stops it, starts it and has it wait: shoal-elastic on the controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from shoal.errors import ShoalError
from shoal.hosts.api import Host, Process
from shoal.roles.elastic import HOLD, HOLD_SECONDS, SERVICE

T = TypeVar("T")

NOT_LOADED = 5
"""What systemctl ends with where there is no such service."""
PATIENCE = 120.0
AWAY_SECONDS = 7200
"""So long the controller waits for one who stopped what rents and is not heard of any more."""
STAY = b"stay\n"
AGAIN = 'echo watching; word=$(timeout "$1" head -n 1); test "$word" = stay || exec systemctl start "$2"'
"""Starts it again when whoever stopped it is cut off before saying that it is to stay so."""

TOUCH = 'test ! -d "${1%/*}" || touch "$1"'
"""A host without the directory has no service that could let anybody join."""


async def stop(host: Host) -> str:
    """Stop what rents on a host; what went wrong. One that has none is well."""
    return await _control(host, "stop")


async def start(host: Host) -> str:
    """Start it again; what went wrong."""
    return await _control(host, "start")


@asynccontextmanager
async def started_again(host: Host) -> AsyncIterator[bool]:
    """Have the host start it by itself if we are killed inside, or cut off. Whether the host sees to that."""
    try:
        watch = await host.start(("sh", "-c", AGAIN, "sh", str(AWAY_SECONDS), SERVICE))
        watches = bool(await watch.readline())
    except ShoalError:
        yield False
        return
    try:
        yield watches
    finally:
        await to_its_end(_dismiss(watch))


@asynccontextmanager
async def joins_held(host: Host) -> AsyncIterator[None]:
    """No machine becomes a node meanwhile: it would get keys that change just then. It waits, and joins afterwards.

    Raises ShoalError where the host does not take that. If we are killed inside, it holds for minutes and no longer.
    """
    await _hold(host)
    holding = asyncio.create_task(_hold_on(host))
    try:
        yield
    finally:
        holding.cancel()
        with contextlib.suppress(ShoalError):
            await to_its_end(host.run(("rm", "-f", HOLD), timeout=PATIENCE))


async def to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Do it whole, whoever cancels us meanwhile."""
    task = asyncio.ensure_future(work)
    while not task.done():
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.shield(task)
    return task.result()


async def _control(host: Host, verb: str) -> str:
    try:
        result = await host.run(("systemctl", verb, SERVICE), timeout=PATIENCE)
    except ShoalError as error:
        return error.message
    if result.status in (0, NOT_LOADED):
        return ""
    return result.error_text.strip() or f"systemctl {verb} ended with status {result.status}"


async def _dismiss(watch: Process) -> None:
    with contextlib.suppress(ShoalError):
        await watch.write(STAY)
        await watch.wait()


async def _hold(host: Host) -> None:
    result = await host.run(("sh", "-c", TOUCH, "sh", HOLD), timeout=PATIENCE)
    if result.status != 0:
        raise ShoalError(
            f"{host.name}: nodes that are woken meanwhile cannot be made to wait: {result.error_text.strip()}",
            hint="solve that first; nothing was changed",
        )


async def _hold_on(host: Host) -> None:
    while True:
        await asyncio.sleep(HOLD_SECONDS / 5)
        with contextlib.suppress(ShoalError):
            await _hold(host)
