"""A step in which something fails: releases still happen, steps never overlap, and the service goes on."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.cloud.scene import CASES, Scene, choice, rented_set, scene, with_scene

from shoal.cloud.providers.api import RentedInstance, RequestOutcome
from shoal.cloud.rental import Rental
from shoal.cloud.service.provider_account import LOST_ORDER_SEARCH_S
from shoal.cloud.service.service import RentalService
from shoal.cloud.status_file import read_status
from shoal.roles.elastic import HOLD_MAX_AGE_S
from shoal.spec.rental import Budget

FIRST = rented_set("first", 4, choice(CASES["lambda"]))
SECOND = rented_set("second", 4, choice(CASES["runpod"]))
ALIKE = rented_set("alike", 4, choice(CASES["sandbox"]))


async def failing(*_: Any) -> Any:
    raise KeyError("status")


@with_scene("sandbox")
async def test_due_releases_and_the_status_are_made_although_the_step_fails(
    it: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await it.run_job(seconds=3600)
    file = tmp_path / "status.json"
    it.service = RentalService(it.context, status_file=file)
    monkeypatch.setattr(it.service._booter, "step", failing)
    [rental] = it.rentals("joined")
    with pytest.raises(KeyError):
        await it.step()
    assert list(read_status(file.read_text()).machines) == [rental.token]
    it.context.release(rental, "no longer wanted")
    with pytest.raises(KeyError):
        await it.step()
    assert it.machines() == []


@cases("error, problem", (KeyError("status"), "KeyError"), (None, "TypeError"), ids=["exception", "none is no list"])
@with_scene("sandbox")
async def test_client_exception_is_reported_and_its_machines_stay(
    it: Scene, monkeypatch: pytest.MonkeyPatch, error: Exception | None, problem: str
) -> None:
    await it.run_job(seconds=3600)

    async def broken(cluster: str) -> None:
        if error:
            raise error

    monkeypatch.setattr(it.context.accounts["sandbox"].provider, "instances", broken)
    await it.passes(600)
    assert it.context.accounts["sandbox"].problem == f"its client failed: {problem}"
    assert [one.state for one in it.rentals()] == ["joined"]


@cases("question", "offers", "ensure_key")
@with_scene("lambda", "runpod", sets=(FIRST, SECOND), budget=Budget(per_hour=100.0))
async def test_client_exception_does_not_stop_jobs_on_another_account(
    it: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, question: str
) -> None:
    monkeypatch.setattr(it.context.accounts["lambda"].provider, question, failing)
    it.slurm.submit("1", 1, among=list(FIRST.nodes))
    it.slurm.submit("2", 1, among=list(SECOND.nodes))
    await it.step()
    assert len(it.machines("runpod")) == 1
    assert "its client failed: KeyError" in caplog.text


async def test_job_shows_that_its_account_does_not_answer(it: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(it.context.accounts["lambda"].provider, "offers", failing)
    job = it.slurm.submit("1", 1)
    await it.until(lambda: job.restarts == 1, seconds=300)
    assert job.comment.startswith("lambda does not answer; next try at ")


TOO_FEW, TOO_MANY, NAMELESS, NO_OUTCOMES = "too few", "too many", "without an id", "of another kind"
NO_ANSWER = "an exception"


def garbled(outcomes: list[RequestOutcome], how: str) -> Any:
    """What a client with a bug makes of the right outcomes."""
    if how == NO_ANSWER:
        raise KeyError("instance_ids")
    return {
        TOO_FEW: outcomes[1:],
        TOO_MANY: [*outcomes, RequestOutcome("i-nobody")],
        NAMELESS: [replace(one, id="") for one in outcomes],
        NO_OUTCOMES: [None for _ in outcomes],
    }[how]


def garble_outcomes(it: Scene, monkeypatch: pytest.MonkeyPatch, method: str, how: str) -> None:
    """Let the client of the account `sandbox` answer wrongly, after the request was done."""
    renter = it.context.accounts["sandbox"].provider
    request = getattr(renter, method)

    async def miscounted(items: Any) -> Any:
        return garbled(await request(items), how)

    monkeypatch.setattr(renter, method, miscounted)


async def run_jobs_of_both_accounts(it: Scene, nodes: int) -> None:
    """A job on so many nodes of one account and one on another's, to their ends; then every machine is released."""
    jobs = [it.slurm.submit("1", nodes, among=list(ALIKE.nodes)), it.slurm.submit("2", 1, among=list(SECOND.nodes))]
    await it.until(lambda: all(job.state == "COMPLETED" for job in jobs) and it.slurm.settled)
    await it.until(lambda: not it.ledger.live())


