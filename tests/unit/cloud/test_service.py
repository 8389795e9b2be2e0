"""The whole service over a real socket: what Slurm requests is rented, joined, used and released."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.support.cases import cases
from tests.unit.cloud.scene import CASES, Scene, choice, rented_set, scene, with_scene

from shoal.cloud.providers.api import PERMANENT_TOKEN, FailureKind
from shoal.cloud.rental import cost, micros
from shoal.cloud.service.context import REJECTED_OFFER_BLOCK_S, UNFIT_PREFIX
from shoal.cloud.service.provider_account import LOST_ORDER_SEARCH_S
from shoal.cloud.service.slurm_requests import PowerRequest
from shoal.spec.rental import Budget

WEST, EAST = choice(CASES["lambda"]), choice(CASES["lambda"], region="us-east-1")


async def test_job_starts_its_nodes_and_they_are_released_afterwards(it: Scene) -> None:
    job = await it.run_job(2)
    assert len(it.machines()) == 2
    assert {one.state for one in it.rentals()} == {"joined"}
    assert {one.jobs for one in it.rentals()} == {("1",)}
    assert job.comments == ["trying lambda us-west-1", "rented from lambda us-west-1"]
    await it.settled()
    assert (job.state, job.restarts) == ("COMPLETED", 0)
    assert {one.state for one in it.rentals()} == {"gone"}
    assert len(it.market().bill()) == 2


async def test_billed_time_in_the_ledger_matches_the_provider(it: Scene) -> None:
    it.slurm.submit("1", 2)
    await it.settled()
    billed = {one["id"]: one["seconds"] for one in it.market().bill()}
    ours = {
        one.id: one.billing.seconds((one.billed_until or 0) - (one.billed_from or one.made_at or 0))
        for one in it.rentals()
    }
    assert ours.keys() == billed.keys()
    assert all(abs(ours[name] - billed[name]) <= 60 for name in ours), (ours, billed)


async def test_intent_is_in_the_ledger_before_the_order(it: Scene) -> None:
    seen: list[list[str]] = []
    order = it.market().order
    it.market().order = lambda wanted, id: (  # type: ignore[method-assign]
        seen.append([one.state for one in it.ledger.live()]),
        order(wanted, id),
    )[1]
    await it.run_job()
    assert seen == [["intended"]]


async def test_orders_respect_the_rate_limit_of_the_provider(it: Scene) -> None:
    _paced(it)
    it.slurm.submit("1", 4)
    await it.until(lambda: len(it.market().bill()) == 4, every=1.0)
    ordered = sorted(one["ordered"] for one in it.market().bill())
    assert all(later - earlier >= 12 for earlier, later in pairwise(ordered)), ordered


# ---- failover


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, EAST),))
async def test_stockout_moves_to_the_next_offer_for_the_same_job(it: Scene) -> None:
    it.fault("stockout", -1, region="us-west-1")
    job = await it.run_job(2)
    assert job.restarts == 0
    assert {one["region"] for one in it.market().bill()} == {"us-east-1"}
    assert any("lambda us-west-1 out of gpu_1x_a10, trying lambda us-east-1" in text for text in job.comments)
    await it.settled()


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, EAST),))
async def test_stockout_is_remembered_for_the_next_job(it: Scene) -> None:
    it.fault("stockout", 1, region="us-west-1")
    await it.run_job()
    it.slurm.submit("2", 1)
    await it.until(lambda: len(it.market().bill()) == 2)
    assert [one["region"] for one in it.market().bill()] == ["us-east-1", "us-east-1"]


@with_scene("lambda", sets=(rented_set("burst", 8, WEST, EAST),))
async def test_gang_gets_a_single_region_and_a_partial_gang_is_released(it: Scene) -> None:
    _paced(it)
    it.slurm.submit("1", 4, seconds=600)
    await it.until(lambda: len(it.machines()) == 2, every=1.0)
    it.fault("stockout", -1, region="us-west-1")
    await it.runs("1")
    assert {machine.order.region for machine in it.machines()} == {"us-east-1"}
    assert len(it.machines()) == 4
    assert {one.reason for one in it.rentals("gone")} == {
        "the job's nodes must be in one place: lambda us-west-1 out of gpu_1x_a10"
    }
    await it.settled()


async def test_job_waits_with_the_reason_when_no_offer_remains(it: Scene) -> None:
    it.fault("stockout", -1)
    job = it.slurm.submit("1", 2)
    await it.until(lambda: job.restarts == 1)
    assert job.comment.startswith("lambda us-west-1 out of gpu_1x_a10; next try at ")
    node = it.slurm.node_by_name["burst1"]
    assert node.base == "DOWN"
    assert node.reason.startswith("shoal: lambda us-west-1 out of gpu_1x_a10")
    assert it.market().bill() == []
    it.market().faults.clear()
    await it.settled(job)


async def test_two_failed_gangs_leave_no_machine(it: Scene) -> None:
    _paced(it)
    it.slurm.submit("1", 4)
    it.slurm.submit("2", 4)
    await it.until(lambda: len(it.machines()) >= 3, every=1.0)
    it.fault("stockout", -1)
    await it.passes(900)
    assert it.machines() == []
    it.market().faults.clear()
    await it.settled()
    assert {job.state for job in it.slurm.job_by_id.values()} == {"COMPLETED"}


@cases("kind", "quota", "balance", "auth")
async def test_account_problem_is_shown_on_the_job(tmp_path: Path, kind: str) -> None:
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


async def test_account_without_balance_is_retried_after_an_hour(it: Scene) -> None:
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


async def test_rate_limited_order_is_retried_later(it: Scene) -> None:
    it.fault("rate", 6)
    job = await it.run_job(2)
    assert job.restarts == 0
    assert len(it.market().bill()) == 2


# ---- answers that get lost


async def test_create_with_a_lost_answer_is_searched_and_not_repeated(it: Scene) -> None:
    it.fault("error-after-create")
    job = await it.run_job(2)
    assert job.restarts == 0
    assert len(it.market().bill()) == 2
    assert len({one["name"] for one in it.market().bill()}) == 2


async def test_failed_create_is_repeated_only_after_the_search(it: Scene) -> None:
    it.fault("error-before-create")
    it.slurm.submit("1", 1)
    begun = it.clock.now()
    await it.until(lambda: len(it.market().bill()) == 1)
    assert it.market().bill()[0]["ordered"] - begun >= LOST_ORDER_SEARCH_S
    assert [one.trouble for one in it.rentals("failed")] == [FailureKind.AMBIGUOUS.value]


async def test_order_stays_open_while_the_list_fails_after_a_lost_answer(it: Scene) -> None:
    it.fault("error-after-create")
    it.slurm.submit("1", 1)
    await it.until(lambda: len(it.market().bill()) == 1)
    it.fault("list-fails", -1)
    await it.passes(600)
    assert [one.state for one in it.ledger.live()] == ["intended"]
    assert len(it.market().bill()) == 1
    it.market().faults.clear()
    await it.runs("1")
    assert len(it.market().bill()) == 1


async def test_lagging_list_causes_no_second_order(it: Scene) -> None:
    it.fault("lagging-list", 2, seconds=200)
    await it.run_job(2)
    assert len(it.market().bill()) == 2


async def test_machine_that_appears_too_late_is_released(it: Scene) -> None:
    it.fault("error-after-create")
    it.fault("lagging-list", seconds=400)
    job = await it.run_job()
    await it.passes(500)
    assert len(it.market().bill()) == 2
    await it.settled(job)
    assert len(it.rentals("gone")) == 2


# ---- machines that are no good


@cases(
    "fault, why",
    ("never-reachable", "is not a node after 1800 s: 192.0.2.1 does not answer"),
    ("bad-gpu", "CUDA error 802"),
)
@with_scene("lambda", sets=(rented_set("burst", 4, WEST, EAST),))
async def test_unusable_machine_is_released_and_another_region_tried(it: Scene, fault: str, why: str) -> None:
    it.slurm.resume_timeout = 7200
    it.fault(fault)
    job = await it.run_job()
    assert job.restarts == 0
    [bad] = it.rentals("gone")
    assert why in bad.reason
    assert [one["region"] for one in it.market().bill()] == ["us-west-1", "us-east-1"]


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, EAST),))
async def test_bad_machine_of_a_gang_is_replaced_in_the_same_region(it: Scene) -> None:
    _paced(it)
    it.slurm.submit("1", 3, seconds=600)
    await it.until(lambda: len(it.machines()) == 2, every=1.0)
    it.fault("bad-gpu")
    await it.runs("1")
    assert {machine.order.region for machine in it.machines()} == {"us-west-1"}
    assert len(it.market().bill()) == 4
    await it.settled()


async def test_dead_machine_is_replaced_and_its_job_continues(it: Scene) -> None:
    job = await it.run_job(2, seconds=1200)
    it.market().kill(it.machines()[0].id)
    await it.until(lambda: job.restarts == 1)
    await it.runs("1")
    [why] = it.slurm.node_by_name["burst1"].reasons
    assert "is unhealthy" in why
    await it.settled(job)


@with_scene("lambda", budget=Budget(per_hour=2 * 1.29))
async def test_replaced_machine_frees_its_budget_for_the_replacement(it: Scene) -> None:
    _paced(it)
    job, later = it.slurm.submit("1", 2), it.slurm.submit("2", 2)
    await it.until(lambda: len(it.machines()) == 1, every=1.0)
    it.fault("bad-gpu")
    await it.runs("1")
    assert (job.restarts, len(it.market().bill())) == (0, 3)
    assert later.comments[0].startswith("the budget of $2.58 an hour")
    await it.settled()


@cases("restarted", False, True)
@with_scene("lambda", budget=Budget(per_hour=2 * 1.29))
async def test_node_refused_by_the_budget_is_retried_as_soon_as_money_is_there(it: Scene, restarted: bool) -> None:
    first, later = it.slurm.submit("1", 2, seconds=100_000.0), it.slurm.submit("2", 1)
    await it.runs("1")
    await it.until(lambda: any("DOWN" in it.slurm.state(node) for node in it.slurm.node_by_name))
    [node] = [name for name in it.slurm.node_by_name if "DOWN" in it.slurm.state(name)]
    assert later.comment.startswith("the budget of $2.58 an hour: $2.58 is in use")
    await it.passes(60.0)
    assert "DOWN" in it.slurm.state(node), "no money, so it is not tried again and again"
    if restarted:
        it.service = it.restart()
        it.service.context.budget = Budget(per_hour=10.0)
    else:
        it.slurm.cancel(first.id)
    await it.until(lambda: "DOWN" not in it.slurm.state(node) or later.state == "RUNNING", seconds=180.0)
    await it.until(lambda: later.state in ("RUNNING", "COMPLETED"), seconds=420.0)
    it.slurm.cancel(first.id)
    await it.settled()


async def test_failed_join_is_shown_on_the_job_while_it_is_retried(it: Scene) -> None:
    problem = "service slurmd: slurmd started and did not stay up\nslurmd: debug\nslurmd: fatal: no cgroup plugin\n"
    it.joiner.judge = lambda machine: problem
    job = it.slurm.submit("1", 1)
    await it.until(lambda: "has not joined yet" in job.comment, seconds=600.0)
    assert job.comment.startswith("trying lambda ") and job.comment.endswith(
        " has not joined yet: service slurmd: slurmd started and did not stay up: no cgroup plugin"
    )
    it.joiner.judge = lambda machine: ""
    await it.runs("1")
    await it.step()
    assert job.comment.startswith("rented from lambda "), "a running job shows no old error"
    await it.settled()


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, EAST),), budget=Budget(per_hour=2 * 1.29))
async def test_machine_in_a_place_without_more_ends_before_the_budget_allows_the_next_place(it: Scene) -> None:
    _paced(it)
    job = it.slurm.submit("1", 2)
    await it.until(lambda: len(it.machines()) == 1, every=1.0)
    [first] = it.machines()
    it.fault("stockout")
    await it.until(lambda: "waiting for" in job.comment, every=1.0)
    assert job.comment.startswith("lambda us-west-1 out of gpu_1x_a10; the budget of $2.58 an hour: $1.29 is in use")
    assert job.comment.endswith(f"; waiting for {first.id} of lambda to end")
    await it.until(lambda: job.state == "RUNNING", every=1.0)
    assert {one.order.region for one in it.machines()} == {"us-east-1"}
    assert job.restarts == 0
    await it.settled(job)


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, EAST, max_price=2.0),))
async def test_machine_above_max_price_is_released(it: Scene) -> None:
    it.fault("price-change", 1)
    await it.run_job()
    assert [machine.usd_hour for machine in it.machines()] == [1.29]
    assert any("above max_price" in one.reason for one in it.rentals("gone"))


async def test_price_change_applies_from_the_change(it: Scene) -> None:
    await it.run_job(seconds=9000)
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


async def test_orphan_machine_is_released_after_its_grace(it: Scene) -> None:
    await it.run_job(seconds=3000)
    [ours] = it.machines()
    stray = replace(
        ours.order, marks={**ours.order.marks, "tags": _tags(ours, token="f" * 16, epoch=str(int(it.clock.now())))}
    )
    it.market().order(stray, "stray")
    await it.passes(200)
    assert "stray" in {machine.id for machine in it.machines()}
    await it.passes(200)
    assert {machine.id for machine in it.machines()} == {ours.id}


async def test_own_controller_is_never_released(it: Scene) -> None:
    """A rented controller carries the cluster's mark and has no rental in its own ledger."""
    await it.run_job(seconds=3000)
    [ours] = it.machines()
    tags = _tags(ours, token=f"{PERMANENT_TOKEN}0123456789ab", epoch=str(int(it.clock.now())))
    it.market().order(replace(ours.order, marks={**ours.order.marks, "tags": tags}), "controller")
    await it.passes(1000)
    assert {machine.id for machine in it.machines()} == {ours.id, "controller"}


