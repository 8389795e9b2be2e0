"""The whole of it over a real socket: what Slurm asks for is rented, joined, used and given back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.unit.cloud.scene import CASES, Scene, choice, rented_set, scene

from shoal.cloud.providers.api import FailureKind
from shoal.cloud.rental import cost, micros
from shoal.cloud.service.account import LOST_ORDER_SEARCH_S
from shoal.cloud.service.slurm_requests import PowerRequest
from shoal.spec.rental import Budget

WEST, EAST = choice(CASES["lambda"]), choice(CASES["lambda"], region="us-east-1")


async def settled(it: Scene) -> None:
    """All jobs are done, all nodes asleep, all machines gone and struck off."""
    await it.until(lambda: it.slurm.settled and not it.ledger.live(), seconds=6 * 3600)
    assert it.machines() == []
    assert {one["ended"] is not None for one in it.market().bill()} <= {True}


async def running(it: Scene, *jobs: str) -> None:
    await it.until(lambda: all(it.slurm.job_by_id[job].state == "RUNNING" for job in jobs))
    await it.step()


async def test_a_job_wakes_its_nodes_and_they_go_when_it_is_done(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        job = it.slurm.submit("1", 2)
        await running(it, "1")
        assert len(it.machines()) == 2
        assert {one.state for one in it.rentals()} == {"joined"}
        assert {one.jobs for one in it.rentals()} == {("1",)}
        assert job.comments == ["trying lambda us-west-1", "rented from lambda us-west-1"]
        await settled(it)
        assert (job.state, job.restarts) == ("COMPLETED", 0)
        assert {one.state for one in it.rentals()} == {"gone"}
        assert len(it.market().bill()) == 2


async def test_what_is_given_back_is_paid_for_as_the_provider_says(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 2)
        await settled(it)
        billed = {one["id"]: one["seconds"] for one in it.market().bill()}
        ours = {
            one.id: one.billing.seconds((one.billed_until or 0) - (one.billed_from or one.made_at or 0))
            for one in it.rentals()
        }
        assert ours.keys() == billed.keys()
        assert all(abs(ours[name] - billed[name]) <= 60 for name in ours), (ours, billed)


async def test_an_intent_is_in_the_ledger_before_the_provider_is_asked(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        seen: list[list[str]] = []
        order = it.market().order
        it.market().order = lambda wanted, id: (  # type: ignore[method-assign]
            seen.append([one.state for one in it.ledger.live()]),
            order(wanted, id),
        )[1]
        it.slurm.submit("1", 1)
        await running(it, "1")
        assert seen == [["intended"]]


async def test_launches_keep_the_pause_that_the_provider_asks_for(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        _paced(it)
        it.slurm.submit("1", 4)
        await it.until(lambda: len(it.market().bill()) == 4, every=1.0)
        ordered = sorted(one["ordered"] for one in it.market().bill())
        assert all(later - earlier >= 12 for earlier, later in pairwise(ordered)), ordered


# ---- failover


async def test_a_stockout_moves_on_within_the_same_job(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.fault("stockout", -1, region="us-west-1")
        job = it.slurm.submit("1", 2)
        await running(it, "1")
        assert job.restarts == 0
        assert {one["region"] for one in it.market().bill()} == {"us-east-1"}
        assert any("lambda us-west-1 out of gpu_1x_a10, trying lambda us-east-1" in text for text in job.comments)
        await settled(it)


async def test_what_was_out_is_remembered_for_the_next_job(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.fault("stockout", 1, region="us-west-1")
        it.slurm.submit("1", 1)
        await running(it, "1")
        it.slurm.submit("2", 1)
        await it.until(lambda: len(it.market().bill()) == 2)
        assert [one["region"] for one in it.market().bill()] == ["us-east-1", "us-east-1"]


async def test_a_gang_gets_all_its_nodes_in_one_place_and_a_partial_set_is_given_back(tmp_path: Path) -> None:
    sets = (rented_set("burst", 8, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        _paced(it)
        it.slurm.submit("1", 4, seconds=600)
        await it.until(lambda: len(it.machines()) == 2, every=1.0)
        it.fault("stockout", -1, region="us-west-1")
        await running(it, "1")
        assert {machine.order.region for machine in it.machines()} == {"us-east-1"}
        assert len(it.machines()) == 4
        assert {one.reason for one in it.rentals("gone")} == {
            "the job's nodes must be in one place: lambda us-west-1 out of gpu_1x_a10"
        }
        await settled(it)


async def test_where_nothing_is_left_the_job_waits_with_the_reason_and_the_node_is_tried_again(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("stockout", -1)
        job = it.slurm.submit("1", 2)
        await it.until(lambda: job.restarts == 1)
        assert job.comment.startswith("lambda us-west-1 out of gpu_1x_a10; next try at ")
        node = it.slurm.node_by_name["burst1"]
        assert node.base == "DOWN"
        assert node.reason.startswith("shoal: lambda us-west-1 out of gpu_1x_a10")
        assert it.market().bill() == []
        it.market().faults.clear()
        await settled(it)
        assert job.state == "COMPLETED"


async def test_two_gangs_that_fail_leave_nothing_behind(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        _paced(it)
        it.slurm.submit("1", 4)
        it.slurm.submit("2", 4)
        await it.until(lambda: len(it.machines()) >= 3, every=1.0)
        it.fault("stockout", -1)
        await it.passes(900)
        assert it.machines() == []
        it.market().faults.clear()
        await settled(it)
        assert {job.state for job in it.slurm.job_by_id.values()} == {"COMPLETED"}


@pytest.mark.parametrize("kind", ["quota", "balance", "auth"])
async def test_trouble_with_the_account_is_told_on_the_job(tmp_path: Path, kind: str) -> None:
    words = {"quota": "quota is used up", "balance": "no money", "auth": "does not accept our key"}
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 1)
        it.slurm.tick()
        await it.context.accounts["lambda"].list_instances()
        await it.context.accounts["lambda"].key_name("")
        it.fault(kind, -1)
        await it.until(lambda: it.slurm.job_by_id["1"].restarts == 1)
        assert words[kind] in it.slurm.job_by_id["1"].comment
        assert it.market().bill() == []


async def test_an_account_without_money_is_tried_again_after_an_hour(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("balance", -1)
        job = it.slurm.submit("1", 1)
        await it.until(lambda: job.restarts == 1)
        assert job.comment.startswith(
            "lambda has no money left of ours (top it up; it is tried again every hour); next try at"
        )
        refused, at = len(it.rentals("failed")), it.clock.now()
        await it.passes(3000)
        assert len(it.rentals("failed")) == refused, "nothing is ordered meanwhile"
        it.market().faults.clear()
        await it.until(lambda: job.state == "COMPLETED")
        [made] = it.market().bill()
        assert 3000 < made["ordered"] - at < 4500


async def test_told_to_ask_less_often_it_waits_and_asks_again(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("rate", 6)
        job = it.slurm.submit("1", 2)
        await running(it, "1")
        assert job.restarts == 0
        assert len(it.market().bill()) == 2


# ---- answers that get lost


async def test_a_create_whose_answer_got_lost_is_looked_for_and_not_repeated(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("error-after-create")
        job = it.slurm.submit("1", 2)
        await running(it, "1")
        assert job.restarts == 0
        assert len(it.market().bill()) == 2
        assert len({one["name"] for one in it.market().bill()}) == 2


async def test_a_create_that_did_nothing_is_repeated_only_after_the_look(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("error-before-create")
        it.slurm.submit("1", 1)
        begun = it.clock.now()
        await it.until(lambda: len(it.market().bill()) == 1)
        assert it.market().bill()[0]["ordered"] - begun >= LOST_ORDER_SEARCH_S
        assert [one.trouble for one in it.rentals("failed")] == [FailureKind.AMBIGUOUS.value]


async def test_a_lost_answer_and_a_list_that_fails_leave_the_order_open(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("error-after-create")
        it.slurm.submit("1", 1)
        await it.until(lambda: len(it.market().bill()) == 1)
        it.fault("list-fails", -1)
        await it.passes(600)
        assert [one.state for one in it.ledger.live()] == ["intended"]
        assert len(it.market().bill()) == 1
        it.market().faults.clear()
        await running(it, "1")
        assert len(it.market().bill()) == 1


async def test_a_list_that_lags_makes_no_second_order(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("lagging-list", 2, seconds=200)
        it.slurm.submit("1", 2)
        await running(it, "1")
        assert len(it.market().bill()) == 2


async def test_a_machine_that_turns_up_after_it_was_given_up_is_given_back(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("error-after-create")
        it.fault("lagging-list", seconds=400)
        job = it.slurm.submit("1", 1)
        await running(it, "1")
        await it.passes(500)
        assert len(it.market().bill()) == 2
        await settled(it)
        assert job.state == "COMPLETED"
        assert len(it.rentals("gone")) == 2


# ---- machines that are no good


async def test_a_machine_that_nobody_reaches_is_given_back_in_time_and_another_place_tried(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.slurm.resume_timeout = 7200
        it.fault("never-reachable", 1)
        job = it.slurm.submit("1", 1)
        await running(it, "1")
        assert job.restarts == 0
        [bad] = it.rentals("gone")
        assert "is not a node after 1800 s: 192.0.2.1 does not answer" in bad.reason
        assert [one["region"] for one in it.market().bill()] == ["us-west-1", "us-east-1"]


async def test_a_bad_gpu_is_replaced_at_once_and_its_offer_remembered(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.fault("bad-gpu")
        job = it.slurm.submit("1", 1)
        await running(it, "1")
        assert job.restarts == 0
        assert any("CUDA error 802" in one.reason for one in it.rentals("gone"))
        assert [one["region"] for one in it.market().bill()] == ["us-west-1", "us-east-1"]


async def test_one_bad_machine_of_a_gang_that_works_is_replaced_beside_the_others(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        _paced(it)
        it.slurm.submit("1", 3, seconds=600)
        await it.until(lambda: len(it.machines()) == 2, every=1.0)
        it.fault("bad-gpu")
        await running(it, "1")
        assert {machine.order.region for machine in it.machines()} == {"us-west-1"}
        assert len(it.market().bill()) == 4
        await settled(it)


async def test_a_machine_that_dies_is_replaced_and_its_job_goes_on(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        job = it.slurm.submit("1", 2, seconds=1200)
        await running(it, "1")
        it.market().kill(it.machines()[0].id)
        await it.until(lambda: job.restarts == 1)
        await running(it, "1")
        [why] = it.slurm.node_by_name["burst1"].reasons
        assert "is unhealthy" in why
        await settled(it)
        assert job.state == "COMPLETED"


async def test_a_machine_that_is_replaced_makes_room_in_the_budget_for_the_one_in_its_place(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda", budget=Budget(per_hour=2 * 1.29)) as it:
        _paced(it)
        job, later = it.slurm.submit("1", 2), it.slurm.submit("2", 2)
        await it.until(lambda: len(it.machines()) == 1, every=1.0)
        it.fault("bad-gpu")
        await running(it, "1")
        assert (job.restarts, len(it.market().bill())) == (0, 3)
        assert later.comments[0].startswith("the budget of $2.58 an hour")
        await settled(it)


async def test_a_job_whom_the_budget_keeps_from_another_place_says_what_was_wrong_with_the_first(
    tmp_path: Path,
) -> None:
    sets = (rented_set("burst", 4, WEST, EAST),)
    async with scene(tmp_path, "lambda", sets=sets, budget=Budget(per_hour=2 * 1.29)) as it:
        _paced(it)
        job = it.slurm.submit("1", 2)
        await it.until(lambda: len(it.machines()) == 1, every=1.0)
        it.fault("stockout")
        await it.until(lambda: job.restarts == 1)
        assert job.comment.startswith(
            "lambda us-west-1 out of gpu_1x_a10; the budget of $2.58 an hour: $1.29 is in use"
        )
        await settled(it)
        assert job.state == "COMPLETED"


@pytest.mark.parametrize("limits", [{"budget": Budget(per_hour=1000.0)}, {"max_price": 1000.0}, {}])
async def test_a_machine_of_google_s_whose_price_nobody_knows_is_rented_only_where_money_has_no_limit(
    tmp_path: Path, limits: dict[str, Any]
) -> None:
    unpriced = choice(CASES["gcp"], type="g2-standard-8", market="on-demand")
    async with scene(tmp_path, "gcp", sets=(rented_set("burst", 4, unpriced, **limits),)) as it:
        job = it.slurm.submit("1", 1)
        if not limits:
            await running(it, "1")
            await settled(it)
            return
        await it.passes(900)
        assert it.market().bill() == []
        assert job.comments[0].startswith(
            "the price of g2-standard-8 at gcp us-central1-b is unknown, so no budget can cover it"
            if "budget" in limits
            else "gcp us-central1-b g2-standard-8 gives no price, and max_price is $1000.00"
        )


async def test_a_machine_dearer_than_the_most_that_may_be_paid_is_given_back(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, EAST, max_price=2.0),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.fault("price-change", 1)
        it.slurm.submit("1", 1)
        await running(it, "1")
        assert [machine.usd_hour for machine in it.machines()] == [1.29]
        assert any("above max_price" in one.reason for one in it.rentals("gone"))


async def test_a_price_that_changes_under_a_machine_changes_what_it_costs_from_then_on(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 1, seconds=9000)
        await running(it, "1")
        await it.passes(1800)
        [before] = it.rentals("joined")
        spent = cost(before, it.clock.now())
        it.machines()[0].usd_hour = 2 * 1.29
        await it.passes(120)
        [after] = it.rentals("joined")
        assert (before.usd_hour, after.usd_hour) == (1.29, 2.58)
        assert cost(after, before.billed_from + 1800) == cost(before, before.billed_from + 1800)
        assert 0 < cost(after, it.clock.now()) - spent <= micros(2.58 * 240 / 3600)


# ---- what reconcile corrects


async def test_a_machine_of_nobody_is_given_back_after_its_grace(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 1, seconds=3000)
        await running(it, "1")
        [ours] = it.machines()
        stray = replace(
            ours.order,
            marks={**ours.order.marks, "tags": _tags(ours, token="f" * 16, epoch=str(int(it.clock.now())))},
        )
        it.market().order(stray, "stray")
        await it.passes(200)
        assert "stray" in {machine.id for machine in it.machines()}
        await it.passes(200)
        assert {machine.id for machine in it.machines()} == {ours.id}


async def test_a_machine_without_our_mark_or_of_another_cluster_is_never_touched(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 1)
        await running(it, "1")
        [ours] = it.machines()
        it.market().order(replace(ours.order, name="somebody's", marks={**ours.order.marks, "tags": []}), "theirs")
        it.market().order(
            replace(ours.order, marks={**ours.order.marks, "tags": _tags(ours, cluster="atoll")}), "other"
        )
        await it.until(lambda: it.slurm.settled and not it.ledger.live())
        await it.passes(3600, every=30)
        assert {machine.id for machine in it.machines()} == {"theirs", "other"}


async def test_a_second_machine_of_one_order_is_given_back(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("duplicate-name")
        it.slurm.submit("1", 1, seconds=600)
        await running(it, "1")
        await it.passes(60)
        assert len(it.market().bill()) == 2
        assert [machine.id for machine in it.machines()] == [one.id for one in it.ledger.live()]


async def test_a_node_that_slurm_uses_without_a_machine_goes_down_and_back_to_sleep(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.node_by_name["burst3"].flags = ["CLOUD"]
        it.slurm.node_by_name["burst3"].since = it.clock.now()
        await it.step()
        assert it.slurm.node_by_name["burst3"].reasons[0].startswith("shoal: this node has no machine")
        await it.passes(60)
        assert it.slurm.settled


async def test_a_node_that_slurm_lost_is_replaced(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        job = it.slurm.submit("1", 1, seconds=600)
        await running(it, "1")
        it.slurm.lose("burst1")
        await running(it, "1")
        assert job.restarts == 1
        await settled(it)


async def test_a_node_that_a_person_took_down_is_left_alone(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 1, seconds=600)
        await running(it, "1")
        await it.slurm.down(["burst1"], "ada looks into it")
        await it.passes(300)
        assert it.slurm.node_by_name["burst1"].reason == "ada looks into it"
        assert it.machines()


async def test_a_node_that_slurm_gave_up_on_may_be_woken_again(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.resume_timeout = 60
        it.fault("slow-boot", 1, seconds=500)
        job = it.slurm.submit("1", 1)
        await it.until(lambda: job.restarts == 1)
        await it.step()
        assert any("did not join in time" in block.why for block in it.ledger.blocks(it.clock.now()))
        it.slurm.resume_timeout = 1800
        await settled(it)
        assert job.state == "COMPLETED"


async def test_a_provider_that_is_down_for_an_hour_costs_no_job_its_nodes(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        job = it.slurm.submit("1", 2, seconds=5000)
        await running(it, "1")
        it.fault("list-fails", -1)
        await it.passes(3600, every=20)
        assert (job.state, job.restarts) == ("RUNNING", 0)
        it.market().faults.clear()
        await settled(it)
        assert (job.state, job.restarts) == ("COMPLETED", 0)


async def test_a_slurm_that_does_not_answer_changes_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        job = it.slurm.submit("1", 2, seconds=3000)
        await running(it, "1")
        it.slurm.silent = True
        for _ in range(100):
            await it.service.step()
            it.clock.advance(20)
        assert len(it.machines()) == 2
        it.slurm.silent = False
        await settled(it)
        assert job.restarts == 0


async def test_a_job_that_is_cancelled_before_anything_is_ordered_costs_nothing(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 2)
        it.slurm.tick()
        it.slurm.cancel("1")
        await it.until(lambda: it.slurm.settled)
        assert it.market().bill() == []


async def test_a_node_that_somebody_wakes_by_hand_gets_a_machine(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.node_by_name["burst1"].flags = ["CLOUD", "POWERING_UP"]
        it.slurm.node_by_name["burst1"].since = it.clock.now()
        it.slurm.requests.append(PowerRequest("resume", ("burst1",)))
        await it.until(lambda: it.slurm.state("burst1") == {"IDLE", "CLOUD"})
        assert len(it.machines()) == 1


# ---- the end of machines, and of money


async def test_a_lifetime_ends_with_a_warning_and_the_job_goes_on_elsewhere(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, lifetime=1800),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        job = it.slurm.submit("1", 1, seconds=2400)
        await running(it, "1")
        await it.until(lambda: job.restarts == 1)
        assert job.warned == 1
        assert "its lifetime of 1800 s is over" in job.comment
        it.slurm.job_by_id["1"].seconds = 60
        await settled(it)
        assert job.state == "COMPLETED"


async def test_no_machine_outlives_its_time_whoever_holds_its_node(tmp_path: Path) -> None:
    sets = (rented_set("burst", 4, WEST, lifetime=1800),)
    async with scene(tmp_path, "lambda", sets=sets) as it:
        it.slurm.submit("1", 2, seconds=9000)
        await running(it, "1")
        await it.slurm.down(["burst1"], "ada looks into it")
        it.slurm.silent = True
        for _ in range(100):
            await it.service.step()
            it.clock.advance(30)
        assert it.machines() == []
        assert {one.reason for one in it.rentals("gone")} == {"its lifetime of 1800 s is over"}


def _paced(it: Scene) -> None:
    """Let the provider ask for twelve seconds between launches, as Lambda does."""
    renter: Any = it.context.accounts["lambda"].provider
    renter.abilities = replace(renter.abilities, create_interval=12.0)


def _tags(machine: Any, **changed: str) -> list[dict[str, str]]:
    """A machine's tags at Lambda, some of them changed."""
    known = {tag["key"]: tag["value"] for tag in machine.order.marks["tags"]}
    known |= {f"shoal-{name}": value for name, value in changed.items()}
    return [{"key": key, "value": value} for key, value in known.items()]
