"""Behaviour specific to DigitalOcean; the contract tests cover what all providers share."""

from dataclasses import replace

from tests.contract.rental_providers import CASES, CLUSTER, PUBLIC_KEY, Trial
from tests.support.cases import cases

from shoal.cloud.providers import digitalocean
from shoal.cloud.providers.api import FailureKind, Offer, Query, RentalOrder
from shoal.cloud.providers.capabilities import HasQuotas

CASE = CASES["digitalocean"]
ORDER = RentalOrder(CLUSTER, "gpu1", "t0ken1", replace(CASE.offer, gpus=1), PUBLIC_KEY, "aa:bb")


def test_order_has_marks_in_name_and_tag() -> None:
    assert digitalocean.droplet_order(ORDER, "", None) == {
        "name": "gpu1.t0ken1.reef",
        "region": "tor1",
        "size": "gpu-l40sx1-48gb",
        "image": "gpu-h100x1-base",
        "ssh_keys": ["aa:bb"],
        "tags": ["shoal-cluster:reef"],
        "monitoring": False,
        "ipv6": False,
    }


@cases("gpus, image", (0, "ubuntu-24-04-x64"), (1, "gpu-h100x1-base"), (8, "gpu-h100x8-base"))
def test_image_suits_the_number_of_gpus(gpus: int, image: str) -> None:
    order = replace(ORDER, offer=Offer("a", "t", "r", gpus=gpus))
    assert digitalocean.droplet_order(order, "", None)["image"] == image
    assert digitalocean.droplet_order(order, "123", None)["image"] == "123"
    assert digitalocean.droplet_order(replace(order, image="9"), "123", "v1")["image"] == "9"


async def test_droplets_with_and_without_gpus_are_listed(it: Trial) -> None:
    await it.create("gpu1", "t1")
    order = replace(await it.order("cpu1", "t2"), offer=Offer("acme", "s-2vcpu-4gb", "nyc2"))
    assert (await it.renter.create([order]))[0].ok
    assert sorted(one.node for one in await it.listed()) == ["cpu1", "gpu1"]


async def test_all_droplets_count_against_the_limit_of_the_account(it: Trial) -> None:
    assert isinstance(it.renter, HasQuotas)
    await it.create("gpu1", "t1")
    it.simulation.simulator.droplet_limit = 3  # type: ignore[attr-defined]
    [quota] = await it.renter.quotas(CASE.offer)
    assert (quota.name, quota.limit, quota.usage, quota.machines) == ("droplet_limit", 3, 1, 2)


async def test_foreign_droplet_is_not_listed(it: Trial) -> None:
    await it.create()
    for machine in it.market.instances.values():
        machine.order = replace(machine.order, marks={**machine.order.marks, "tags": []})
    assert await it.listed() == []


async def test_size_without_regions_and_amd_are_not_offered(it: Trial) -> None:
    types = {one.type for one in await it.renter.offers(Query())}
    assert "gpu-h100x1-80gb" in types
    assert not types & {"gpu-h200x1-141gb", "gpu-mi325x1-256gb", "s-2vcpu-4gb"}
    [none_left] = await it.renter.offers(Query(types=("gpu-h200x1-141gb",), regions=("tor1",)))
    assert (none_left.available, none_left.gpu, none_left.gpu_memory_gb) == ("no", "H200", 141)


async def test_spot_is_told_by_the_name_of_the_size(it: Trial) -> None:
    assert {one.type for one in await it.renter.offers(Query(market="spot"))} == {"gpu-b300x1-288gb-spot"}


async def test_order_whose_action_fails_is_missing_capacity(it: Trial) -> None:
    order = await it.order()
    made = it.market.order

    def lose(*arguments: object, **more: object) -> object:
        machine = made(*arguments, **more)  # type: ignore[arg-type]
        it.market.delete(machine.id)
        return machine

    it.market.order = lose  # type: ignore[assignment,method-assign]
    [outcome] = await it.renter.create([order])
    assert outcome.failure is FailureKind.CAPACITY
    assert "create action of droplet" in outcome.message


async def test_order_without_a_key_is_never_sent(it: Trial) -> None:
    [outcome] = await it.renter.create([replace(ORDER, key_name="")])
    assert outcome.failure is FailureKind.INVALID
    assert it.simulation.requests == []


async def test_delete_in_progress_counts_as_deleted(it: Trial) -> None:
    await it.create()
    it.boot()
    found = await it.listed()
    assert [one.ok for one in await it.renter.delete(found)] == [True]
    assert [one.ok for one in await it.renter.delete(found)] == [True]
