"""Of two rental services of one cluster the later is the leader, and the earlier changes nothing."""

import subprocess
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

from tests.support.cases import cases
from tests.unit.cloud.scene import CASES, CLUSTER, Scene, with_scene

from shoal.cloud.providers.api import RentalOrder
from shoal.cloud.service.leader import Leadership
from shoal.cloud.service.provider_account import AccountClient
from shoal.remote import program_text, shell_command

EARLIER, LATER = 0x6A000000, 0x6A000001


async def order(it: Scene, since: int, node: str = "burst1") -> str:
    """A machine that another service has ordered; its id."""
    account = it.context.accounts["lambda"]
    case = CASES["lambda"]
    key = await account.provider.ensure_key(CLUSTER, it.context.public_key)
    token = Leadership(since).token()
    [made] = await account.provider.create([RentalOrder(CLUSTER, node, token, case.offer, it.context.public_key, key)])
    assert made.ok
    return made.id


def in_charge(it: Scene, since: int, mark: Path) -> None:
    """A service that begins now, over the same ledger."""
    it.service = it.restart()
    it.context = it.service.context
    it.context.leadership = Leadership(since, mark)


@with_scene("lambda")
async def test_superseded_service_orders_and_deletes_nothing(it: Scene, tmp_path: Path) -> None:
    mark = tmp_path / "succeeded"
    in_charge(it, EARLIER, mark)
    it.slurm.submit("1", 1, seconds=100_000.0)
    await it.until(lambda: bool(it.rentals("joined")))
    [mine] = [machine.id for machine in it.machines()]
    theirs = await order(it, LATER)
    await it.until(lambda: bool(it.context.leadership.superseded))
    it.slurm.submit("2", 1)
    it.slurm.cancel("1")
    await it.passes(7200.0)
    assert {machine.id for machine in it.machines()} == {mine, theirs}
    assert it.context.leadership.superseded == (
        f"{theirs} of lambda was rented by a later service of this cluster; this one changes nothing until "
        "`shoal up` makes it the leader"
    )


async def test_superseded_service_stays_superseded_after_a_restart(it: Scene, tmp_path: Path) -> None:
    mark = tmp_path / "succeeded"
    in_charge(it, EARLIER, mark)
    await order(it, LATER)
    await it.step()
    it.market().instances.clear()
    in_charge(it, EARLIER, mark)
    it.slurm.submit("1", 1)
    await it.passes(600.0)
    assert it.context.leadership.superseded and it.machines() == [] and it.rentals() == []


async def test_leader_releases_machines_of_the_earlier_service(it: Scene, tmp_path: Path) -> None:
    in_charge(it, LATER, tmp_path / "succeeded")
    await order(it, EARLIER)
    await it.until(lambda: not it.machines())
    assert not it.context.leadership.superseded


async def test_own_machines_do_not_supersede_after_a_lost_ledger(it: Scene, tmp_path: Path) -> None:
    in_charge(it, LATER, tmp_path / "succeeded")
    await order(it, LATER)
    it.slurm.submit("1", 1)
    await it.until(lambda: it.slurm.settled and not it.machines())
    assert not it.context.leadership.superseded


async def test_reinstated_service_is_the_leader(it: Scene, tmp_path: Path) -> None:
    in_charge(it, EARLIER, tmp_path / "succeeded")
    await order(it, LATER)
    await it.step()
    assert it.context.leadership.superseded
    (tmp_path / "succeeded").unlink()
    in_charge(it, LATER + 1, tmp_path / "succeeded")
    await it.until(lambda: not it.machines())
    assert not it.context.leadership.superseded


@with_scene("lambda", "runpod")
async def test_nothing_is_ordered_before_the_first_list_of_an_account(it: Scene, tmp_path: Path) -> None:
    in_charge(it, EARLIER, tmp_path / "succeeded")
    it.fault("list-fails", -1, at="lambda")
    it.slurm.submit("1", 1, seconds=100_000.0)
    await it.until(lambda: bool(it.rentals("joined")))
    assert it.machines("lambda") == [] and len(it.machines("runpod")) == 1
    assert {one.account for one in it.rentals()} == {"runpod"}


def test_tokens_are_unique_and_end_with_the_leader_time() -> None:
    tokens = {Leadership(LATER).token() for _ in range(100)}
    assert len(tokens) == 100 and all(token.endswith("x6a000001") and len(token) == 17 for token in tokens)


@cases("clock", "right", "behind")
def test_shoal_up_makes_a_leader_later_than_all_before(clock: str, tmp_path: Path) -> None:
    since, mark = tmp_path / "since", tmp_path / "succeeded"
    account = SimpleNamespace(name="lambda", listing=SimpleNamespace(instances={}))
    later = int(time.time()) + (86400 if clock == "behind" else -86400)
    account.listing.instances = {Leadership(later).token(): (SimpleNamespace(id="i-1"),)}
    since.write_text(f"{later - 10}\n")
    ended = Leadership(later - 10, mark)
    ended.check([cast(AccountClient, account)], lambda token: False)
    assert Leadership(later - 10, mark).superseded == ended.superseded != ""
    began = int(time.time())
    subprocess.run(shell_command(program_text("rental_lead.sh"), str(since), str(mark)), check=True)
    assert int(since.read_text()) == later + 1 if clock == "behind" else int(since.read_text()) >= began
    again = Leadership(int(since.read_text()), mark)
    again.check([cast(AccountClient, account)], lambda token: False)
    assert again.superseded == ""
