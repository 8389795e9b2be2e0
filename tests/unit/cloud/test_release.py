"""Machines that must be released: the provider takes them back, or the budget is spent. And the service's status."""

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.cloud.scene import CASES, Scene, choice, rented_set, scene, with_scene

from shoal.cloud.providers.api import FailureKind, RequestOutcome
from shoal.cloud.rental import Rental
from shoal.cloud.service.service import RentalService, single_instance
from shoal.cloud.service.slurm_requests import RequestQueue
from shoal.cloud.status_file import ServiceStatus, read_status
from shoal.errors import UsageError
from shoal.remote import power_request as request
from shoal.roles.rented import NOTICE_REASON
from shoal.slurm.state import NodeState
from shoal.spec.rental import Budget

# ---- spot


@with_scene("gcp")
async def test_notice_that_only_the_machine_reads_warns_the_job(it: Scene) -> None:
    job = await it.run_job(2, seconds=600)
    it.market().preempt(it.machines()[0].id)
    await it.passes(10, every=2)
    assert job.warned == 0, "Google lists the machine as running"
    await it.slurm.drain(["burst1"], NOTICE_REASON)  # what preemption_notice.py does there
    await it.until(lambda: job.warned == 1, seconds=20, every=2)
    assert job.state == "RUNNING"  # it has time to save
    await it.until(lambda: job.restarts == 1, seconds=130, every=2)
    await it.runs("1")
    assert job.warned == 1
    await it.settled()


@with_scene("gcp")
async def test_machine_that_is_powered_off_unheard_costs_only_the_time_since_the_last_save(it: Scene) -> None:
    job = await it.run_job(2, seconds=600)
    it.market().preempt(it.machines()[0].id)
    await it.until(lambda: job.restarts == 1, seconds=300, every=2)
    await it.runs("1")


@with_scene("sandbox")
async def test_preemption_notice_warns_the_job_and_requeues_elsewhere(it: Scene) -> None:
    job = await it.run_job(2, seconds=600)
    it.market().preempt(it.machines()[0].id)
    await it.until(lambda: job.warned == 1, seconds=70, every=2)
    assert "DRAIN" in it.slurm.state("burst1")
    assert job.state == "RUNNING"  # it has time to save
    await it.until(lambda: job.restarts == 1, seconds=30, every=1)
    await it.runs("1")
    assert job.warned == 1
    await it.settled()


@with_scene("sandbox")
async def test_job_that_exits_after_the_warning_frees_its_node_at_once(it: Scene) -> None:
    job = await it.run_job(seconds=600)
    it.market().preempt(it.machines()[0].id)
    await it.until(lambda: job.warned == 1, seconds=70, every=2)
    await it.slurm.requeue("1")  # what the training library does when it has saved
    await it.step()
    await it.step()
    assert it.slurm.node_by_name["burst1"].base != "ALLOCATED"
    assert it.rentals("releasing")


@with_scene("sandbox")
async def test_job_without_checkpoints_gets_no_signal_and_is_requeued(it: Scene) -> None:
    job = await it.run_job(seconds=600, saves=False)
    it.market().preempt(it.machines()[0].id)
    await it.until(lambda: job.restarts == 1, seconds=120, every=2)
    assert job.warned == 0


@with_scene("sandbox")
async def test_restarted_service_continues_a_preemption_notice(it: Scene) -> None:
    job = await it.run_job(seconds=600)
    it.market().preempt(it.machines()[0].id)
    await it.until(lambda: job.warned == 1, seconds=70, every=2)
    it.service = it.restart()
    await it.until(lambda: job.restarts == 1, seconds=60, every=2)
    await it.until(lambda: it.slurm.settled and not it.ledger.live())
    assert job.state == "COMPLETED"


# ---- money


@with_scene("lambda", budget=Budget(per_hour=3.0))
async def test_order_above_the_budget_is_rejected_with_the_reason_on_the_job(it: Scene) -> None:
    first, second = it.slurm.submit("1", 2, seconds=1200), it.slurm.submit("2", 1)
    await it.runs("1")
    assert second.restarts >= 1
    assert second.comment.startswith("the budget of $3.00 an hour: $2.58 is in use, and gpu_1x_a10 costs $1.29")
    assert any("the budget of $3.00" in text for text in it.slurm.node_by_name["burst3"].reasons)
    assert first.restarts == 0
    await it.until(lambda: second.state == "COMPLETED", seconds=6 * 3600)
    assert max(_rates(it)) <= 3.0


