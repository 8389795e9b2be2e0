"""Faults of the environment: clocks that are set back, a full disk, a Slurm that lost its nodes or is down."""

import contextlib

import pytest
from tests.unit.cloud.rentals import rental
from tests.unit.cloud.scene import CASES, CLUSTER, Scene

from shoal.cloud.providers.api import RentalOrder
from shoal.cloud.service.leader import Leadership
from shoal.cloud.service.scheduling import Clock
from shoal.errors import LedgerError

HOURS = 8 * 3600.0
"""The error of a computer whose hardware clock has local time, until the clock is corrected."""


class Ahead:
    """A clock that is wrong, until it is set."""

    def __init__(self, right: Clock) -> None:
        self._right = right
        self.by = HOURS

    def now(self) -> float:
        return self._right.now() + self.by


def ahead(it: Scene) -> Ahead:
    """The service's clock runs ahead of all others."""
    wrong = Ahead(it.clock)
    it.context.clock = wrong
    for account in it.context.accounts.values():
        account.clock = wrong
        account._began = wrong.now()
    return wrong


async def test_clock_set_back_does_not_delay_retries_for_hours(it: Scene) -> None:
    """A block, a node's reason and the pause between two orders all name times that are hours away now."""
    clock = ahead(it)
    it.fault("stockout", 1)
    job = it.slurm.submit("1", 1)
    await it.until(lambda: job.restarts == 1)
    assert it.ledger.blocks(clock.now()) != []
    clock.by = 0.0
    assert it.ledger.blocks(clock.now()) == []
    await it.until(lambda: job.state == "COMPLETED" and not it.machines(), seconds=3600)


async def test_block_set_after_the_clock_moves_back_counts(it: Scene) -> None:
    now = it.clock.now()
    it.ledger.block("lambda", "", "", "", now + HOURS, "then")
    it.ledger.block("lambda", "", "", "", now + 60, "now")
    assert [one.why for one in it.ledger.blocks(now)] == ["now"]


async def test_machines_start_and_end_while_the_clock_moves_back(it: Scene) -> None:
    clock = ahead(it)
    job = it.slurm.submit("1", 2, seconds=300)
    await it.until(lambda: job.state == "RUNNING")
    clock.by = 0.0
    await it.until(lambda: job.state == "COMPLETED" and not it.machines(), seconds=1800)
    await it.until(lambda: not it.ledger.live(), seconds=600)
    assert job.restarts == 0


async def test_order_with_a_lost_answer_is_settled_after_the_clock_moves_back(it: Scene) -> None:
    clock = ahead(it)
    it.fault("error-before-create", 1)
    job = it.slurm.submit("1", 1)
    await it.until(lambda: bool(it.rentals("intended")))
    clock.by = 0.0
    await it.until(lambda: job.state == "COMPLETED", seconds=1800)
    assert len(it.market().bill()) == 1


async def test_full_disk_stops_orders_until_space_is_free(it: Scene) -> None:
    await it.step()
    database = it.ledger._database
    pages = database.execute("PRAGMA page_count").fetchone()[0]
    database.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(LedgerError, match="full"):  # once the room in its pages is used up
        for number in range(10_000):
            with it.ledger._transaction():
                it.ledger._insert(rental(f"old{number}", "burst8", state="gone", gone_at=200.0))
    job = it.slurm.submit("1", 1)
    for _ in range(20):
        with contextlib.suppress(LedgerError):
            await it.step()
        it.clock.advance(10)
    assert it.market().bill() == []
    database.execute("PRAGMA max_page_count = 1000000")
    await it.until(lambda: job.state == "COMPLETED" and not it.machines())
    assert len(it.market().bill()) == 1


async def test_slurm_without_the_nodes_costs_no_running_job(it: Scene) -> None:
    job = it.slurm.submit("1", 2, seconds=5000)
    await it.until(lambda: job.state == "RUNNING")
    known, it.slurm.node_by_name = it.slurm.node_by_name, {}
    await it.passes_alone(60, every=10)
    assert len(it.machines()) == 2
    assert it.service._problem == "slurmctld has none of the rented nodes; run `shoal up`"
    it.slurm.node_by_name = known
    await it.until(lambda: job.state == "COMPLETED" and not it.machines())
    assert job.restarts == 0


async def test_orphan_machines_are_released_while_slurm_is_silent(it: Scene) -> None:
    account = it.context.accounts["lambda"]
    key = await account.provider.ensure_key(CLUSTER, it.context.public_key)
    order = RentalOrder(CLUSTER, "burst1", Leadership().token(), CASES["lambda"].offer, it.context.public_key, key)
    assert [made.ok for made in await account.provider.create([order])] == [True]
    it.slurm.silent = True
    await it.passes_alone(120, every=10)
    assert it.machines() == []
