"""A provider that does not answer for minutes delays nothing else: no notice, no join, no release."""

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.cloud.scene import CASES, Scene, choice, rented_set, scene, with_scene

from shoal.cloud.providers.api import FailureKind, RequestOutcome
from shoal.cloud.rental import cost
from shoal.cloud.service.provider_account import LOST_ORDER_SEARCH_S
from shoal.cloud.service.scheduling import BackgroundCalls
from shoal.spec.rental import Budget

HANGING_CALL_TIMEOUT_S = 0.2
"""The time that each hanging call costs a test. Calls that do not hang may take longer: see `hang`."""

SLOW = rented_set("slow", 4, choice(CASES["lambda"]))
QUICK = rented_set("quick", 4, choice(CASES["sandbox"]))
SPOT = rented_set("quick", 4, choice(CASES["aws"], market="spot"))


class Hanging:
    """A renter whose calls of some kinds wait until the test lets them go on."""

    def __init__(self, renter: Any) -> None:
        self._renter = renter
        self.let_go = asyncio.Event()
        self.kinds: set[str] = set()
        self.hung: list[str] = []
        self.instead: RequestOutcome | None = None
        """What is answered in place of doing it, once it goes on."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._renter, name)
        if name not in self.kinds:
            return found

        async def hanging(*args: Any) -> Any:
            self.hung.append(name)
            await self.let_go.wait()
            return [self.instead] * len(args[0]) if self.instead else await found(*args)

        return hanging


def hang(it: Scene, *kinds: str, at: str = "lambda") -> Hanging:
    """Let calls of an account hang. Time passes only when all others have ended, however long they take."""
    account = it.context.accounts[at]
    account.provider = slow = Hanging(account.provider)
    slow.kinds |= {*kinds}
    step = it.step

    async def step_until_done() -> None:
        await step()
        async with asyncio.timeout(60):
            while running := calls(it):
                if slow.kinds and not slow.let_go.is_set() and all(at in accounts for accounts in running):
                    break
                await asyncio.sleep(0.001)

    it.step = step_until_done  # type: ignore[method-assign]
    return slow


def calls(it: Scene) -> list[tuple[str, ...]]:
    """The calls that run beside the steps, each with the accounts that it may be at."""
    service, sets = it.service, it.context.sets
    alone = [(str(account),) for account in service._listings.running | service._releaser._deletes.running]
    return alone + [sets[nodeset].accounts for _, nodeset in service._provisioner.busy]  # type: ignore[misc]


def job_on(it: Scene, name: str, nodeset: Any, count: int = 1, seconds: float = 60.0) -> Any:
    return it.slurm.submit(name, count, seconds, among=list(nodeset.nodes))


async def running(it: Scene, *jobs: Any) -> None:
    await it.until(lambda: all(job.state == "RUNNING" for job in jobs))
    await it.step()


@with_scene("lambda", "aws", sets=(SLOW, SPOT), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_preemption_notice_is_read_while_another_account_hangs(it: Scene) -> None:
    slow = hang(it)
    other, job = job_on(it, "1", SLOW, seconds=9000), job_on(it, "2", SPOT, seconds=9000)
    await running(it, other, job)
    slow.kinds.add("instances")
    await it.until(lambda: bool(slow.hung))
    it.market("aws").preempt(it.machines("aws")[0].id)
    await it.until(lambda: job.warned == 1, seconds=20, every=2.0)
    assert slow.hung == ["instances"], "it is not asked again while it owes an answer"
    assert (other.state, other.restarts) == ("RUNNING", 0)


@with_scene("lambda", "sandbox", sets=(SLOW, QUICK), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_account_rents_and_releases_while_another_order_hangs(it: Scene) -> None:
    slow = hang(it, "create")
    first, second = job_on(it, "1", SLOW, 2), job_on(it, "2", QUICK, 2)
    await it.until(lambda: second.state == "COMPLETED")
    await it.until(lambda: bool(it.rentals("gone")) and not it.machines("sandbox"))
    assert slow.hung == ["create", "create"]
    assert first.state == "CONFIGURING" and it.market("lambda").bill() == []
    slow.let_go.set()
    await it.until(lambda: first.state == "COMPLETED")
    assert first.restarts == 0 and len(it.market("lambda").bill()) == 2


@with_scene("lambda", sets=(SLOW,), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_pending_order_is_not_treated_as_lost(it: Scene) -> None:
    slow = hang(it, "create")
    job = job_on(it, "1", SLOW)
    await it.passes(3 * LOST_ORDER_SEARCH_S)
    assert slow.hung == ["create"] and [one.state for one in it.rentals()] == ["intended"]
    slow.let_go.set()
    await running(it, job)
    assert len(it.market().bill()) == 1


@cases("answer", None, RequestOutcome(failure=FailureKind.CAPACITY, message="none left"))
@with_scene("lambda", sets=(SLOW,), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_late_answer_for_a_cancelled_job_leaves_no_machine(it: Scene, answer: RequestOutcome | None) -> None:
    slow = hang(it, "create")
    job_on(it, "1", SLOW, 2)
    await it.until(lambda: len(slow.hung) == 2)
    it.slurm.cancel("1")
    await it.until(lambda: {one.state for one in it.rentals()} == {"releasing"})
    slow.instead = answer
    slow.let_go.set()
    await it.until(lambda: not it.ledger.live())
    await it.until(lambda: it.slurm.settled)
    assert it.machines() == [] and len(it.market().bill()) == (0 if answer else 2)
    assert {one.state for one in it.rentals()} == {"gone"} and len(slow.hung) == 2


@with_scene("lambda", sets=(SLOW,), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_job_cancelled_during_a_provider_call_sets_no_node_down(it: Scene) -> None:
    slow = hang(it, "offers")
    job_on(it, "1", SLOW, 4)
    await it.until(lambda: bool(slow.hung))
    it.slurm.cancel("1")
    await it.step()
    it.ledger.block("lambda", "", "", "", None, "lambda does not accept our key")
    slow.let_go.set()
    await it.step()
    await it.until(lambda: it.slurm.settled)
    assert [node.reasons for node in it.slurm.node_by_name.values()] == [[]] * 4


@with_scene("lambda", "sandbox", sets=(SLOW, QUICK), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_account_releases_machines_while_another_delete_hangs(it: Scene) -> None:
    slow = hang(it)
    jobs = job_on(it, "1", SLOW), job_on(it, "2", QUICK, seconds=400.0)
    await running(it, *jobs)
    slow.kinds.add("delete")
    await it.until(lambda: bool(slow.hung))
    assert len(it.machines("sandbox")) == 1
    await it.until(lambda: not it.machines("sandbox"))
    assert slow.hung == ["delete"] and len(it.machines("lambda")) == 1
    slow.let_go.set()
    await it.until(lambda: it.slurm.settled and not it.ledger.live())


async def test_budget_reserves_orders_delayed_by_a_slow_provider(tmp_path: Path) -> None:
    price = 1.29
    sets = (rented_set("slow", 4, choice(CASES["lambda"])), rented_set("late", 4, choice(CASES["lambda"])))
    async with scene(
        tmp_path, "lambda", sets=sets, budget=Budget(per_hour=2 * price), step_wait_s=HANGING_CALL_TIMEOUT_S
    ) as it:
        slow = hang(it, "create")
        slow.abilities = replace(slow.abilities, create_interval=12.0)
        first, second = job_on(it, "1", sets[0], 2), job_on(it, "2", sets[1], 1)
        await it.until(lambda: second.restarts == 1)
        assert second.comment.startswith(f"the budget of ${2 * price:.2f} an hour")
        assert slow.hung == ["create"]
        slow.let_go.set()
        await running(it, first)
        assert (first.restarts, len(it.machines())) == (0, 2)


@with_scene("lambda", sets=(SLOW,), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_order_listed_during_a_slurm_update_is_kept(it: Scene) -> None:
    slow, account = hang(it, "offers"), it.context.accounts["lambda"]
    job, down = job_on(it, "1", SLOW), it.slurm.down
    await it.until(lambda: bool(slow.hung))

    async def slow_down(nodes: Any, reason: str) -> None:
        it.slurm.down = down  # type: ignore[method-assign]
        slow.let_go.set()
        async with asyncio.timeout(60):
            while not it.rentals("made"):  # noqa: ASYNC110 (the order ends beside)
                await asyncio.sleep(0.001)
        await account.list_instances()
        await down(nodes, reason)

    it.slurm.down = slow_down  # type: ignore[method-assign]
    lone = it.slurm.node_by_name["slow4"]
    lone.flags, lone.since = ["CLOUD"], it.clock.now()  # in use, and no machine is behind it
    await running(it, job)
    assert (job.restarts, [one.state for one in it.rentals()]) == (0, ["joined"])
    assert len(it.market().bill()) == 1


@with_scene("lambda", sets=(SLOW,), step_wait_s=HANGING_CALL_TIMEOUT_S)
async def test_late_delete_answer_does_not_extend_the_billing(it: Scene) -> None:
    slow = hang(it, "delete")
    job_on(it, "1", SLOW)
    await it.until(lambda: bool(slow.hung))
    [rental] = it.rentals("releasing")
    machine = it.context.accounts["lambda"].machine(rental)
    await slow._renter.delete([machine])  # it is done, and only the answer takes long
    await it.until(lambda: bool(it.rentals("gone")))
    await it.passes(600)
    slow.instead = RequestOutcome(rental.id)
    slow.let_go.set()
    await it.step()
    [gone] = it.rentals()
    assert slow.hung == ["delete"] and gone.gone_at is not None
    assert gone.billed_until is None
    assert cost(gone, it.clock.now()) == cost(gone, gone.gone_at)


# ---- calls beside the steps


async def test_slow_call_continues_in_the_background_and_wakes_the_service() -> None:
    go_on, woken = asyncio.Event(), asyncio.Event()
    calls = BackgroundCalls(0.01, woken.set)
    calls.start("slow", _after(go_on))
    await calls.wait()
    assert calls.running == {"slow"} and not woken.is_set()
    go_on.set()
    await asyncio.wait_for(woken.wait(), 60)
    assert calls.running == frozenset()


async def test_exception_of_a_late_call_is_raised_by_the_next_wait() -> None:
    go_on, woken = asyncio.Event(), asyncio.Event()
    calls = BackgroundCalls(0.01, woken.set)
    calls.start("bad", _after(go_on, RuntimeError("a bug of ours")))
    await calls.wait()
    go_on.set()
    await asyncio.wait_for(woken.wait(), 60)
    calls.start("bad", _after(go_on))
    with pytest.raises(RuntimeError, match="a bug of ours"):
        await calls.wait()
    await calls.wait()


async def test_first_failure_is_raised_and_the_others_logged(caplog: pytest.LogCaptureFixture) -> None:
    now = asyncio.Event()
    now.set()
    calls = BackgroundCalls(60.0)
    calls.start("first", _after(now, RuntimeError("the first bug")))
    calls.start("second", _after(now, RuntimeError("the second bug")))
    with pytest.raises(RuntimeError, match="the first bug"):
        await calls.wait()
    assert "the second bug" in caplog.text and "the first bug" not in caplog.text


async def test_running_calls_are_cancelled_at_close() -> None:
    calls = BackgroundCalls(0.01)
    calls.start("slow", _after(asyncio.Event()))
    await calls.wait()
    await calls.close()
    assert calls.running == frozenset()


def _after(event: asyncio.Event, error: Exception | None = None) -> Coroutine[Any, Any, None]:
    async def call() -> None:
        await event.wait()
        if error:
            raise error

    return call()