async def test_machine_without_the_shoal_tag_or_of_another_cluster_is_never_released(it: Scene) -> None:
    await it.run_job()
    [ours] = it.machines()
    it.market().order(replace(ours.order, name="somebody's", marks={**ours.order.marks, "tags": []}), "theirs")
    it.market().order(replace(ours.order, marks={**ours.order.marks, "tags": _tags(ours, cluster="atoll")}), "other")
    await it.until(lambda: it.slurm.settled and not it.ledger.live())
    await it.passes(3600, every=30)
    assert {machine.id for machine in it.machines()} == {"theirs", "other"}


async def test_second_machine_of_an_order_is_released(it: Scene) -> None:
    it.fault("duplicate-name")
    await it.run_job(seconds=600)
    await it.passes(60)
    assert len(it.market().bill()) == 2
    assert [machine.id for machine in it.machines()] == [one.id for one in it.ledger.live()]


async def test_node_without_a_machine_is_set_down_and_powered_off(it: Scene) -> None:
    it.slurm.node_by_name["burst3"].flags = ["CLOUD"]
    it.slurm.node_by_name["burst3"].since = it.clock.now()
    await it.step()
    assert it.slurm.node_by_name["burst3"].reasons[0].startswith("shoal: this node has no machine")
    await it.passes(60)
    assert it.slurm.settled


