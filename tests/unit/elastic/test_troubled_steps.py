"""A step in which something fails: what is to go goes, no step runs beside the next, and nothing ends the service."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any

import pytest
from tests.unit.elastic.scene import Scene, scene

from shoal.elastic.fleet import all_of
from shoal.elastic.inbox import Inbox
from shoal.elastic.source import LOOK_SECONDS


async def started(it: Scene) -> None:
    it.slurm.submit("1", 1, seconds=3600)
    await it.until(lambda: it.slurm.job_by_id["1"].state == "RUNNING")
    await it.step()


async def test_machines_that_are_to_go_go_although_the_rest_of_the_step_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, "sandbox") as it:
        await started(it)
        [rental] = it.rentals("joined")
        it.fleet.release(rental, "no longer wanted")

        async def broken(*_: Any) -> None:
            raise RuntimeError("a bug of ours")

        monkeypatch.setattr(it.service._boot, "step", broken)
        with pytest.raises(RuntimeError, match="a bug of ours"):
            await it.step()
        assert it.machines() == []


async def test_a_client_that_fails_in_its_own_way_is_told_of_and_what_it_has_is_not_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, "sandbox") as it:
        await started(it)

        async def broken(cluster: str) -> None:
            raise KeyError("status")

        monkeypatch.setattr(it.fleet.sources["sandbox"].renter, "rented", broken)
        await it.passes(600)
        assert it.fleet.sources["sandbox"].problem == "its client failed: KeyError"
        assert [one.state for one in it.rentals()] == ["joined"]


async def test_one_that_fails_is_told_of_when_all_have_ended() -> None:
    ended: list[str] = []

    async def fails() -> None:
        raise ValueError("at once")

    async def takes_longer() -> None:
        await asyncio.sleep(0.01)
        ended.append("longer")

    with pytest.raises(ValueError, match="at once"):
        await all_of([fails(), takes_longer()])
    assert ended == ["longer"]


async def test_a_lost_order_is_looked_for_from_when_its_answer_was_given_up_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.fault("lagging-list", 1, seconds=60.0)
        it.fault("error-after-create")
        source = it.fleet.sources["lambda"]
        order = source.order

        async def slow(orders: Any) -> Any:
            it.clock.advance(LOOK_SECONDS - 20)
            return await order(orders)

        monkeypatch.setattr(source, "order", slow)
        await it.step()
        it.slurm.submit("1", 1)
        await it.until(lambda: it.slurm.job_by_id["1"].state == "COMPLETED", seconds=6 * 3600)
        assert len(it.market().bill()) == 1


async def test_a_machine_that_is_taken_away_while_it_boots_is_given_back_at_once(tmp_path: Path) -> None:
    async with scene(tmp_path, "lambda") as it:
        it.slurm.submit("1", 1)
        await it.until(lambda: bool(it.rentals("made")))
        [first] = it.rentals("made")
        it.market().preempt(first.id)
        await it.until(lambda: bool(it.rentals("gone")), seconds=300)
        assert it.machines() == []


def test_a_directory_among_the_requests_ends_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "trap").mkdir()
    (tmp_path / "note").write_text("{}")
    with caplog.at_level(logging.WARNING):
        assert Inbox(tmp_path).take() == []
    assert "request note makes no sense" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["trap"]
    assert not Inbox(tmp_path).waiting()
