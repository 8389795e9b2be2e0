"""shoal-elastic.service: runs on the controller, wakes and gives back rented nodes as Slurm asks for them.

All it does is a step, over and over. A step reads what Slurm wants, what the ledger says and what providers list, and
does what is due; it remembers nothing that matters. Killed anywhere, the next one goes on from there. What may take
longer runs beside, each account for itself: joining machines, and calls to a provider that does not answer soon. So
one that hangs keeps neither a spot notice of another one from being seen nor its machines from coming and going.

    recognise, lost, strays   reconcile.py
    ends                      spot.py
    given back                release.py
    machines to nodes         boot.py
    nodes to machines         resume.py
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal.elastic import spot, status
from shoal.elastic.background import BackgroundCalls
from shoal.elastic.boot import Boot
from shoal.elastic.fleet import Fleet, World, log
from shoal.elastic.inbox import Inbox, Request
from shoal.elastic.reconcile import reconcile, without_slurm
from shoal.elastic.release import Release
from shoal.elastic.resume import Resume
from shoal.elastic.slurm import again, ours, wants_machine
from shoal.elastic.source import Source
from shoal.errors import SlurmError, UsageError
from shoal.providers.rental import Rented

RECONCILE_SECONDS = 60.0
"""How old what is known of a provider may become when nothing is awaited from it."""
LOOK_SECONDS = 2.0
"""The same while machines come up or go."""
STEP_SECONDS = 1.0
"""From one step to the next while something is awaited."""
POLL_SECONDS = 0.2
"""How soon a note of Slurm's is seen."""


