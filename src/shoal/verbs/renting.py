"""What rents, as the operator's machine stops and starts it: shoal-elastic on the controller."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.errors import ShoalError
from shoal.hosts.api import Host
from shoal.roles.elastic import SERVICE

T = TypeVar("T")

NOT_LOADED = 5
"""What systemctl ends with where there is no such service."""
PATIENCE = 120.0


async def stop(host: Host) -> str:
    """Stop what rents on a host; what went wrong. One that has none is well."""
    return await _control(host, "stop")


async def start(host: Host) -> str:
    """Start it again; what went wrong."""
    return await _control(host, "start")


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