async def test_node_lost_by_slurm_is_replaced(it: Scene) -> None:
    job = await it.run_job(seconds=600)
    it.slurm.lose("burst1")
    await it.runs("1")
    assert job.restarts == 1
    await it.settled()


async def test_node_set_down_by_the_operator_is_kept(it: Scene) -> None:
    await it.run_job(seconds=600)
    await it.slurm.down(["burst1"], "ada looks into it")
    await it.passes(300)
    assert it.slurm.node_by_name["burst1"].reason == "ada looks into it"
    assert it.machines()


async def test_node_past_resume_timeout_can_be_resumed_again(it: Scene) -> None:
    it.slurm.resume_timeout = 60
    it.fault("slow-boot", 1, seconds=500)
    job = it.slurm.submit("1", 1)
    await it.until(lambda: job.restarts == 1)
    await it.step()
    assert any("did not join in time" in block.why for block in it.ledger.blocks(it.clock.now()))
    it.slurm.resume_timeout = 1800
    await it.settled(job)


@with_scene("lambda", sets=tuple(rented_set(name, 1, choice(CASES["lambda"])) for name in ("large", "small")))
async def test_machine_that_one_nodeset_rejects_may_serve_another(it: Scene) -> None:
    it.joiner.judge = lambda machine: f"{UNFIT_PREFIX}it has 4 CPUs" if machine.node.startswith("large") else ""
    rejected = it.slurm.submit("1", 1, seconds=600, among=["large1"])
    await it.until(lambda: "it has 4 CPUs" in rejected.comment)
    began = it.clock.now()
    it.slurm.submit("2", 1, seconds=600, among=["small1"])
    await it.runs("2")
    assert it.clock.now() - began < REJECTED_OFFER_BLOCK_S
    assert [rental.node for rental in it.rentals("joined")] == ["small1"]