@contextmanager
def alone(path: Path) -> Iterator[None]:
    """Hold the lock of the one service that may rent. Raises UsageError where another has it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process holds {path}", hint="shoal-elastic.service runs already; two would rent twice"
            ) from None
        yield


class Service:
    """The service, with what it remembers between steps for convenience alone."""

    def __init__(self, fleet: Fleet, *, inbox: Inbox | None = None, status_file: Path | None = None) -> None:
        self.fleet = fleet
        self._inbox = inbox
        self._status_file = status_file
        self._wake = asyncio.Event()
        self._looks = BackgroundCalls(fleet.patience, self._wake.set)
        self._release = Release(fleet, self._wake.set)
        self._boot = Boot(fleet, self._wake.set)
        self._resume = Resume(fleet, self._wake.set)
        self._problem = ""

    async def step(self, requests: Sequence[Request] = ()) -> float:
        """Do what is due. Returns the seconds after which to come again, at the latest."""
        fleet = self.fleet
        if not fleet.fence.ended:
            await self._look()
        if fleet.fence.ended:
            self._problem = fleet.fence.ended
            self._report(None)
            return RECONCILE_SECONDS
        world = await self._world()
        try:
            if world is None:
                # Nobody knows what is wanted. What was to go before goes on going, and nothing outlives its time.
                blind = World.of(fleet.clock.now(), (), (), fleet)
                await self._release.step(blind, without_slurm(fleet, blind))
                return STEP_SECONDS
            await self._act(world, requests)
            return self._next(world)
        finally:
            self._report(world)

    async def _act(self, world: World, requests: Sequence[Request]) -> None:
        """What is due where it is known what Slurm wants."""
        fleet = self.fleet
        orphans: Mapping[str, Sequence[Rented]] = {}
        try:
            orphans = await reconcile(fleet, world)
            await spot.end(fleet, world, self._resume.spent(world.now))
            await self._boot.step(world)
            await self._resume.step(world, requests)
            await self._resume.arrived(world)
        finally:  # whatever went wrong before, what is to go goes
            world.read(fleet.ledger)
            await self._release.step(world, orphans)

    async def run(self) -> None:
        """Step for ever."""
        for block in self.fleet.ledger.blocks(self.fleet.clock.now()):
            if not block.type:  # of a whole account: somebody may have acted, and that is what it waits for
                self.fleet.ledger.unblock(block.account)
        while True:
            self._wake.clear()
            try:
                wait = await self.step(self._inbox.take() if self._inbox else [])
            except Exception:
                # One bad step must not end the service: machines would bill on.
                log.exception("a step failed; the next one tries again")
                wait = STEP_SECONDS
            await self._sleep(wait)

    async def close(self) -> None:
        for part in (self._boot, self._resume, self._release, self._looks):
            await part.close()
        for source in self.fleet.sources.values():
            await source.renter.close()

    async def _look(self) -> None:
        """Ask providers what there is, each as often as something is awaited from it."""
        fleet, now = self.fleet, self.fleet.clock.now()
        # What comes and goes is awaited, and so is the notice of what may be taken away.
        awaited = {one.account for one in fleet.ledger.live() if one.state != "joined" or one.offer.market == "spot"}

        def due(source: Source) -> bool:
            return now >= source.due(LOOK_SECONDS if source.name in awaited else RECONCILE_SECONDS)

        for source in fleet.sources.values():
            if source.name not in self._looks.running and due(source):
                self._looks.start(source.name, source.look())
        await self._looks.wait()
        fleet.fence.look(fleet.sources.values(), lambda token: fleet.ledger.get(token) is not None)

    async def _world(self) -> World | None:
        slurm, busy = self.fleet.slurm, self._resume.busy
        try:
            # In this order: a node that is being woken for a job is one whose job can be seen.
            nodes = await slurm.nodes()
            jobs = await slurm.jobs()
        except SlurmError as error:
            self._note_problem(f"slurmctld cannot be asked: {error.message}")
            return None
        world = World.of(self.fleet.clock.now(), nodes, jobs, self.fleet, busy)
        if self.fleet.set_by_node and not world.nodes:
            # It reads another slurm.conf than ours. That all of them left the cluster is the one thing not to believe.
            self._note_problem("slurmctld knows none of the nodes that are rented; run `shoal up`")
            return None
        self._problem = ""
        return world

    def _note_problem(self, problem: str) -> None:
        if not self._problem:
            log.warning("%s", problem)
        self._problem = problem

    def _next(self, world: World) -> float:
        if self._boot.waits or any(one.state != "joined" for one in world.rentals):
            return STEP_SECONDS
        if any(wants_machine(node) for node in world.nodes.values()):
            return STEP_SECONDS
        wait = LOOK_SECONDS if any(one.offer.market == "spot" for one in world.rentals) else RECONCILE_SECONDS / 4
        again_at = [again(node) for node in world.nodes.values() if "DOWN" in node.state and ours(node)]
        return max(STEP_SECONDS, min([wait, *(at - world.now for at in again_at)]))

    def _report(self, world: World | None) -> None:
        if self._status_file is None:
            return
        rentals = world.rentals if world else self.fleet.ledger.live()
        left = {rental.account for rental in rentals} - self.fleet.sources.keys()
        queued = {job.id for job in world.jobs} if world else set()
        running = {job.id for job in world.jobs if job.state == "RUNNING"} if world else set()
        for job in self.fleet.said.keys() - queued if world else ():
            del self.fleet.said[job]
        told = status.Status(
            at=self.fleet.clock.now(),
            problem=self._problem,
            accounts={name: source.problem for name, source in self.fleet.sources.items()}
            | dict.fromkeys(left, "machines are rented there, and the spec has no such account any more"),
            jobs={job: text for job, text in self.fleet.said.items() if job not in running},
            machines={
                rental.token: {
                    "node": rental.node,
                    "state": rental.state,
                    "account": rental.account,
                    "type": rental.offer.type,
                    "place": rental.offer.place,
                    "market": rental.offer.market,
                    "id": rental.id,
                    "usd_hour": rental.usd_hour,
                    "since": rental.intended_at,
                }
                for rental in rentals
            },
        )
        status.write(self._status_file, told)

    async def _sleep(self, seconds: float) -> None:
        """Until it is time, a join has ended, or Slurm asks for something."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and not self._wake.is_set() and not (self._inbox and self._inbox.waiting()):
            # Not `wait_for`, which may keep a cancellation to itself when a join ends at the same moment.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(POLL_SECONDS, max(0.0, end - loop.time()))):
                    await self._wake.wait()
