"""Behaviour specific to Google Compute Engine; the contract tests cover what all providers share."""

from dataclasses import replace
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, PUBLIC_KEY, Trial
from tests.support.cases import cases

from shoal.cloud.providers import gcp, google_operations, google_orders
from shoal.cloud.providers.api import FailureKind, Offer, Query, RentalOrder, RentedInstance
from shoal.cloud.providers.responses import Body
from shoal.errors import ProviderError
from shoal_simulators.instances import InstanceOrder

CASE = CASES["gcp"]
STOCKOUT, RATE = "ZONE_RESOURCE_POOL_EXHAUSTED", "RESOURCE_OPERATION_RATE_EXCEEDED"
SPOT = RentalOrder(
    "reef", "gpu1", "t0ken1", replace(CASE.offer, gpus=1), PUBLIC_KEY, user_data="#!/bin/sh\ntrue\n", lifetime=3600
)


def orders(count: int, like: RentalOrder = SPOT) -> list[RentalOrder]:
    return [replace(like, node=f"gpu{n}", token=f"tok{n}") for n in range(count)]


# What is read


def instance(**more: Any) -> Body:
    return Body(
        {
            "name": "gpu1--t0ken1",
            "status": "RUNNING",
            "zone": "https://compute.googleapis.com/compute/v1/projects/p/zones/us-central1-b",
            "machineType": "https://compute.googleapis.com/compute/v1/projects/p/zones/z/machineTypes/g2-standard-4",
            "creationTimestamp": "2026-11-15T04:00:00.000-08:00",
            "labels": {"shoal-cluster": "reef"},
            **more,
        }
    )


def test_instance_is_identified_by_name_and_label() -> None:
    interface = {"networkIP": "10.0.0.7", "accessConfigs": [{"natIP": "192.0.2.7"}]}
    found = gcp.instance_of(instance(networkInterfaces=[interface], scheduling={"provisioningModel": "SPOT"}))
    assert (found.id, found.cluster, found.node, found.token) == ("gpu1--t0ken1", "reef", "gpu1", "t0ken1")
    assert found.host == "192.0.2.7"
    assert (found.type, found.region, found.zone, found.market) == (
        "g2-standard-4",
        "us-central1",
        "us-central1-b",
        "spot",
    )
    assert found.created == 1794744000.0
    assert (found.state, found.ending) == ("up", False)


def test_internal_address_is_used_without_an_external_address() -> None:
    assert gcp.instance_of(instance(networkInterfaces=[{"networkIP": "10.0.0.7"}])).host == "10.0.0.7"


@cases("more, why", ({"labels": {}}, "without our label"), ({"name": "web-1"}, "with a name that is not ours"))
def test_instance_without_a_label_belongs_to_no_cluster(more: dict[str, Any], why: str) -> None:
    found = gcp.instance_of(instance(**more))
    assert (found.cluster, found.node, found.token) == ("", "", ""), why


@cases(
    "status, state, ending",
    ("PROVISIONING", "pending", False),
    ("STAGING", "pending", False),
    ("STOPPING", "stopping", True),
    ("TERMINATED", "stopped", False),
    ("SUSPENDED", "stopped", False),
    ("REPAIRING", "error", False),
    ("BRAND_NEW", "pending", False),
)
def test_states_are_mapped(status: str, state: str, ending: bool) -> None:
    found = gcp.instance_of(instance(status=status))
    assert (found.state, found.ending, found.raw_state) == (state, ending, status)


ABSENT = ("VM_MIN_COUNT_NOT_REACHED", "fewer than asked")
L4, ALL_GPUS = "Quota 'NVIDIA_L4_GPUS' exceeded", "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."
UNKNOWN = [("INTERNAL_ERROR", "oops"), ("NEW_ONE", "who knows")]


