"""The machines of a simulated cloud start, cost money and fail by a simulated clock."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.cloud.providers.api import Billing
from shoal_simulators import SIMULATORS, find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.instances import KINDS, Fault, InstanceOrder, MachineType, Profile, read_faults
from shoal_simulators.market import REJECTIONS, ApiRejection, Market

ORDER = InstanceOrder("reef-n1", "big", "us-1", public_keys=("ssh-ed25519 AAAA x",), marks={"tag": "t"})
TYPES = (
    MachineType("big", "H100", 8, 80, 100, 1000, 20.0, 8.0, places={"us-1": 2, "us-2": 0}),
    MachineType("small", usd_hour=0.5, places={"us-1": 5}),
)
PROFILE = Profile(boot_s=60, address_s=10, stop_s=5, notice_s=30, billing=Billing(1))


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def market(profile: Profile = PROFILE, store: Path | None = None, backend: NoHosts | None = None) -> Market:
    return Market(profile, TYPES, backend or NoHosts(), clock=Clock(), store=store)


@pytest.fixture
def it() -> Market:
    return market()


def move(it: Market, seconds: float) -> None:
    assert isinstance(it.clock, Clock)
    it.clock.now += seconds
    it.update()


def test_machine_passes_its_phases_in_order(it: Market) -> None:
    one = it.order(ORDER, "m1")
    it.update()
    assert (one.phase, one.host) == ("pending", "")
    move(it, 10)
    assert (one.phase, one.host) == ("pending", "192.0.2.1")
    move(it, 50)
    assert (one.phase, one.up) == ("up", 1060.0)
    it.delete("m1")
    assert [found.phase for found in it.list_instances()] == ["stopping"]
    move(it, 5)
    assert it.list_instances() == []
    with pytest.raises(ApiRejection, match="m1"):
        it.delete("m1")


@cases(
    "billing, seconds, usd",
    (Billing(1), 190, 190 * 20 / 3600),
    (Billing(60, from_up=True), 180, 1.0),
    (Billing(3600), 3600, 20.0),
    (Billing(1, least=600), 600, 600 * 20 / 3600),
    ids=["by the second", "by the minute from up", "by the hour", "at least ten minutes"],
)
def test_machine_cost_follows_the_billing_rule(billing: Billing, seconds: int, usd: float) -> None:
    it = market(replace(PROFILE, billing=billing))
    it.order(ORDER, "m1")
    move(it, 60)
    move(it, 130)
    it.delete("m1")
    move(it, 5000)
    [bill] = it.bill()
    assert (bill["seconds"], bill["usd"]) == (seconds, pytest.approx(usd, abs=1e-6)) and bill["ended"] == 1190.0


def test_machine_that_never_started_is_free_where_billing_starts_at_boot() -> None:
    it = market(replace(PROFILE, billing=Billing(60, from_up=True)))
    it.order(ORDER, "m1")
    it.delete("m1")
    assert [(one["started"], one["usd"]) for one in it.bill()] == [(None, 0)]


def test_bill_has_the_time_before_and_after_a_stop() -> None:
    it = market(replace(PROFILE, billing=Billing(1, from_up=True)))
    it.order(ORDER, "m1")
    move(it, 60)
    move(it, 300)
    it.stop("m1")
    move(it, 5000)
    it.start("m1")
    move(it, 0)
    move(it, 200)
    assert [one["seconds"] for one in it.bill()] == [500]


def test_capacity_of_a_region_is_limited(it: Market) -> None:
    it.order(ORDER, "m1")
    it.order(replace(ORDER, name="b"), "m2")
    with pytest.raises(ApiRejection) as caught:
        it.order(replace(ORDER, name="c"), "m3")
    assert caught.value.reason == "stockout"
    it.delete("m1")
    assert it.free("big", "us-1") == 1 and it.free("big", "us-2") == 0 and it.free("big", "nowhere") == 0


def test_fault_can_be_limited_to_a_type_or_region_or_unlimited_in_time(it: Market) -> None:
    it.faults = [Fault("stockout", -1, type="big"), Fault("quota", 2, region="us-2")]
    for _ in range(3):
        with pytest.raises(ApiRejection):
            it.order(ORDER, "m1")
    assert it.order(InstanceOrder("s", "small", "us-1"), "m2").live
    with pytest.raises(ApiRejection) as caught:
        it.order(InstanceOrder("s", "small", "us-2"), "m3")
    assert caught.value.reason == "quota" and it.take_fault("stockout") is None
    assert [fault.times for fault in it.faults] == [-1, 1]


def test_dead_machine_is_in_error_and_costs_until_deleted(it: Market) -> None:
    it.faults = [Fault("dies", seconds=7)]
    one = it.order(ORDER, "m1")
    move(it, 60)
    move(it, 6)
    assert one.phase == "up"
    move(it, 1)
    assert one.phase == "error" and it.backend.status("m1").state == "dead"
    move(it, 33)
    assert it.bill()[0]["seconds"] == 100
    it.delete("m1")
    move(it, 100)
    assert it.bill()[0]["seconds"] == 100


def test_machine_is_warned_before_preemption(it: Market) -> None:
    one = it.order(ORDER, "m1")
    move(it, 60)
    assert it.preempt("m1").takes_away == 1090.0
    move(it, 29)
    assert (one.phase, one.preempted) == ("up", True)
    move(it, 1)
    assert one.phase == "stopping"
    move(it, 5)
    assert one.phase == "gone" and it.bill()[0]["ended"] == 1090.0


def test_machine_ends_at_its_lifetime(it: Market) -> None:
    one = it.order(replace(ORDER, lifetime=100), "m1")
    move(it, 99)
    assert one.phase == "up"
    move(it, 1)
    assert one.phase == "stopping"


def test_lagging_list_shows_a_machine_late_and_too_long(it: Market) -> None:
    it.faults = [Fault("lagging-list", seconds=20)]
    it.order(ORDER, "m1")
    assert it.list_instances() == []
    with pytest.raises(ApiRejection):
        it.find("m1")
    move(it, 20)
    assert it.find("m1").id == "m1"
    it.delete("m1")
    move(it, 6)
    assert [one.phase for one in it.list_instances()] == ["gone"]
    move(it, 20)
    assert it.list_instances() == []


def test_slow_unreachable_and_broken_machines_can_be_created(it: Market) -> None:
    it.faults = [Fault("slow-boot", seconds=40), Fault("never-reachable"), Fault("bad-gpu")]
    one = it.order(ORDER, "m1")
    assert (one.boot_seconds, one.reachable, one.gpu_works) == (100.0, False, False)
    other = it.order(replace(ORDER, name="b"), "m2")
    assert (other.boot_seconds, other.reachable, other.gpu_works) == (60.0, True, True)


def test_machines_and_bill_survive_a_restart(tmp_path: Path) -> None:
    store, backend = tmp_path / "simulators" / "x.json", NoHosts()
    before = market(store=store, backend=backend)
    before.order(ORDER, "m1")
    before.order(replace(ORDER, name="b"), "m2")
    before.delete("m2")
    before.notes["keys"] = {"a": 1}
    move(before, 70)
    assert store.stat().st_mode & 0o077 == 0
    after = market(store=store, backend=backend)
    after.adopt()
    assert after.instances == before.instances and after.notes == {"keys": {"a": 1}}
    assert [one["usd"] for one in after.bill()][1] == before.bill()[1]["usd"]


def test_machine_without_its_host_is_in_error_after_a_restart(tmp_path: Path) -> None:
    class Empty(NoHosts):
        def adopt(self, ids: object) -> set[str]:
            return set()

    market(store=tmp_path / "x.json").order(ORDER, "m1")
    after = market(store=tmp_path / "x.json", backend=Empty())
    after.adopt()
    assert after.instances["m1"].phase == "error"


def test_faults_are_read_from_json() -> None:
    text = '[{"kind": "stockout", "times": -1, "region": "us-1"}, {"kind": "dies", "seconds": 3.5}]'
    assert read_faults(json.loads(text)) == [Fault("stockout", -1, region="us-1"), Fault("dies", seconds=3.5)]
    assert Fault("slow-boot").after == 600


@cases(
    "data, told",
    ({}, "faults must be a list of objects"),
    (["stockout"], "fault 0: kind must be one of stockout, quota"),
    ([{"kind": "auth"}, {"kind": "meteor"}], "fault 1: kind must be one of"),
    ([{"kind": "auth", "time": 2}], "fault 0: .*other keys are times, type, region, seconds"),
    ([{"kind": "auth", "times": "often"}], "fault 0: times must be a whole number"),
)
def test_invalid_fault_is_rejected(data: object, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        read_faults(data)


@cases("kind", *sorted(SIMULATORS))
def test_every_simulator_has_its_own_generic_errors(kind: str) -> None:
    made = find_simulator(kind)
    it = made(Market(made.profile, made.types, NoHosts()))
    reasons = [why for why in REJECTIONS if why in ("auth", "rate", "list-fails", "invalid", "not-found")]
    assert [why for why in reasons if it.error_response(why).status_code < 400] == []


def test_every_fault_kind_is_documented() -> None:
    page = (Path(__file__).parents[3] / "docs" / "adding-a-provider.md").read_text()
    assert [kind for kind in KINDS if f"`{kind}`" not in page] == []
