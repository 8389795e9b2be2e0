"""Behaviour specific to Paperspace; the contract tests cover what all providers share."""

import subprocess
import time
from dataclasses import replace
from typing import Any

import pytest
from tests.contract.rental_providers import BAD_ANSWERS, CASES, CLUSTER, PUBLIC_KEY, Trial, renting, saying
from tests.support.cases import cases

from shoal.cloud.providers import paperspace
from shoal.cloud.providers.api import FailureKind, Offer, Query, RentalOrder

CASE = CASES["paperspace"]
ORDER = RentalOrder("reef", "gpu1", "t0ken1", CASE.offer, PUBLIC_KEY, user_data="#!/bin/sh\necho 'it''s me'\n")


def scripts(it: Trial) -> list[str]:
    return [script["name"] for script in it.market.notes.get("scripts", {}).values()]


# Names and words


def test_name_contains_cluster_node_token_and_time() -> None:
    assert paperspace.read_name("c-my-reef--gpu-1--1800000000-ab12") == ("my-reef", "gpu-1", "ab12", 1800000000.0)


@cases("name", "", "my machine", "c-reef", "c-reef--gpu1", "c-reef--gpu1--then-ab12", "c---1-a")
def test_foreign_name_is_ignored(name: str) -> None:
    assert paperspace.read_name(name) == ("", "", "", None)


async def test_foreign_machine_is_not_listed(it: Trial) -> None:
    await it.create()
    for machine in it.market.instances.values():
        machine.order = replace(machine.order, name="my own machine")
    assert await it.listed() == []


async def test_field_that_breaks_the_name_is_rejected_before_any_request(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(ORDER, node="gpu--1")])
    assert (outcome.failure, outcome.message) == (
        FailureKind.INVALID,
        "gpu--1: two hyphens in a row separate the fields of the name",
    )
    assert it.simulation.requests == []


@cases("written, code", ("NY2", "NY2"), ("East Coast (NY2)", "NY2"), ("Mars", "Mars"))
def test_region_has_two_spellings(written: str, code: str) -> None:
    assert paperspace.code_of(written) == code


@cases(
    "type_, template",
    ("H100", "tilqt47t"),
    ("H100x8", "t7vp562h"),
    ("A100-80G", "tqqsxr6b"),
    ("A100-80Gx8", "tvimtol9"),
    ("A4000", "twnlo3zj"),
    ("C5", "t0nspur5"),
)
def test_template_fits_the_gpu(type_: str, template: str) -> None:
    assert paperspace.template_of(Offer("p", type_, "NY2")) == template


# What is ordered


def test_order_requests_no_password_mail_and_no_snapshot() -> None:
    order = replace(ORDER, disk_gb=120)
    assert paperspace.machine_order(order, "a name", "ss1", "twnlo3zj") == {
        "name": "a name",
        "machineType": "A4000",
        "templateId": "twnlo3zj",
        "region": "East Coast (NY2)",
        "diskSize": 250,
        "publicIpType": "dynamic",
        "startupScriptId": "ss1",
        "startOnCreate": True,
        "emailPassword": False,
        "takeInitialSnapshot": False,
    }


async def test_settings_choose_network_and_template_and_an_order_overrides(it: Trial) -> None:
    async with renting(CASE, it.url, network="n1", template="tmine123") as own:
        assert (await own.create([ORDER]))[0].failure is FailureKind.INVALID  # the simulator has no such template
        assert (await own.create([replace(ORDER, image="twnlo3zj")]))[0].ok
    assert [one.order.marks["networkId"] for one in it.market.instances.values()] == ["n1"]


async def test_template_is_chosen_by_its_label(it: Trial) -> None:
    assert (await it.renter.create([replace(ORDER, image="ubuntu 22.04")]))[0].ok
    [outcome] = await it.renter.create([replace(ORDER, image="Ubuntu 24.04")])
    assert outcome.failure is FailureKind.INVALID
    assert outcome.message.startswith(
        "acme: no template for A4000 is labelled 'Ubuntu 24.04'; there are: Ubuntu 22.04 "
    )
    assert scripts(it) == [name for name in scripts(it) if name.endswith("-t0ken1")][:1]  # none is left of the second


