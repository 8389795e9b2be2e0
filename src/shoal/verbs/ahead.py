"""Connections that are made while a command still loads: a handshake is mostly waiting, and loading is not."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

from shoal.errors import ShoalError
from shoal.plan.connections import Connections
from shoal.verbs.context import Context

T = TypeVar("T")

AT_ONCE = 16
"""Of a cluster with so many hosts at most, all are connected to at the beginning: the job may go to any of them."""


@asynccontextmanager
async def connected(context: Context, load: Callable[[], T]) -> AsyncIterator[tuple[Connections, T]]:
    """The hosts of a job to come, and what `load` gives, which runs beside in a thread.

    What `load` has to complain about, a wrong option for one, is told before anything about the hosts.
    """
    try:
        fleet = await context.connections()
    except ShoalError:
        load()
        raise
    async with fleet:
        meet(fleet, context.controller.name)
        yield fleet, await asyncio.to_thread(load)


def meet(fleet: Connections, controller: str) -> None:
    """Begin to connect to the hosts that a job may need."""
    fleet.meet(fleet.targets if len(fleet.targets) <= AT_ONCE else [controller])
