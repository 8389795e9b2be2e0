"""Rented hosts are in the ledger: budgets count them, and `shoal cost` shows them."""

import json
from dataclasses import replace

from tests.contract.rental_providers import CASES, PUBLIC_KEY
from tests.support.fake_world import spec_of
from tests.unit.cloud.scene import CLUSTER, Scene, with_scene

from shoal.cloud.providers.api import PERMANENT_TOKEN, Offer, RentalOrder
from shoal.cloud.providers.capabilities import KeepsMachines
from shoal.cloud.rental import dollars, micros
from shoal.cloud.service.budget import Purchase, refusal
from shoal.cloud.service.costs import summary
from shoal.cloud.service.host_costs import HostPrices, host_prices
from shoal.spec.member import Placement
from shoal.spec.model import Spec
from shoal.spec.rental import Budget
from shoal.spec.rented_hosts import place_hosts

PRICE = 0.5
RENTED = """
cluster: reef
network: wireguard
controller: {provider: gcp, type: e2-standard-2, zone: us-central1-a, usd_hour: 0.5}
login: {provider: gcp, type: e2-standard-2, zone: us-central1-a, usd_hour: 0.25, count: 2}
nodesets: {lab: {hosts: [n1]}}
providers: {gcp: {key: env:PATH, project: p}}
"""
TOKEN = f"{PERMANENT_TOKEN}000000000001"


async def rent_controller(it: Scene, price: float | None = PRICE) -> str:
    """A controller at Google, as `shoal up` rents it; its id."""
    it.context.host_prices = HostPrices({"controller": price} if price is not None else {}, {"gcp": "gcp"})
    offer = Offer("gcp", "e2-standard-2", "us-central1", "us-central1-a")
    order = RentalOrder(CLUSTER, "controller", TOKEN, offer, PUBLIC_KEY, disk_gb=50, permanent=True)
    [outcome] = await it.context.accounts["gcp"].provider.create([order])
    assert outcome.ok, outcome
    return outcome.id


def spent(it: Scene) -> float:
    return dollars(summary(it.ledger.all(), (), it.clock.now()).hosts.get("controller", 0))


@with_scene("gcp")
async def test_time_of_a_host_is_recorded_from_start_to_stop(it: Scene) -> None:
    id = await rent_controller(it)
    await it.passes(3600, every=60)
    assert abs(spent(it) - PRICE) < 0.02
    [host] = it.ledger.hosts()
    assert (host.node, host.state, host.nodeset, host.offer.type) == ("controller", "joined", "", "e2-standard-2")
    assert it.ledger.live() == [], "it is no rental of a node"
    assert not any(machine.ended for machine in it.machines())

    [machine] = [one for one in it.machines() if one.order.name == id]
    it.market().stop(machine.id)
    await it.passes(120)
    before = spent(it)
    await it.passes(36000, every=600)
    assert spent(it) == before, "a stopped machine costs nothing"
    it.market().start(machine.id)
    await it.passes(3600, every=60)
    assert abs(spent(it) - before - PRICE) < 0.05
    assert [host.state for host in it.ledger.hosts()] == ["gone", "joined"]


@with_scene("gcp")
async def test_time_in_which_the_service_was_off_is_not_counted_where_the_provider_tells(it: Scene) -> None:
    id = await rent_controller(it)
    await it.passes(600, every=60)
    before = spent(it)
    [machine] = [one for one in it.machines() if one.order.name == id]
    it.market().stop(machine.id)
    it.clock.advance(100_000)  # with the controller, its service is off
    it.market().start(machine.id)
    it.service = it.restart()
    it.service.context.host_prices = it.context.host_prices
    await it.passes(600, every=60)
    assert spent(it) < before + PRICE / 3
    report = summary(it.ledger.all(), (), it.clock.now())
    assert (report.machines, report.per_hour) == (1, micros(PRICE))
    assert report.idle == report.starting == 0, "no job is charged for it"


@with_scene("gcp")
async def test_budget_counts_the_host(it: Scene) -> None:
    await rent_controller(it)
    await it.passes(120)
    purchase = Purchase("burst", replace(CASES["gcp"].offer, usd_hour=1.0), 1)
    rentals, now = it.ledger.all(), it.clock.now()
    assert refusal(purchase, Budget(per_hour=1.6), {}, rentals, now) is None
    why = refusal(purchase, Budget(per_hour=1.4), {}, rentals, now)
    assert why is not None and "$0.50 is in use" in why
    assert refusal(purchase, Budget(), {"burst": Budget(per_hour=1.4)}, rentals, now) is None


@with_scene("gcp")
async def test_host_without_a_price_is_named_and_not_free(it: Scene) -> None:
    await rent_controller(it, None)
    await it.passes(120)
    assert summary(it.ledger.all(), (), it.clock.now()).unpriced == ("controller",)


@with_scene("gcp")
async def test_released_host_costs_no_more_and_the_ledger_keeps_what_it_cost(it: Scene) -> None:
    await rent_controller(it)
    await it.passes(1800, every=60)
    provider = it.context.accounts["gcp"].provider
    assert isinstance(provider, KeepsMachines)
    await provider.delete(await provider.instances(CLUSTER))
    await it.passes(300)
    before = spent(it)
    await it.passes(7200, every=600)
    assert spent(it) == before > 0
    [host] = it.ledger.hosts()
    assert host.state == "gone"


def test_prices_of_the_file_reach_the_service_once_the_hosts_are_in_place() -> None:
    spec = spec_of(RENTED)
    places = {name: Placement(f"10.0.0.{at}", "ubuntu") for at, name in enumerate(("controller", "login1", "login2"))}
    written = place_hosts(spec, places).model_dump_json(exclude_defaults=True, by_alias=True)
    prices = {"controller": 0.5, "login1": 0.25, "login2": 0.25}
    assert host_prices(spec).by_name == host_prices(Spec.model_validate(json.loads(written))).by_name == prices