def test_paperspace_ends_the_machine_at_its_lifetime() -> None:
    found = paperspace.machine_order(replace(ORDER, lifetime=5400), "a name", "ss1", "t1")
    assert (found["autoShutdownEnabled"], found["autoShutdownTimeout"]) == (True, 2)


@cases("type_, nvlink", ("H100x8", True), ("A100-80Gx8", True), ("H100", None))
def test_nvlink_is_asked_for_where_there_is_one(type_: str, nvlink: bool | None) -> None:
    order = replace(ORDER, offer=replace(ORDER.offer, type=type_))
    assert paperspace.machine_order(order, "a name", "ss1", "t1").get("enableNvlink") is nvlink


def test_startup_script_is_valid_shell_and_contains_key_and_script(tmp_path: Any) -> None:
    text = paperspace.startup_script(ORDER)
    assert f"'{PUBLIC_KEY}' >> /home/paperspace/.ssh/authorized_keys" in text
    own = text.replace("/home/paperspace", str(tmp_path)).replace("-o paperspace -g paperspace", "")
    own = own.replace("chown paperspace:paperspace", "true")
    ran = subprocess.run(["sh", "-e"], input=own, capture_output=True, text=True, check=True)
    assert ran.stdout == "its me\n"
    assert (tmp_path / ".ssh/authorized_keys").read_text() == PUBLIC_KEY + "\n"


# Scripts come and go with machines


async def test_startup_script_is_deleted_with_its_machine(it: Trial) -> None:
    await it.create("gpu1", "t1")
    await it.create("gpu2", "t2")
    assert len(scripts(it)) == 2
    assert next(one.order.user_data for one in it.market.instances.values()).startswith("#!/bin/sh\ninstall")
    first = [one for one in await it.listed() if one.token == "t1"]
    assert (await it.renter.delete(first))[0].ok
    assert [paperspace.read_name(name)[2] for name in scripts(it)] == ["t2"]


@cases("fault", "stockout", "quota", "balance")
async def test_rejected_order_leaves_no_startup_script(it: Trial, fault: str) -> None:
    it.fault(fault)
    assert not (await it.create()).ok
    assert scripts(it) == []


async def test_startup_script_of_a_possible_machine_stays_until_old(it: Trial) -> None:
    it.fault("error-before-create")
    assert (await it.create("gpu1", "t1")).failure is FailureKind.AMBIGUOUS
    await it.create("gpu2", "t2")
    assert (await it.renter.delete(await it.listed()))[0].ok
    assert [paperspace.read_name(name)[2] for name in scripts(it)] == ["t1"]
    for script in it.market.notes["scripts"].values():
        script["name"] = f"c-{CLUSTER}--gpu1--{int(time.time() - paperspace.SCRIPT_GRACE_S - 1)}-t1"
    await it.create("gpu3", "t3")
    await it.renter.delete(await it.listed())
    assert scripts(it) == []


async def test_startup_scripts_of_other_clusters_are_kept(it: Trial) -> None:
    await it.create(cluster="lagoon")
    it.market.notes["scripts"]["x"] = {**next(iter(it.market.notes["scripts"].values())), "id": "x", "name": "mine"}
    await it.create()
    await it.renter.delete(await it.listed())
    assert sorted(name[:9] for name in scripts(it)) == ["c-lagoon-", "mine"]


async def test_delete_succeeds_although_script_cleanup_fails(it: Trial) -> None:
    await it.create()
    it.boot()
    found = await it.listed()
    it.fault("list-fails")
    assert (await it.renter.delete(found))[0].ok
    assert len(scripts(it)) == 1


# Events