@with_scene("runpod", budget=Budget(per_hour=0.5))
async def test_concurrent_jobs_cannot_both_use_the_rest_of_the_budget(it: Scene) -> None:
    it.slurm.submit("1", 1)
    it.slurm.submit("2", 1)
    await it.step()
    assert len(it.machines()) == 1


@with_scene("lambda", budget=Budget(per_hour=1.29))
async def test_unreleasable_machine_in_the_budget_is_shown_on_the_job(it: Scene) -> None:
    leave(it, "an account of before")
    job = it.slurm.submit("1", 1)
    await it.until(lambda: job.restarts == 1, seconds=300)
    assert job.comment.startswith("the budget of $1.29 an hour: $1.29 is in use")


@with_scene("lambda", budget=Budget(per_hour=1.29))
async def test_job_waiting_for_a_release_in_the_budget_shows_the_machine(
    it: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:

    async def refused(machines: Any) -> list[RequestOutcome]:
        return [RequestOutcome(one.id, FailureKind.TRANSIENT, message="not now") for one in machines]

    monkeypatch.setattr(it.context.accounts["lambda"].provider, "delete", refused)
    leave(it, "lambda")
    job = it.slurm.submit("1", 1)
    await it.step()
    assert (job.state, job.restarts) == ("CONFIGURING", 0)
    assert job.comment.startswith("the budget of $1.29 an hour: $1.29 is in use")
    assert job.comment.endswith("; waiting for i-1 of lambda to end")


def leave(it: Scene, account: str) -> None:
    """The first node had a machine, which is to go."""
    offer = replace(CASES["lambda"].offer, provider=account, usd_hour=1.29)
    now = it.clock.now()
    it.ledger.intend(Rental("t1", "burst1", "burst", account, offer, intended_at=now))
    it.ledger.record_machine("t1", "i-1", 1.29, now)
    it.ledger.record_release("t1", "no longer wanted", now)


async def test_cheaper_offer_is_tried_when_the_budget_is_too_small(tmp_path: Path) -> None:
    dear = choice(CASES["lambda"], type="gpu_1x_h100_sxm5")
    sets = (rented_set("burst", 4, dear, choice(CASES["lambda"])),)
    async with scene(tmp_path, "lambda", sets=sets, budget=Budget(per_hour=2.0)) as it:
        await it.run_job()
        assert [machine.order.type for machine in it.machines()] == ["gpu_1x_a10"]


@with_scene("lambda", budget=Budget(per_day=2.0, then="end"))
async def test_exhausted_budget_with_end_ends_running_jobs(it: Scene) -> None:
    job = await it.run_job(seconds=9 * 3600)
    await it.until(lambda: job.warned == 1, seconds=3 * 3600, every=30)
    assert "the budget of $2.00 a day is used up" in job.comment
    await it.until(lambda: it.machines() == [], seconds=900)
    assert sum(one["usd"] for one in it.market().bill()) <= 2.0


@with_scene("lambda", budget=Budget(per_day=2.0, then="end", after="30m"))
async def test_exhausted_budget_with_after_delays_the_end(it: Scene) -> None:
    job = await it.run_job(seconds=9 * 3600)

    def paid() -> float:
        return sum(one["usd"] for one in it.market().bill())

    await it.until(lambda: paid() >= 2.0, seconds=3 * 3600, every=30)
    reached = it.clock.now()
    assert job.warned == 0
    await it.until(lambda: job.warned == 1, seconds=3600, every=10)
    assert "the budget of $2.00 a day is used up for 30m" in job.comment
    await it.until(lambda: it.machines() == [], seconds=900)
    assert 1500 < it.clock.now() - reached <= 1800
    assert paid() <= 2.0 + 1.29 / 2


def _rates(it: Scene) -> list[float]:
    """What was paid an hour, whenever a machine came or went."""
    bill = it.market().bill()
    return [
        sum(one["usd_hour"] for one in bill if one["ordered"] <= at and not (one["ended"] and one["ended"] <= at))
        for at in [one["ordered"] for one in bill]
    ]


# ---- its status


async def test_status_file_has_job_reasons_and_node_machines(it: Scene, tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    it.service = RentalService(it.context, status_file=file)
    it.fault("stockout", -1)
    job = it.slurm.submit("1", 1)
    await it.until(lambda: job.restarts == 1)
    told = read_status(file.read_text())
    assert told.jobs["1"].startswith("lambda us-west-1 out of gpu_1x_a10")
    assert told.accounts == {"lambda": ""}
    it.market().faults.clear()
    await it.runs("1")
    told = read_status(file.read_text())
    [(token, one)] = told.machines.items()
    assert token == it.rentals("joined")[0].token
    assert one["node"] == it.rentals("joined")[0].node
    assert (one["state"], one["place"], one["usd_hour"]) == ("joined", "us-west-1", 1.29)
    it.fault("list-fails", -1)
    it.slurm.silent = True
    await it.service.step()
    it.clock.advance(100)
    await it.service.step()
    told = read_status(file.read_text())
    assert "Unable to contact slurm controller" in told.problem
    assert "500" in told.accounts["lambda"]


async def test_status_file_lists_a_released_machine_beside_its_replacement(it: Scene, tmp_path: Path) -> None:
    file = tmp_path / "status.json"
    it.service = RentalService(it.context, status_file=file)
    await it.run_job(seconds=3600)
    [first] = it.rentals("joined")
    it.context.release(first, "no longer wanted")
    it.ledger.intend(replace(first, token="t2", state="intended", id=""))
    await it.service.step()
    told = read_status(file.read_text()).machines
    assert [(one["node"], one["state"]) for one in told.values()] == [
        ("burst1", "releasing"),
        ("burst1", "intended"),
    ]


@with_scene("sandbox")
async def test_account_removed_from_the_spec_with_live_machines_is_reported(it: Scene, tmp_path: Path) -> None:
    await it.run_job(seconds=600)
    file = tmp_path / "status.json"
    left = RentalService(replace(it.context, accounts={}), status_file=file)
    await left.step()
    said = "machines are rented there, but the spec has no such account"
    assert read_status(file.read_text()).accounts == {"sandbox": said}
    assert len(it.machines()) == 1


def test_status_of_a_newer_shoal_is_readable() -> None:
    assert read_status(json.dumps({"at": 5.0, "weather": "fine"})) == ServiceStatus(5.0)


@cases("text", "", "[]", "{}", '{"at": "yesterday"}')
def test_invalid_status_is_rejected(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        read_status(text)


# ---- how it runs for good


@with_scene("sandbox")
async def test_service_runs_until_cancelled_and_reads_requests(it: Scene, tmp_path: Path) -> None:
    requests = tmp_path / "requests"
    requests.mkdir()
    it.ledger.block("sandbox", "", "", "", it.clock.now() + 3600, "sandbox has no money of ours left")
    service = RentalService(it.context, requests=RequestQueue(requests))
    work = asyncio.create_task(service.run())
    it.slurm.submit("1", 1)
    it.slurm.tick()
    request.main(["resume", "burst1"], str(requests), {})
    async with asyncio.timeout(30):
        while not it.market().bill():  # noqa: ASYNC110 (a new service tries an account again)
            await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert not list(requests.iterdir())


@with_scene("sandbox")
async def test_failed_step_does_not_end_the_service(it: Scene, caplog: pytest.LogCaptureFixture) -> None:
    nodes = it.slurm.nodes
    broken = [ValueError("a bug"), ValueError("a bug")]

    async def failing() -> list[NodeState]:
        if broken:
            raise broken.pop()
        return await nodes()

    it.slurm.nodes = failing  # type: ignore[method-assign]
    it.slurm.submit("1", 1)
    it.slurm.tick()
    work = asyncio.create_task(it.service.run())
    async with asyncio.timeout(30):
        while not it.market().bill():  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    work.cancel()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert caplog.text.count("a step failed; the next one retries") == 2


async def test_service_polls_often_only_while_work_is_pending(it: Scene) -> None:
    assert await it.service.step() == 15.0
    it.fault("stockout", -1)
    it.slurm.submit("1", 1)
    it.slurm.tick()
    assert await it.service.step() == 1.0
    assert await it.service.step() == 15.0  # the node is down, and will be for minutes
    it.clock.advance(590)
    assert await it.service.step() == 10.0
    it.market().faults.clear()
    it.clock.advance(60)
    await it.step()
    it.slurm.tick()
    assert await it.service.step() == 0.3
    await it.runs("1")
    assert await it.service.step() == 15.0


def test_only_a_single_service_rents(tmp_path: Path) -> None:
    lock = tmp_path / "state" / "ledger.lock"
    with (
        single_instance(lock),
        pytest.raises(UsageError, match=r"another process holds .*ledger\.lock\n  fix: shoal-elastic\.service runs"),
        single_instance(lock),
    ):
        pass
    with single_instance(lock):
        pass
