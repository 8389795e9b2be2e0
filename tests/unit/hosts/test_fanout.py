"""Fan-out keeps every host's outcome."""

import asyncio

import pytest
from tests.support.cases import cases

from shoal.errors import SlurmError, Unreachable
from shoal.hosts.api import Target
from shoal.hosts.fanout import HostOutcome, fan_out, group_equal
from shoal_simulators.fake_host import FakeConnector, FakeHost


async def test_unreachable_host_does_not_stop_the_others_and_order_is_kept() -> None:
    connector = FakeConnector(
        FakeHost("c", {("hostname",): b"c"}), FakeHost("b", unreachable=True), FakeHost("a", {("hostname",): b"a"})
    )

    async def hostname(target: Target) -> bytes:
        async with await connector.connect(target) as host:
            return (await host.run(["hostname"])).stdout

    outcomes = await fan_out([Target("c"), Target("b"), Target("a")], hostname)
    assert [(name, outcome.ok, outcome.value) for name, outcome in outcomes.items()] == [
        ("c", True, b"c"),
        ("b", False, None),
        ("a", True, b"a"),
    ]
    assert str(outcomes["b"].error) == "b: does not answer within 10 s\n  fix: is the host up?"


async def test_concurrency_stays_within_the_limit() -> None:
    running = most = 0

    async def action(name: str) -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    await fan_out([str(number) for number in range(20)], action, limit=3)
    assert most == 3


async def test_each_outcome_is_reported_at_once() -> None:
    seen: list[HostOutcome[str]] = []

    async def action(name: str) -> str:
        if name == "b":
            raise Unreachable("b", "down")
        await asyncio.sleep(0.01)
        return name

    outcomes = await fan_out(["a", "b"], action, on_done=seen.append)
    assert [outcome.name for outcome in seen] == ["b", "a"] and set(seen) == set(outcomes.values())


@cases("error", SlurmError("slurmctld is down"), ZeroDivisionError("a bug"))
async def test_other_errors_cancel_the_rest_and_are_raised(error: Exception) -> None:
    cancelled = []

    async def action(name: str) -> None:
        if name == "bad":
            await asyncio.sleep(0)
            raise error
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            cancelled.append(name)
            raise

    with pytest.raises(type(error)) as caught:
        await fan_out(["a", "bad", "b"], action)
    assert caught.value is error and cancelled == ["a", "b"]


async def test_cancelling_the_fan_out_cancels_every_host() -> None:
    cancelled = []

    async def action(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.append(name)

    task = asyncio.create_task(fan_out(["a", "b"], action))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert cancelled == ["a", "b"]


async def test_no_hosts_give_no_outcomes() -> None:
    async def action(name: str) -> None:
        raise AssertionError

    assert await fan_out([], action) == {}


def test_hosts_with_equal_output_are_grouped_largest_first() -> None:
    outputs = {"n3": b"22.05", "n1": b"24.11", "n2": b"24.11", "n4": b""}
    assert group_equal(outputs) == [(["n1", "n2"], b"24.11"), (["n3"], b"22.05"), (["n4"], b"")]