async def test_provider_outage_costs_no_running_job(it: Scene) -> None:
    job = await it.run_job(2, seconds=5000)
    it.fault("list-fails", -1)
    await it.passes(3600, every=20)
    assert (job.state, job.restarts) == ("RUNNING", 0)
    it.market().faults.clear()
    await it.settled()
    assert (job.state, job.restarts) == ("COMPLETED", 0)


async def test_silent_slurm_changes_nothing(it: Scene) -> None:
    job = await it.run_job(2, seconds=3000)
    it.slurm.silent = True
    await it.passes_alone(100, every=20)
    assert len(it.machines()) == 2
    it.slurm.silent = False
    await it.settled()
    assert job.restarts == 0


async def test_job_cancelled_before_the_order_costs_nothing(it: Scene) -> None:
    it.slurm.submit("1", 2)
    it.slurm.tick()
    it.slurm.cancel("1")
    await it.until(lambda: it.slurm.settled)
    assert it.market().bill() == []


async def test_node_resumed_by_hand_gets_a_machine(it: Scene) -> None:
    it.slurm.node_by_name["burst1"].flags = ["CLOUD", "POWERING_UP"]
    it.slurm.node_by_name["burst1"].since = it.clock.now()
    it.slurm.requests.append(PowerRequest("resume", ("burst1",)))
    await it.until(lambda: it.slurm.state("burst1") == {"IDLE", "CLOUD"})
    assert len(it.machines()) == 1


