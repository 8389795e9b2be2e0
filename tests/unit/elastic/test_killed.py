"""Killed with SIGKILL between any two steps, the next service goes on: no orphan, no stuck node, nothing ordered twice.

The service runs in a process of its own, against a simulated cloud in another and a Slurm that keeps its state in a
file. It is killed before and after every call that writes to the ledger or changes something at the provider or in
Slurm, one call after the other, each time in a world made anew.
"""

from __future__ import annotations

import asyncio
import inspect
import multiprocessing
import os
import signal
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.contract.renters import CASES, PUBLIC_KEY, account
from tests.unit.elastic.scene import CLUSTER, NO_PAUSE, choice, rented_set

from shoal.elastic.fake import FakeJoiner, FakeSlurm
from shoal.elastic.fleet import UNFIT, Fleet
from shoal.elastic.ledger import Ledger
from shoal.elastic.service import Service
from shoal.elastic.source import Source
from shoal.providers.rental import Rented
from shoal.providers.rented import renter
from shoal.simulators import cloud
from shoal.simulators.faults import Fault
from shoal.simulators.ground import Nowhere
from shoal.simulators.market import Market
from shoal.simulators.server import Simulation, serving

CONVERGED = 0
LIMIT = 6 * 3600
"""Seconds of the world's own clock. What has not settled by then is stuck."""
LEDGER_WRITES = ("intend", "made", "joined", "releasing", "gone", "failed", "billed", "priced", "block", "paced")
PROVIDER_CHANGES = ("create", "delete", "ensure_key")
SLURM_CHANGES = ("down", "drain", "power_down", "resume", "requeue", "warn", "comment")

WEST, EAST = choice(CASES["lambda"]), choice(CASES["lambda"], region="us-east-1")


@dataclass(frozen=True)
class Story:
    """What happens to a job for two nodes, so that other calls are met."""

    faults: tuple[Fault, ...]
    machines: tuple[int, ...] = (2,)
    """So many are made in all, wherever it is killed."""


STORIES = {
    "all is well": Story(()),
    "the answer to an order gets lost": Story((Fault("error-after-create", 1),)),
    "the first place is out": Story((Fault("stockout", -1, region="us-west-1"),)),
    # Where the other machine of the job works already one is replaced, else both go elsewhere.
    "a bad GPU": Story((Fault("bad-gpu", 1),), (3, 4)),
}


class Clock:
    """One time for all processes."""

    def __init__(self) -> None:
        self._now = multiprocessing.get_context("fork").Value("d", 1_800_000_000.0)

    def now(self) -> float:
        return float(self._now.value)

    def advance(self, seconds: float) -> None:
        self._now.value += seconds


class Fate:
    """Kills this process at the call that it was told of."""

    def __init__(self, at: int) -> None:
        self._at, self._count = at, 0

    def strike(self) -> None:
        self._count += 1
        if self._count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def over(self, what: Any, names: tuple[str, ...]) -> Any:
        """The same object, deadly before and after the calls of these names."""
        return _Deadly(what, names, self)


class _Deadly:
    def __init__(self, what: Any, names: tuple[str, ...], fate: Fate) -> None:
        self._what, self._names, self._fate = what, names, fate

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._what, name)
        if name not in self._names:
            return found
        if inspect.iscoroutinefunction(found):

            async def waited(*args: Any) -> Any:
                self._fate.strike()
                result = await found(*args)
                self._fate.strike()
                return result

            return waited

        def called(*args: Any, **kwargs: Any) -> Any:
            self._fate.strike()
            result = found(*args, **kwargs)
            self._fate.strike()
            return result

        return called