@cases(
    "change, message, left",
    ({"state": "error", "error": "Hypervisor says no"}, "acme: Hypervisor says no", False),
    ({"state": None}, "the answer lacks state", True),
    ids=["it fails for an unknown reason", "it cannot be read"],
)
async def test_order_with_an_unclear_event_is_ambiguous(
    it: Trial, change: dict[str, Any], message: str, left: bool
) -> None:
    it.simulation.rewrite = lambda line, data: {**data, **change} if "/machine-events/" in line else data
    outcome = await it.create()
    assert outcome.failure is FailureKind.AMBIGUOUS and outcome.message.endswith(message)
    assert any(machine.live for machine in it.market.instances.values()) is left


async def test_slow_order_counts_as_accepted(it: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paperspace, "FOLLOW_TIMEOUT_S", 0.2)
    it.simulation.rewrite = lambda line, data: {**data, "state": "new"} if "/machine-events/" in line else data
    assert (await it.create()).ok


async def test_machine_that_fails_later_is_in_error_with_the_message(it: Trial) -> None:
    await it.create("gpu1", "t1")
    await it.create("gpu2", "t2")
    event = next(iter(it.market.notes["events"].values()))
    event["fails"] = "We are currently out of capacity"
    found = {one.token: one for one in await it.listed()}
    assert (found["t1"].state, found["t1"].raw_state) == ("error", "provisioning: We are currently out of capacity")
    assert found["t2"].state == "pending"


async def test_events_are_read_only_while_a_machine_is_created(it: Trial) -> None:
    await it.create()
    it.boot()
    await it.listed()
    before = len(it.simulation.requests)
    await it.listed()
    assert [line["path"] for line in it.simulation.requests[before:]] == ["/v1/machines"]


async def test_all_pages_are_read(it: Trial, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paperspace, "PAGE", 2)
    for count in range(5):
        await it.create(f"gpu{count}", f"t{count}")
    assert {one.token for one in await it.listed()} == {"t0", "t1", "t2", "t3", "t4"}
    await it.renter.delete(await it.listed())
    assert scripts(it) == []


# Offers


async def test_offers_come_from_the_price_table_with_current_availability(it: Trial) -> None:
    full = it.market.types["H100"]
    it.market.types["H100"] = replace(full, places={**full.places, "Europe (AMS1)": 0})
    found = await it.renter.offers(Query(types=("H100",), regions=("Europe (AMS1)", "NY2")))
    assert [(one.region, one.available, one.usd_hour, one.gpus) for one in found] == [
        ("Europe (AMS1)", "no", 5.95, 1),
        ("NY2", "yes", 5.95, 1),
    ]
    assert {one.as_of for one in found} == {"2026-08-22"}
    assert await it.renter.offers(Query(market="spot")) == []
    assert await it.renter.offers(Query(regions=("us-west-1",))) == []


@cases("written", "NY2", "East Coast (NY2)")
async def test_region_can_be_ordered_under_both_names(it: Trial, written: str) -> None:
    """The names in a nodeset are compared with those of the offers, letter by letter."""
    [offer] = await it.renter.offers(Query(types=("A4000",), regions=(written,)))
    assert offer.region == written
    assert (await it.renter.create([replace(ORDER, offer=offer)]))[0].ok
    assert [one.region for one in await it.listed()] == ["NY2"]


async def test_released_machine_is_not_a_preempted_machine(it: Trial) -> None:
    await it.create()
    it.boot()
    await it.renter.delete(await it.listed())
    assert [(one.state, one.ending) for one in await it.listed()] == [("stopping", False)]


@cases("answer", "empty object", "bad gateway", "cut off", "no answer")
async def test_failed_script_upload_orders_no_machine(it: Trial, answer: str) -> None:
    async with saying(BAD_ANSWERS[answer], r"POST /v1/startup-scripts", it.url) as url, renting(CASE, url) as bad:
        [outcome] = await bad.create([ORDER])
    assert outcome.failure is FailureKind.TRANSIENT, outcome
    assert it.made == 0