@cases(
    "errors, expected, scope, message",
    ([ABSENT, ("QUOTA_EXCEEDED", L4)], FailureKind.QUOTA, "region", f"QUOTA_EXCEEDED: {L4}"),
    ([("QUOTA_EXCEEDED", ALL_GPUS)], FailureKind.QUOTA, "provider", f"QUOTA_EXCEEDED: {ALL_GPUS}"),
    ([ABSENT, (f"{STOCKOUT}_WITH_DETAILS", "x")], FailureKind.CAPACITY, "offer", f"{STOCKOUT}_WITH_DETAILS: x"),
    ([ABSENT], FailureKind.CAPACITY, "offer", ": ".join(ABSENT)),
    ([(RATE, "slower")], FailureKind.RATE, "provider", f"{RATE}: slower"),
    (UNKNOWN, FailureKind.AMBIGUOUS, "offer", "INTERNAL_ERROR: oops; NEW_ONE: who knows"),
    ([], FailureKind.AMBIGUOUS, "offer", "the order is still running, or ended without an error"),
    ids=["a quota", "a quota of all regions", "stockout", "too few", "rate", "unknown errors", "no error"],
)
def test_most_specific_error_is_reported(
    errors: list[tuple[str, str]], expected: FailureKind, scope: str, message: str
) -> None:
    outcome = google_operations.outcome_of(errors)
    assert (outcome.failure, outcome.scope, outcome.message) == (expected, scope, message)


# Against the simulator


async def test_partial_stockout_keeps_the_other_machines(it: Trial) -> None:
    it.fault("stockout", times=1)
    outcomes = await it.renter.create(orders(3))
    assert [one.failure for one in outcomes].count(FailureKind.CAPACITY) == 1
    [failed] = [one for one in outcomes if not one.ok]
    assert failed.message.startswith("ZONE_RESOURCE_POOL_EXHAUSTED: The zone 'us-central1-b'")
    assert sorted(one.id for one in outcomes if one.ok) == sorted(one.id for one in await it.listed())


async def test_unlisted_machines_of_a_partial_order_are_ambiguous(it: Trial) -> None:
    it.fault("stockout")
    it.fault("lagging-list", times=1)
    outcomes = await it.renter.create(orders(3))
    assert sorted(one.failure.value if one.failure else "" for one in outcomes) == ["", "ambiguous", "ambiguous"]
    assert {one.message for one in outcomes if not one.ok} == {"2 machines were made, 1 are listed"}


async def test_invalid_name_is_rejected_and_nothing_created(it: Trial) -> None:
    good, bad = orders(2)
    outcomes = await it.renter.create([good, replace(bad, node="Gpu_1")])
    assert [one.failure for one in outcomes] == [FailureKind.INVALID, FailureKind.INVALID]
    assert "'Gpu_1--tok1'" in outcomes[1].message
    assert it.made == 0


async def test_foreign_machine_with_the_same_name_is_a_conflict(it: Trial) -> None:
    offer = SPOT.offer
    it.market.order(
        InstanceOrder("gpu0--tok0", offer.type, offer.region, offer.zone, marks={"labels": {}}), "gpu0--tok0"
    )
    assert [one.failure for one in await it.renter.create(orders(2))] == [FailureKind.CONFLICT, FailureKind.CONFLICT]
    assert it.made == 1


async def test_unreadable_operation_is_ambiguous(it: Trial) -> None:
    it.simulation.rewrite = lambda line, data: {"name": data.get("name")} if "/operations/" in line else data
    [outcome] = await it.renter.create([SPOT])
    assert outcome.failure is FailureKind.AMBIGUOUS
    assert "lacks status" in outcome.message
    assert [one.token for one in await it.listed()] == [SPOT.token]


@cases("lag, expected", (0.0, None), (600.0, FailureKind.AMBIGUOUS))
async def test_unfinished_order_counts_listed_machines_and_leaves_the_rest_ambiguous(
    it: Trial, monkeypatch: pytest.MonkeyPatch, lag: float, expected: FailureKind | None
) -> None:
    monkeypatch.setattr(google_operations, "FOLLOW_TIMEOUT_S", 0.2)
    it.simulation.rewrite = lambda line, data: _unended(data) if "/operations/" in line else data
    if lag:
        it.fault("lagging-list", seconds=lag)
    [outcome] = await it.renter.create([SPOT])
    assert outcome.failure is expected
    assert outcome.message == ("the order is still running, or ended without an error" if expected else "")


def _unended(operation: dict[str, Any]) -> dict[str, Any]:
    return {**operation, "status": "RUNNING", "instancesBulkInsertOperationMetadata": None}


