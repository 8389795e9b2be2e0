"""After SIGKILL between any two steps, the next service continues: no orphan, no stuck node, no double order.

The service runs in its own process, against a simulated cloud in another and a Slurm that keeps its state in a
file. It is killed before and after every call that writes to the ledger or changes something at the provider or in
Slurm, one call after the other, each time in a fresh snapshot. Where an order takes several requests over HTTP, as
with Paperspace, also before and after each of these. A run without a kill counts these calls first.
"""

import asyncio
import inspect
import multiprocessing
import os
import signal
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.contract.rental_providers import CASES, PUBLIC_KEY, account
from tests.support.cases import cases
from tests.unit.cloud.scene import CLUSTER, NO_PAUSE, STEP_TIMEOUT_S, choice, rented_set

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.service.context import UNFIT_PREFIX, ServiceContext
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import AccountClient
from shoal.cloud.service.service import RentalService
from shoal.spec.rental import OfferChoice
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.fake_slurm import FakeJoiner, FakeSlurm
from shoal_simulators.instances import Fault
from shoal_simulators.market import Market
from shoal_simulators.server import SimulatorApp, serve

CONVERGED = 0
LIMIT = 6 * 3600
"""Seconds of the snapshot's own clock. What has not settled by then is stuck."""
LEDGER_WRITES = (
    "intend", "record_machine", "record_join", "record_release", "record_end", "record_failure", "record_billing",
    "record_price", "record_order_time", "block",
)  # fmt: skip
PROVIDER_CHANGES = ("create", "delete", "ensure_key")
SLURM_CHANGES = ("down", "drain", "power_down", "resume", "requeue", "warn", "comment")

WORKERS = 3
"""So many are killed side by side: most of the time each waits for its disk or its cloud."""


@dataclass(frozen=True)
class Story:
    """What happens to a job for two nodes, so that other calls are met."""

    kind: str = "lambda"
    faults: tuple[Fault, ...] = ()
    machines: tuple[int, ...] = (2,)
    """So many are made in all, wherever it is killed."""
    requests: bool = False
    """Whether it is killed at single requests, too."""
    elsewhere: str = ""
    """A second region, where the first one is out."""

    @property
    def offers(self) -> list[OfferChoice]:
        case = CASES[self.kind]
        return [choice(case), *([choice(case, region=self.elsewhere)] if self.elsewhere else [])]


