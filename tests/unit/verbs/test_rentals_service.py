"""`shoal down` stops the rental service, and the controller starts it again if the connection is cut."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.contract.rental_providers import CASES, KEY, trial
from tests.support.cases import cases
from tests.unit.verbs.test_rentals import SERVICE, a_cluster, quickly, time_passes

from shoal.hosts.api import Process, Target
from shoal.hosts.local import LocalHost
from shoal.verbs import reap, rentals
from shoal.verbs.context import exit_notes
from shoal.verbs.down import down
from shoal_simulators.fake_host import FakeHost, FakeProgram

WATCH = ("sh", "-c", rentals.RESTART)
ENOUGH = 60.0


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACME_KEY", KEY)
    monkeypatch.setattr(reap, "POLLING", reap.Polling(sleep=quickly))


@pytest.fixture
def systemctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that records its arguments; the file with them."""
    program, notes = tmp_path / "systemctl", tmp_path / "notes"
    program.write_text(f'#!/bin/sh\necho "$@" >> {notes}\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return notes


def started(notes: Path) -> list[str]:
    """The arguments of systemctl, once it was called."""
    end = time.monotonic() + ENOUGH
    while not (notes.exists() and notes.read_text().endswith("\n")):
        assert time.monotonic() < end, "systemctl was told nothing"
        time.sleep(0.05)
    return notes.read_text().splitlines()


async def watching(seconds: str) -> Process:
    """The watch as it runs on a host, once it does."""
    watch = await LocalHost(Target("c1")).start((*WATCH, "sh", seconds, "shoal-elastic"), root=False)
    assert await watch.readline() == b"watching\n"
    return watch


def test_lost_connection_restarts_the_service(systemctl: Path) -> None:
    async def cut_off() -> None:
        await (await watching("600")).wait()  # which closes its input, as a lost connection does

    asyncio.run(cut_off())
    assert started(systemctl) == ["start shoal-elastic"]


def test_silent_connection_restarts_the_service_after_the_timeout(systemctl: Path) -> None:
    async def silent() -> list[str]:
        watch = await watching("0.1")
        told = await asyncio.to_thread(started, systemctl)
        await watch.wait()
        return told

    assert asyncio.run(silent()) == ["start shoal-elastic"]


def test_normal_end_does_not_restart_the_service(systemctl: Path) -> None:
    async def as_meant() -> int:
        watch = await watching("600")
        await watch.write(rentals.NO_RESTART)
        return (await watch.wait()).status

    assert asyncio.run(as_meant()) == 0
    assert not systemctl.exists()


async def watch(program: FakeProgram) -> int:
    """The same on a host in memory."""
    await program.print(b"watching\n")
    await program.read()
    return 0


async def test_watch_ends_without_a_restart_also_after_an_exception() -> None:
    host = FakeHost("c1", {WATCH: watch})
    async with rentals.restart_if_disconnected(host) as watched:
        assert watched
    with pytest.raises(RuntimeError):
        async with rentals.restart_if_disconnected(host):
            raise RuntimeError("what rents was started again by us")
    assert [call.stdin for call in host.calls] == [rentals.NO_RESTART, rentals.NO_RESTART]


async def test_down_starts_the_watch_before_stopping_the_service() -> None:
    async with trial(CASES["sandbox"]) as cloud:
        world, context = await a_cluster(cloud)
        world.hosts["c1"].answers |= {WATCH: watch}
        async with time_passes(cloud):
            await down(context)
        argvs = [argv[:3] for argv in world.hosts["c1"].argvs]
        assert argvs.index(WATCH) < argvs.index(SERVICE[0])
        assert exit_notes() == []


@cases("watched", True, False)
async def test_immediate_exit_of_down_shows_remaining_machines_and_the_next_command(watched: bool) -> None:
    async with trial(CASES["sandbox"]) as cloud:
        world, context = await a_cluster(cloud)
        [machine] = await cloud.listed("reef")
        told: list[list[str]] = []

        async def looks(seconds: float) -> None:
            told.append(exit_notes())
            raise asyncio.CancelledError

        if watched:
            world.hosts["c1"].answers |= {WATCH: watch}
        with pytest.raises(asyncio.CancelledError):
            await down(context, polling=reap.Polling(sleep=looks))
        goes_on = "c1 starts shoal-elastic again by itself" if watched else "on c1: systemctl start shoal-elastic"
        assert told == [
            [
                f"{goes_on}, which releases what is left; then run `shoal down` again",
                f"not proved gone: cloud1 (acme {machine.id}); run `shoal reap` again until all are",
            ]
        ]
