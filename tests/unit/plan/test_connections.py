"""Connections that several callers request at the same time."""

import asyncio

import pytest

from shoal.hosts.api import Host, Target
from shoal.plan.connections import Connections
from shoal_simulators.fake_host import FakeHost


class Slow:
    """A connector that waits until it is let go on."""

    def __init__(self) -> None:
        self.go, self.asked = asyncio.Event(), 0

    async def connect(self, target: Target) -> Host:
        self.asked += 1
        await self.go.wait()
        return FakeHost(target.name)


async def test_cancelled_wait_does_not_cancel_the_connection_of_others() -> None:
    slow = Slow()
    async with Connections({"n1": Target("n1")}, slow) as connections:
        waiter = asyncio.ensure_future(connections.host("n1"))
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.host("n1")
        slow.go.set()
        assert (await waiter).name == "n1" and slow.asked == 1 and await connections.host("n1") is await waiter


async def test_unawaited_connection_is_cancelled_at_the_end() -> None:
    slow = Slow()
    async with Connections({"n1": Target("n1")}, slow) as connections:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await connections.host("n1")
    assert slow.asked == 1
