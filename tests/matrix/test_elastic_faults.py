"""Every fault of every provider, made by its simulator; `tests/matrix/elastic` prints the outcome of each."""

from dataclasses import replace
from pathlib import Path

import pytest
from tests.contract.rental_providers import CASES
from tests.matrix.elastic_faults import FAULTS, PATTERNS, play
from tests.matrix.elastic_watch import Watch
from tests.unit.cloud.scene import CLUSTER, Scene, scene

from shoal.cloud.providers.api import RentalOrder
from shoal.cloud.service.service import RECONCILE_INTERVAL_S
from shoal_simulators.instances import KINDS, InstanceOrder

COVERS = "cloud elastic"
pytestmark = pytest.mark.matrix


@pytest.mark.parametrize("provider", CASES)
@pytest.mark.parametrize("fault", FAULTS)
async def test_provider_fault_costs_no_job_no_node_and_no_money(tmp_path: Path, fault: str, provider: str) -> None:
    assert (await play(tmp_path, provider, fault)).problems == ()


def test_every_simulator_fault_is_tested_and_has_its_reason() -> None:
    assert {"none", *KINDS} == FAULTS.keys() == PATTERNS.keys()


def _stranger(it: Scene, name: str) -> None:
    """Somebody else's machine, which the service leaves alone: here it stands for one that it forgot."""
    offer = CASES["lambda"].offer
    it.market().order(InstanceOrder(name, offer.type, offer.region), name)


async def test_watch_counts_an_orphan_machine_after_a_reconcile_and_its_grace(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        watch = Watch(it, 100.0, "lambda")
        _stranger(it, "forgotten")
        allowed = RECONCILE_INTERVAL_S + it.context.accounts["lambda"].abilities.grace_s
        await watch.passes(allowed)
        assert watch.orphan_seconds == 0
        await watch.passes(120)
        assert watch.orphan_seconds == 110
        assert watch.doubles == {"forgotten"}


async def test_watch_detects_spending_above_the_budget(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        watch = Watch(it, 2.0, "lambda")
        _stranger(it, "one")
        await watch.passes(10)
        assert watch.over == 0
        _stranger(it, "two")
        await watch.passes(10)
        assert watch.over == pytest.approx(2 * 1.29 - 2.0)


async def test_watch_detects_two_orders_for_a_node(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        watch = Watch(it, 100.0, "lambda")
        it.slurm.submit("1", 1, seconds=3600)
        await watch.until(lambda: bool(it.rentals("joined")), 3600)
        [rental] = it.rentals("joined")
        # As if the first order had been given up for lost while its machine was there.
        twice = replace(rental, token="0" * 16, id="", state="intended", intended_at=it.clock.now())
        it.ledger.intend(twice)
        account = it.context.accounts["lambda"]
        key = await account.key_name(it.context.public_key)
        order = RentalOrder(CLUSTER, twice.node, twice.token, twice.offer, it.context.public_key, key)
        [made] = await account.order([order])
        it.ledger.record_machine(twice.token, made.id, None, it.clock.now())
        watch._look()
        assert watch.doubles and watch.doubles <= {rental.id, made.id}
