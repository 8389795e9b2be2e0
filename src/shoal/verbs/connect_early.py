"""What a job needs of the cluster, begun while the command still loads: connections, and what Slurm says of its nodes.

A handshake is mostly waiting, and loading is not. So a thread does the one while the main thread does the other, on an
event loop that the command takes over when it has loaded.
"""

from __future__ import annotations

import asyncio
import threading
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from shoal.plan.connections import Connections
from shoal.slurm.state import NODES_COMMAND, PARTITIONS_COMMAND
from shoal.tracking.mlflow import TOLD
from shoal.verbs.context import Context
from shoal.verbs.slurmctld import while_it_runs
from shoal.verbs.status import ask

AT_ONCE = 16
"""Of a cluster with so many hosts at most, all are connected to at the beginning: the job may go to any of them."""


@dataclass(frozen=True)
class Reached:
    """The hosts of a cluster, connected or on their way, and what its controller has been asked."""

    fleet: Connections
    slurm: asyncio.Future[list[str]]
    """What nodes and partitions Slurm has."""
    tracking: asyncio.Future[str]
    """Where jobs report to."""

    async def close(self) -> None:
        self.slurm.cancel()
        self.tracking.cancel()
        await asyncio.gather(self.slurm, self.tracking, return_exceptions=True)
        await self.fleet.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


async def reach(context: Context) -> Reached:
    """Begin to connect to the hosts that a job may need, and ask Slurm as soon as its controller is there."""
    fleet, controller = await context.connections(), context.controller.name
    fleet.meet([controller])  # the first of all: Slurm's answer takes longest
    if len(fleet.targets) <= AT_ONCE:
        fleet.meet(fleet.targets)
    return _asking(fleet, controller)


async def reach_controller(context: Context) -> Reached:
    """The same for who changes nothing, and needs no node."""
    fleet = await context.connections([context.controller])
    return _asking(fleet, context.controller.name)


def _asking(fleet: Connections, controller: str) -> Reached:
    async def slurm() -> list[str]:
        host = await fleet.host(controller)
        return await while_it_runs(host, ask(host, NODES_COMMAND), ask(host, PARTITIONS_COMMAND))

    async def tracking() -> str:
        return (await (await fleet.host(controller)).run(TOLD, timeout=60)).text

    return Reached(fleet, asyncio.ensure_future(slurm()), asyncio.ensure_future(tracking()))


class Ahead:
    """A thread that reaches the cluster while the command loads."""

    def __init__(self, context: Context) -> None:
        self.context = context
        self._loop = asyncio.new_event_loop()
        self._reaching = self._loop.create_task(reach(context))
        self._thread = threading.Thread(target=self._loop.run_forever, name="shoal-ahead", daemon=True)
        self._thread.start()

    def take_over(self) -> asyncio.AbstractEventLoop:
        """The loop, which the thread lets go of: whoever takes it runs it, and closes it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        return self._loop

    async def reached(self) -> Reached:
        """What the thread has begun, on its loop. Raises what stood in its way."""
        return await self._reaching

    def leave(self) -> None:
        """Nobody needs it after all."""
        with asyncio.Runner(loop_factory=self.take_over) as runner:
            runner.run(self._leave())

    async def _leave(self) -> None:
        [reached] = await asyncio.gather(self._reaching, return_exceptions=True)
        if isinstance(reached, Reached):
            await reached.close()
