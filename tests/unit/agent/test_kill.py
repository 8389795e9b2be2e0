"""Killed at any point, the next run brings the host to the same state, restarts included."""
# ruff: noqa: ASYNC110, ASYNC240 - a test has nothing else to wait for

import asyncio
import json
import os
import random
from pathlib import Path

import pytest
from agent_place import ME, Place, here
from tests.support.cases import cases

from shoal.agent.client import AgentSession, ItemEvent
from shoal.agent.document import Block, Command, Directory, File, Item, SecretRef, to_wire
from shoal.agent.loader import COMMAND, payload

SECRET = b"s3cret" * 20


def document(folder: Path) -> tuple[Item, ...]:
    """Many small items; each reload writes down the version of the file it saw."""
    items: list[Item] = [Directory(f"{folder}/etc", **ME), Block(f"{folder}/hosts", "members", "10.0.0.1 a\n")]
    for number in range(12):
        path = f"{folder}/etc/{number}.conf"
        items.append(File(path, f"value={number}\n" * 200, **ME, mode=0o640, reloads=(f"command reload {number}",)))
        items.append(Command(f"reload {number}", ("cp", path, f"{folder}/etc/{number}.seen"), on_change=True))
    items.append(File(f"{folder}/etc/key", SecretRef("key"), **ME, mode=0o400))
    return tuple(items)


def state_of(folder: Path) -> dict[str, bytes]:
    """Every file below, temporary ones included, except what the agent keeps for itself."""
    paths = (Path(base) / name for base, _, names in os.walk(folder / "host") for name in names)
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


@cases("seed", *range(25))
async def test_next_run_finishes_a_run_killed_at_any_point(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    folder, state = tmp_path / "host", str(tmp_path_factory.getbasetemp() / "kill-state")
    folder.mkdir()
    items, choose = document(folder), random.Random(seed)
    for _ in range(2):
        await kill_in_mid_apply(items, state, choose)
    async with await AgentSession.open(here(), state=state) as session:
        report = await session.apply(items, {"key": SECRET}, lambda event: None)
        assert report.failed == 0
        again = await session.apply(items, {"key": SECRET}, lambda event: None)
        assert (again.changed, again.failed) == (0, 0)
    found = state_of(tmp_path)
    assert len(found) == 2 + 12 * 2
    for number in range(12):
        assert found[f"host/etc/{number}.seen"] == found[f"host/etc/{number}.conf"] == b"value=%d\n" % number * 200
    assert found["host/etc/key"] == SECRET


async def kill_in_mid_apply(items: tuple[Item, ...], state: str, choose: random.Random) -> None:
    """SIGKILL after a number of answered items and a little while, so that it falls anywhere in the next one."""
    process = await here().start(COMMAND)
    request = {"op": "apply", "items": to_wire(items, {"key": SECRET})}
    await process.write(payload(state) + json.dumps(request).encode() + b"\n")
    for _ in range(choose.randrange(len(items))):
        assert await process.readline()
    await asyncio.sleep(choose.random() * 0.004)
    await process.kill()
    await process.wait()


async def test_restart_recorded_by_a_killed_run_is_planned_and_made(place: Place) -> None:
    run = Command("reload", ("touch", place.path("done")), on_change=True)
    item = place.file("c", "x", reloads=("command reload",))
    await place.apply(item, run)
    os.unlink(place.path("done"))
    # As after a kill between the file's rename and the reload.
    Path(place.path("state/pending-restarts")).write_text(json.dumps({"command reload": f"{item.key} changes"}))
    assert (await place.check(item, run))[1].action == f"run reload ({item.key} changes)"
    assert [result.status for result in await place.apply(item, run)] == ["ok", "changed"]
    assert os.path.exists(place.path("done"))


async def test_pending_reload_of_another_document_stays_pending(place: Place) -> None:
    run = Command("reload", ("touch", place.path("done")), on_change=True)
    await place.apply(place.file("c", "x", reloads=("command reload",)))
    assert [result.status for result in await place.apply(place.file("other", "x"))] == ["changed"]
    assert [result.status for result in await place.apply(run)] == ["changed"]
    assert os.path.exists(place.path("done"))


async def test_lost_connection_finishes_the_current_item_and_skips_the_rest(tmp_path: Path) -> None:
    items = (
        Command(
            "slow",
            ("sh", "-c", f"cd {tmp_path}; touch began; until [ -e left ]; do sleep 0.05; done; rm left; touch ended"),
        ),
        File(f"{tmp_path}/later", "x", **ME),
    )
    process = await here().start(COMMAND)
    request = {"op": "apply", "items": to_wire(items)}
    await process.write(payload(f"{tmp_path}/state") + json.dumps(request).encode() + b"\n")
    while not os.path.exists(f"{tmp_path}/began"):
        await asyncio.sleep(0.01)
    leaving = asyncio.create_task(process.wait())  # closes its input, as a lost connection does
    await asyncio.sleep(0.1)
    Path(f"{tmp_path}/left").touch()
    result = await leaving
    assert result.status == 0 and result.stderr == b""
    assert sorted(os.listdir(tmp_path)) == ["began", "ended", "state"]


async def test_second_operator_waits_and_sees_the_first(tmp_path: Path) -> None:
    state, order = f"{tmp_path}/state", f"{tmp_path}/order"
    until_told = f"until [ -e {tmp_path}/told ]; do sleep 0.05; done"
    slow = Command("slow", ("sh", "-c", f"echo first >> {order}; {until_told}; echo first >> {order}"))
    quick = Command("quick", ("sh", "-c", f"echo second >> {order}"))
    told: list[str] = []
    async with await AgentSession.open(here(), state=state) as one, await AgentSession.open(here(), state=state) as two:
        first = asyncio.create_task(one.apply((slow,), {}, lambda event: None))
        while not os.path.exists(order):
            await asyncio.sleep(0.01)

        def hear(event: ItemEvent) -> None:
            told.append(event.text)
            Path(f"{tmp_path}/told").touch()

        await two.apply((quick,), {}, hear)
        await first
    assert Path(order).read_text().split() == ["first", "first", "second"]
    assert told[0].startswith("waiting for ") and "(pid " in told[0] and told[0].endswith(" to finish on this host")