async def test_failed_order_with_a_failed_list_is_ambiguous(it: Trial) -> None:
    it.fault("stockout")
    it.fault("list-fails")
    [outcome] = await it.renter.create([SPOT])
    assert outcome.failure is FailureKind.AMBIGUOUS


async def test_unreachable_zone_makes_the_list_fail(it: Trial) -> None:
    await it.renter.create([SPOT])

    def silent(line: str, data: Any) -> Any:
        data["items"]["zones/us-east1-b"] = {"warning": {"code": "UNREACHABLE", "message": "is down"}}
        return data

    it.simulation.rewrite = silent
    with pytest.raises(ProviderError, match=r"acme: .*: zones/us-east1-b did not answer: UNREACHABLE"):
        await it.listed()
    it.simulation.rewrite = None
    assert len(await it.listed()) == 1


async def test_large_order_is_a_single_call_and_listed_over_several_pages(it: Trial) -> None:
    outcomes = await it.renter.create(orders(620))
    assert all(one.ok for one in outcomes)
    listed = await it.listed()
    assert {one.id for one in listed} == {one.id for one in outcomes}
    assert len([line for line in it.simulation.requests if line["path"].endswith("/bulkInsert")]) == 1


async def test_unlisted_machine_can_be_deleted(it: Trial) -> None:
    it.fault("lagging-list", seconds=600)
    [outcome] = await it.renter.create([SPOT])
    zone = SPOT.offer.zone
    unseen = RentedInstance(outcome.id, "reef", "gpu1", "t0ken1", "pending", "", region="us-central1", zone=zone)
    assert (await it.renter.delete([unseen]))[0].ok
    assert [one["phase"] for one in it.market.bill()] == ["stopping"]


async def test_machine_ends_at_its_deadline(it: Trial) -> None:
    await it.renter.create([SPOT])
    it.boot()
    assert [one.state for one in await it.listed()] == ["up"]
    it.clock.now += SPOT.lifetime
    assert [one.state for one in await it.listed()] == ["stopping"]
    it.clock.now += it.market.profile.stop_s
    assert await it.listed() == []


async def test_preempted_spot_machine_is_listed_as_stopping_after_its_notice(it: Trial) -> None:
    await it.renter.create([SPOT])
    it.boot()
    [found] = await it.listed()
    it.market.preempt(found.id)
    assert [(one.state, one.ending) for one in await it.listed()] == [("up", False)]
    it.clock.now += google_orders.NOTICE_S
    assert [(one.state, one.ending) for one in await it.listed()] == [("stopping", True)]
    it.clock.now += it.market.profile.stop_s
    await it.listed()
    it.clock.now += it.market.profile.stop_s
    assert await it.listed() == []


async def test_offers_of_a_type_cover_zones_and_both_markets(it: Trial) -> None:
    found = await it.renter.offers(Query(types=("a3-highgpu-8g",), zones=("us-central1-a",)))
    assert [(one.market, one.usd_hour, one.gpu, one.gpus, one.gpu_memory_gb) for one in found] == [
        ("on-demand", 87.83246, "H100", 8, 80),
        ("spot", 52.6991, "H100", 8, 80),
    ]
    assert {one.as_of for one in found} == {"2026-08-22"}
    [put_in] = await it.renter.offers(
        Query(types=("n1-standard-4+nvidia-tesla-t4:1",), zones=("us-central1-a",), market="spot")
    )
    assert (put_in.type, put_in.gpu, put_in.gpus) == ("n1-standard-4+nvidia-tesla-t4:1", "T4", 1)


async def test_machine_with_attached_gpus_is_listed_with_its_ordered_type(it: Trial) -> None:
    offer = Offer("acme", "n1-standard-4+nvidia-tesla-t4:1", "us-central1", "us-central1-a")
    assert (await it.renter.create([replace(SPOT, offer=offer)]))[0].ok
    assert [one.type for one in await it.listed()] == [offer.type]
    plain = instance(machineType="https://reef.test/machineTypes/n1-standard-4", guestAccelerators=[])
    assert gcp.instance_of(plain).type == "n1-standard-4"