# ---- the end of machines, and of money


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, lifetime=1800),))
async def test_end_of_lifetime_warns_the_job_and_requeues_elsewhere(it: Scene) -> None:
    job = await it.run_job(seconds=2400)
    await it.until(lambda: job.restarts == 1)
    assert job.warned == 1
    assert "its lifetime of 1800 s is over" in job.comment
    it.slurm.job_by_id["1"].seconds = 60
    await it.settled(job)


@with_scene("lambda", sets=(rented_set("burst", 4, WEST, lifetime=1800),))
async def test_no_machine_outlives_its_lifetime(it: Scene) -> None:
    await it.run_job(2, seconds=9000)
    await it.slurm.down(["burst1"], "ada looks into it")
    it.slurm.silent = True
    await it.passes_alone(100, every=30)
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


@with_scene("gcp")
async def test_node_whose_registration_slurmctld_lost_registers_again(it: Scene) -> None:
    it.slurm.submit("1", 1, seconds=7200)
    await it.until(lambda: bool(it.rentals("joined")))
    await it.passes(60)
    [rental] = it.rentals("joined")
    it.slurm.forget_registration(rental.node)
    await it.passes(20, every=2)
    assert "POWERING_UP" in it.slurm.state(rental.node), "a moment of it is usual"
    await it.passes(60, every=2)
    assert "POWERING_UP" not in it.slurm.state(rental.node)
    assert [one.id for one in it.rentals("joined")] == [rental.id], "the machine stays"


async def test_node_gets_the_features_back_that_its_last_machine_lacked(it: Scene) -> None:
    for node in it.slurm.node_by_name.values():
        node.features = node.declared_features = ["burst", "images"]
    it.slurm.submit("1", 1, seconds=60)
    await it.until(lambda: it.slurm.job_by_id["1"].state == "RUNNING")
    await it.slurm.keep_features(["burst1"], ["burst"])  # what its join does
    await it.passes(30)
    assert it.slurm.node_by_name["burst1"].features == ["burst"]
    await it.until(lambda: it.slurm.settled and not it.ledger.live())
    await it.step()
    assert it.slurm.node_by_name["burst1"].features == ["burst", "images"]
