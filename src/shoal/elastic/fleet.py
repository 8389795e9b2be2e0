"""What the service works with, and what it knows at the beginning of a step: Slurm's wishes and the ledger's rows."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Awaitable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from shoal.elastic.background import PATIENCE
from shoal.elastic.clock import Clock
from shoal.elastic.fence import Fence
from shoal.elastic.ledger import Ledger
from shoal.elastic.rentals import Rental
from shoal.elastic.slurm import Job, Slurm
from shoal.elastic.source import Source
from shoal.errors import SlurmError
from shoal.providers.rental import Rented
from shoal.roles.elastic import HOLD_SECONDS
from shoal.slurm.state import NodeState
from shoal.spec.rented import Budget, RentedSet

log = logging.getLogger("shoal.elastic")
T = TypeVar("T")

BROKEN_SECONDS = 600.0
"""An offer whose machine did not become a working node is left alone so long."""


class Joiner(Protocol):
    """Makes machines nodes of the cluster."""

    async def join(self, nodes: Mapping[str, Rented]) -> Mapping[str, str]:
        """Bring machines that are up to where slurmd has registered and the GPUs work, all side by side.

        Says for every node what went wrong, and nothing (`""`) for one that takes jobs now. It may be asked again for
        the same machine. Text that begins with `UNFIT` is final: the machine itself is no good.
        """

    async def part(self, nodes: Mapping[str, Rented]) -> None:
        """Have machines take their leave of the network, where it knows them by name, before they are given back.

        It takes seconds at most and never fails: one that no longer hears us goes all the same.
        """


async def all_of(work: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """What all of them give. One that fails is told of when all have ended: no step goes on beside the next."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for one in done:
        if isinstance(one, BaseException):
            raise one
    return [one for one in done if not isinstance(one, BaseException)]


UNFIT = "unfit: "
"""How a joiner begins what it says of a machine that is up and reached, and no good: a GPU that does not work."""


@dataclass
class Fleet:
    """The rented nodesets of a cluster, and whom to ask about them."""

    cluster: str
    sets: Mapping[str, RentedSet]
    sources: Mapping[str, Source]
    """The accounts at providers, by name."""
    ledger: Ledger
    slurm: Slurm
    joiner: Joiner
    clock: Clock
    public_key: str = ""
    """The line that lets the controller into its machines."""
    budget: Budget | None = None
    patience: float = PATIENCE
    """Seconds that a step waits for calls to providers before it goes on beside them."""
    fence: Fence = field(default_factory=Fence)
    """Whether it is for us to act."""
    hold: Path | None = None
    """A file that says that no machine is to become a node now."""
    said: dict[str, str] = field(default_factory=dict)
    """What was last said on each job."""
    set_by_node: dict[str, RentedSet] = field(init=False)

    def __post_init__(self) -> None:
        self.set_by_node = {node: nodeset for nodeset in self.sets.values() for node in nodeset.nodes}

    @property
    def held(self) -> bool:
        """Whether machines that are up are to wait: keys are being changed, and they would get the old ones."""
        try:
            return self.hold is not None and abs(self.clock.now() - self.hold.stat().st_mtime) < HOLD_SECONDS
        except OSError:
            return False

    def release(self, rental: Rental, why: str) -> None:
        """Note that a machine is to go; the next step gives it back."""
        if rental.state != "releasing":
            log.info("%s: %s of %s is given back: %s", rental.node, rental.id or "the order", rental.account, why)
            self.ledger.releasing(rental.token, why, self.clock.now())

    def useless(self, rental: Rental, why: str) -> None:
        """A machine did not become a working node: it goes, and its offer is left alone for a while."""
        offer, now = rental.offer, self.clock.now()
        until = now + BROKEN_SECONDS
        self.ledger.block(rental.account, offer.type, offer.place, offer.market, until, why)
        self.release(rental, why)

    async def tell(self, telling: Awaitable[None]) -> bool:
        """Tell Slurm something. Where it minds, the next step tries again: one node must not hold up the others."""
        try:
            await telling
        except SlurmError as error:
            log.warning("Slurm minds: %s", error.message)
            return False
        return True

    async def say(self, job: str, text: str) -> None:
        """Leave word on a job, once."""
        if job and self.said.get(job) != text:
            self.said[job] = text
            log.info("job %s: %s", job, text)
            await self.tell(self.slurm.comment(job, text))


@dataclass
class World:
    """What is known in one step."""

    now: float
    nodes: Mapping[str, NodeState]
    """The nodes of rented nodesets that Slurm has."""
    jobs: Sequence[Job]
    rentals: Sequence[Rental] = ()
    """All that is there, or may be."""
    busy: frozenset[Hashable] = frozenset()
    """The groups that were being served when Slurm was asked: what it said of them may be out of date."""
    _version: object = None
    _by_node: dict[str, list[Rental]] = field(default_factory=dict)
    _jobs_by_node: dict[str, list[Job]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        now: float,
        nodes: Iterable[NodeState],
        jobs: Sequence[Job],
        fleet: Fleet,
        busy: frozenset[Hashable] = frozenset(),
    ) -> World:
        world = cls(now, {node.name: node for node in nodes if node.name in fleet.set_by_node}, jobs, busy=busy)
        on: dict[str, list[Job]] = defaultdict(list)
        for job in jobs:
            if job.active:
                for node in job.nodes:
                    on[node].append(job)
        world._jobs_by_node = dict(on)
        world.read(fleet.ledger)
        return world

    def read(self, ledger: Ledger) -> None:
        """Read the ledger again, where something was written there."""
        if self._version == ledger.version:
            return
        self._version, self.rentals = ledger.version, ledger.live()
        by_node: dict[str, list[Rental]] = defaultdict(list)
        for rental in self.rentals:
            if rental.state != "releasing":
                by_node[rental.node].append(rental)
        self._by_node = dict(by_node)

    def kept(self, node: str) -> Sequence[Rental]:
        """What a node has, or may have, without what is on its way out."""
        return self._by_node.get(node, ())

    def jobs_on(self, node: str) -> Sequence[Job]:
        """The jobs that hold a node."""
        return self._jobs_by_node.get(node, ())