LOST = (Fault("error-after-create", 1),)
STORIES = {
    "all is well": Story(),
    "the answer to an order gets lost": Story(faults=LOST),
    "the first place is out": Story(faults=(Fault("stockout", -1, region="us-west-1"),), elsewhere="us-east-1"),
    # Where the other machine of the job works already one is replaced, else both go elsewhere.
    "a bad GPU": Story(faults=(Fault("bad-gpu", 1),), machines=(3, 4), elsewhere="us-east-1"),
    **{f"all is well at {kind}": Story(kind, requests=True) for kind in CASES if kind != "lambda"},
    **{
        f"the answer to an order gets lost at {kind}": Story(kind, LOST, requests=True)
        for kind in CASES
        if kind != "lambda"
    },
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
    """Kills this process at the chosen call."""

    def __init__(self, at: int) -> None:
        self._at = at
        self.count = 0
        """So many times it could have struck."""

    def strike(self) -> None:
        self.count += 1
        if self.count == self._at:
            os.kill(os.getpid(), signal.SIGKILL)

    def over(self, what: Any, names: tuple[str, ...]) -> Any:
        """The same object, deadly before and after the calls of these names."""
        return _Deadly(what, names, self)

    @contextmanager
    def over_requests(self) -> Iterator[None]:
        """Deadly before and after every request that changes something."""
        send = httpx.AsyncHTTPTransport.handle_async_request

        async def sent(transport: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
            if request.method == "GET":
                return await send(transport, request)
            self.strike()
            response = await send(transport, request)
            self.strike()
            return response

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(httpx.AsyncHTTPTransport, "handle_async_request", sent)
            yield


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
        slurm.idle_s = 60.0
        return slurm

    def serve(self, kill_at: int) -> int:
        """Run a service in its own process until nothing changes. Returns its exit status; -9 where killed."""
        child = os.fork()
        if child == 0:
            status = 1
            try:
                status = asyncio.run(self.rehearse(Fate(kill_at)))
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

    async def rehearse(self, fate: Fate) -> int:
        """The same in this process."""
        async with AsyncExitStack() as stack:
            ledger = stack.enter_context(closing(Ledger.open(self.directory / "ledger.db")))
            if self.story.requests:
                stack.enter_context(fate.over_requests())
            return await self._serve(fate, ledger, stack)

    async def _serve(self, fate: Fate, opened: Ledger, stack: AsyncExitStack) -> int:
        slurm, kind = self.slurm(), self.story.kind
        ledger = fate.over(opened, LEDGER_WRITES)
        rents = rental_provider(replace(account(CASES[kind], self.url, **NO_PAUSE), name=kind))
        client = AccountClient(kind, fate.over(rents, PROVIDER_CHANGES), CLUSTER, ledger, self.clock)
        bad: set[str] = set(self._bad().read_text().split()) if self._bad().exists() else set()

        def judge(machine: RentedInstance) -> str:
            # The first machine that any service checks is the unfit one.
            if any(fault.kind == "bad-gpu" for fault in self.story.faults) and not bad:
                bad.add(machine.id)
                self._bad().write_text(machine.id)
            return f"{UNFIT_PREFIX}CUDA error 802" if machine.id in bad else ""

        context = ServiceContext(
            CLUSTER,
            {"burst": rented_set("burst", 4, *self.story.offers)},
            {kind: client},
            ledger,
            fate.over(slurm, SLURM_CHANGES),
            FakeJoiner(slurm, judge),
            self.clock,
            PUBLIC_KEY,
            step_wait_s=STEP_TIMEOUT_S,
        )
        service = RentalService(context)
        stack.push_async_callback(service.close)
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


class Cloud:
    """A simulated cloud in its own process, reset for every snapshot."""

    def __init__(self, story: Story) -> None:
        self._story, self._clock = story, Clock()
        self._pipe, theirs = multiprocessing.get_context("fork").Pipe()
        self._process = os.fork()
        if self._process == 0:
            try:
                asyncio.run(_cloud(self._clock, theirs, story))
            finally:
                os._exit(0)

    def snapshot(self, directory: Path) -> World:
        """A new one, with a Slurm that has one job."""
        directory.mkdir()
        made = World(directory, self._clock, self._ask("begin"), self._story)
        made.slurm().submit("1", 2)
        return made

    def bill(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._ask("bill")
        return found

    def close(self) -> None:
        os.kill(self._process, signal.SIGKILL)
        os.waitpid(self._process, 0)

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._pipe.recv()


async def _cloud(clock: Clock, pipe: Any, story: Story) -> None:
    kind = find_simulator(story.kind)
    profile = replace(kind.profile, boot_s=1.0, address_s=0.0, stop_s=0.0)
    loop = asyncio.get_running_loop()
    assert await loop.run_in_executor(None, pipe.recv) == "begin"
    while True:
        market = Market(profile, kind.types, NoHosts(), clock=clock.now)
        market.faults = [replace(fault) for fault in story.faults]
        async with serve(SimulatorApp(kind(market), limited=False)) as url:
            pipe.send(url)
            while await loop.run_in_executor(None, pipe.recv) == "bill":
                market.update()
                pipe.send(market.bill())


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


@contextmanager
def somewhere() -> Iterator[Path]:
    """A directory in memory where there is one: what a process wrote is there after SIGKILL, wherever it lies."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None) as directory:
        yield Path(directory)


def rehearsed(directory: Path, name: str) -> int:
    """How many steps of a story there are to be killed at."""
    story, fate = STORIES[name], Fate(0)
    with closing(Cloud(story)) as cloud:
        snapshot = cloud.snapshot(directory / "rehearsal")
        assert asyncio.run(snapshot.rehearse(fate)) == CONVERGED, name
        check(snapshot.directory, story, cloud.bill(), snapshot.slurm(), f"{name}, not killed")
    return fate.count


def killed(directory: Path, name: str, steps: range) -> int:
    """Kill the service at each of these steps, and let another one go on. How often it was really killed."""
    story, kills = STORIES[name], 0
    with closing(Cloud(story)) as cloud:
        for step in steps:
            snapshot, told = cloud.snapshot(directory / str(step)), f"{name}, killed at step {step}"
            ended = snapshot.serve(kill_at=step)
            assert ended in (CONVERGED, -signal.SIGKILL), (told, ended)
            if ended == -signal.SIGKILL:
                kills += 1
                assert snapshot.serve(kill_at=0) == CONVERGED, told
            check(snapshot.directory, story, cloud.bill(), snapshot.slurm(), told)
    return kills


@pytest.mark.timeout(600)
@cases("name", *[name if name == "all is well" else pytest.param(name, marks=pytest.mark.matrix) for name in STORIES])
def test_service_killed_at_any_step_continues_after_restart(name: str) -> None:
    with somewhere() as directory:
        count = rehearsed(directory, name)
        assert count > 30, f"there are {count} steps to be killed at: too few to mean something"
        shares = [(directory, name, range(1 + worker, count + 1, WORKERS)) for worker in range(WORKERS)]
        with multiprocessing.get_context("fork").Pool(WORKERS) as pool:
            kills = sum(pool.starmap(killed, shares))
        # Calls that run side by side come in this order or that, so one or another may not be met.
        assert kills >= 0.9 * count, f"killed at {kills} of {count} steps"