@cases("how", TOO_FEW, TOO_MANY, NAMELESS, NO_OUTCOMES, NO_ANSWER)
@with_scene("sandbox", "runpod", sets=(ALIKE, SECOND))
async def test_orders_with_wrong_outcomes_are_searched_and_not_repeated_or_lost(
    it: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    garble_outcomes(it, monkeypatch, "create", how)
    await run_jobs_of_both_accounts(it, 3)
    assert {one["id"] for one in it.market("sandbox").bill()} == {
        one.id for one in it.rentals() if one.account == "sandbox"
    }
    assert len(it.market("sandbox").bill()) == 3 and it.machines("sandbox") == []
    assert "could not be served" not in caplog.text


@cases("how", TOO_FEW, TOO_MANY, NO_OUTCOMES)
@with_scene("sandbox", "runpod", sets=(ALIKE, SECOND))
async def test_deletes_with_wrong_outcomes_repeat_until_the_list_is_empty(
    it: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    garble_outcomes(it, monkeypatch, "delete", how)
    await run_jobs_of_both_accounts(it, 2)
    assert it.machines("sandbox") == [] and it.machines("runpod") == []


@with_scene("sandbox")
async def test_failed_delete_is_reported_and_retried(
    it: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await it.run_job(seconds=3600)
    [rental] = it.rentals("joined")
    with monkeypatch.context() as during:
        during.setattr(it.context.accounts["sandbox"].provider, "delete", failing)
        it.context.release(rental, "no longer wanted")
        await it.step()
    assert f"sandbox: cannot delete {rental.id}: its client failed: KeyError" in caplog.text
    it.slurm.cancel("1")
    await it.until(lambda: it.machines() == [], seconds=300)


async def test_job_with_an_internal_error_does_not_delay_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    price = CASES["lambda"].offer.usd_hour or 1.29
    async with scene(tmp_path, "lambda", budget=Budget(per_hour=price)) as it:
        order = it.service._provisioner._order

        async def broken(group: Any, *rest: Any) -> None:
            if group.job == "1":
                raise RuntimeError("a bug of ours")
            await order(group, *rest)

        monkeypatch.setattr(it.service._provisioner, "_order", broken)
        it.slurm.submit("1", 1)
        it.slurm.submit("2", 1)
        await it.step()
        assert [one.jobs for one in it.rentals()] == [("2",)], "what the first had reserved is free again"
        assert "cannot serve job 1; the next step retries" in caplog.text
        assert "a bug of ours" in caplog.text


async def test_search_for_a_lost_order_starts_at_its_timeout(it: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    it.fault("lagging-list", 1, seconds=60.0)
    it.fault("error-after-create")
    account = it.context.accounts["lambda"]
    order = account.order

    async def slow(orders: Any) -> Any:
        it.clock.advance(LOST_ORDER_SEARCH_S - 20)
        return await order(orders)

    monkeypatch.setattr(account, "order", slow)
    await it.step()
    it.slurm.submit("1", 1)
    await it.until(lambda: it.slurm.job_by_id["1"].state == "COMPLETED", seconds=6 * 3600)
    assert len(it.market().bill()) == 1


async def test_machine_preempted_during_boot_is_released_at_once(it: Scene) -> None:
    it.slurm.submit("1", 1)
    await it.until(lambda: bool(it.rentals("made")))
    [first] = it.rentals("made")
    it.market().preempt(first.id)
    await it.until(lambda: bool(it.rentals("gone")), seconds=300)
    assert it.machines() == []


@cases("killed", False, True)
@with_scene("sandbox")
async def test_key_rotation_delays_joins_until_its_end_or_for_the_maximum_age(
    it: Scene, tmp_path: Path, killed: bool
) -> None:
    hold = it.context.pause_file = tmp_path / "hold"
    job = it.slurm.submit("1", 1)

    def touched() -> bool:
        hold.touch()
        os.utime(hold, (it.clock.now(), it.clock.now()))
        return bool(it.machines())

    await it.until(touched)
    for _ in range(15):
        touched()
        await it.passes(10)
    assert it.joiner.joined == [] and [one.state for one in it.rentals()] == ["made"]
    if not killed:
        hold.unlink()
    await it.until(lambda: job.state == "COMPLETED", seconds=2 * HOLD_MAX_AGE_S)
    assert len(it.market().bill()) == 1


@with_scene("sandbox", sets=(ALIKE,))
async def test_join_that_fails_for_one_machine_is_repeated_for_each_alone(
    it: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    join = it.joiner.join

    async def broken(nodes: Mapping[str, RentedInstance]) -> Mapping[str, str]:
        if "alike1" in nodes:
            raise KeyError("alike1")
        return await join(nodes)

    monkeypatch.setattr(it.joiner, "join", broken)
    for number in (1, 2, 3):
        it.slurm.submit(str(number), 1, seconds=3600)
    await it.until(lambda: sum(one.state == "joined" for one in it.rentals()) == 2, seconds=120)
    assert "cannot join alike1" in caplog.text


@with_scene("sandbox", sets=(ALIKE,))
async def test_rental_that_cannot_be_updated_does_not_stop_the_others(
    it: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    await it.run_job(seconds=3600)
    [first] = it.rentals("joined")
    faulty = it.context.accounts["sandbox"].machine

    def machine(rental: Rental) -> RentedInstance | None:
        if rental.token == first.token:
            raise KeyError("price")
        return faulty(rental)

    monkeypatch.setattr(it.context.accounts["sandbox"], "machine", machine)
    it.slurm.submit("2", 1, seconds=30)
    await it.until(lambda: it.slurm.job_by_id["2"].state == "COMPLETED", seconds=600)
    assert caplog.text.count(f"{first.node}: cannot update it; the next step retries") == 1, "not in every step"


@with_scene("sandbox")
async def test_machine_that_cannot_log_out_is_deleted(it: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    await it.run_job(seconds=3600)
    [rental] = it.rentals("joined")
    monkeypatch.setattr(it.joiner, "leave", failing)
    it.context.release(rental, "no longer wanted")
    await it.step()
    assert it.machines() == []