@dataclass(frozen=True)
class World:
    """What outlives the service."""

    directory: Path
    clock: Clock
    url: str
    story: Story

    def slurm(self) -> FakeSlurm:
        slurm = FakeSlurm(self.clock, [f"burst{number}" for number in range(1, 5)], self.directory / "slurm.json")
        slurm.idle_seconds = 60.0
        return slurm

    def serve(self, kill_at: int) -> int:
        """Run a service in a process of its own until all is settled. The status it ended with; -9 where killed."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = asyncio.run(self._serve(kill_at))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    async def _serve(self, kill_at: int) -> int:
        fate = Fate(kill_at)
        slurm = self.slurm()
        ledger = fate.over(Ledger.open(self.directory / "ledger.db"), LEDGER_WRITES)
        rents = renter(replace(account(CASES["lambda"], self.url, **NO_PAUSE), name="lambda"))
        source = Source("lambda", fate.over(rents, PROVIDER_CHANGES), CLUSTER, ledger, self.clock)
        bad: set[str] = set(self._bad().read_text().split()) if self._bad().exists() else set()

        def judge(machine: Rented) -> str:
            # The first machine to be looked at is the bad one, whoever looks.
            if any(fault.kind == "bad-gpu" for fault in self.story.faults) and not bad:
                bad.add(machine.id)
                self._bad().write_text(machine.id)
            return f"{UNFIT}CUDA error 802" if machine.id in bad else ""

        nodeset = rented_set("burst", 4, WEST, EAST)
        fleet = Fleet(
            CLUSTER,
            {"burst": nodeset},
            {"lambda": source},
            ledger,
            fate.over(slurm, SLURM_CHANGES),
            FakeJoiner(slurm, judge),
            self.clock,
            PUBLIC_KEY,
        )
        service = Service(fleet)
        end = self.clock.now() + LIMIT
        while self.clock.now() < end:
            slurm.tick()
            requests, slurm.requests[:] = list(slurm.requests), []
            await service.step(requests)
            await asyncio.sleep(0)
            slurm.tick()
            if slurm.settled and not ledger.live():
                return CONVERGED
            self.clock.advance(10)
        return 2

    def _bad(self) -> Path:
        return self.directory / "bad"


@contextmanager
def world(directory: Path, story: Story) -> Iterator[tuple[World, Callable[[], list[dict[str, Any]]]]]:
    """A cloud in a process of its own, and a Slurm with one job."""
    directory.mkdir()
    clock = Clock()
    ours, theirs = multiprocessing.get_context("fork").Pipe()
    child = os.fork()
    if child == 0:
        try:
            asyncio.run(_cloud(clock, theirs, story))
        finally:
            os._exit(0)
    try:
        made = World(directory, clock, ours.recv(), story)
        slurm = made.slurm()
        slurm.submit("1", 2)

        def bill() -> list[dict[str, Any]]:
            ours.send("bill")
            found: list[dict[str, Any]] = ours.recv()
            return found

        yield made, bill
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


async def _cloud(clock: Clock, pipe: Any, story: Story) -> None:
    kind = cloud("lambda")
    profile = replace(kind.profile, boot_seconds=1.0, address_seconds=0.0, stop_seconds=0.0)
    market = Market(profile, kind.types, Nowhere(), clock=clock.now)
    market.faults = list(story.faults)
    async with serving(Simulation(kind(market), limited=False)) as url:
        pipe.send(url)
        loop = asyncio.get_running_loop()
        while True:
            await loop.run_in_executor(None, pipe.recv)
            market.look()
            pipe.send([{**one, "place": one["region"]} for one in market.bill()])


def check(directory: Path, story: Story, bill: list[dict[str, Any]], slurm: FakeSlurm, told: str) -> None:
    """Nothing is left, nothing was made twice, and every machine of the bill is in the ledger."""
    assert slurm.settled, told
    assert {job.state for job in slurm.job_by_id.values()} == {"COMPLETED"}, told
    assert all(one["ended"] is not None for one in bill), (told, bill)
    assert len(bill) in story.machines, (told, bill)
    rows = sqlite3.connect(directory / "ledger.db").execute("SELECT id, state, node FROM rentals").fetchall()
    nodes = {id: node for id, _, node in rows if id}
    assert nodes.keys() == {one["id"] for one in bill}, (told, rows)
    for node in set(nodes.values()):
        lives = sorted((one["ordered"], one["ended"]) for one in bill if nodes[one["id"]] == node)
        assert all(earlier[1] <= later[0] for earlier, later in pairwise(lives)), (told, node, lives)
    assert {row[1] for row in rows} <= {"gone", "failed"}, (told, rows)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "name", [name if name == "all is well" else pytest.param(name, marks=pytest.mark.matrix) for name in STORIES]
)
def test_killed_at_any_step_the_next_service_goes_on(tmp_path: Path, name: str) -> None:
    story = STORIES[name]
    for step in range(1, 500):
        directory = tmp_path / str(step)
        with world(directory, story) as (made, bill):
            ended = made.serve(kill_at=step)
            told = f"{name}, killed at step {step}"
            if ended == -signal.SIGKILL:
                assert made.serve(kill_at=0) == CONVERGED, told
            else:
                assert ended == CONVERGED, told
            check(directory, story, bill(), made.slurm(), told)
        if ended == CONVERGED:
            assert step > 30, f"the service was killed at {step - 1} steps only: too few to mean something"
            return
    pytest.fail("the service makes more than 500 steps for a job of two nodes")
