"""What the service works with, and the snapshot of Slurm and the ledger that a step starts from."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Protocol

from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.rental import OrderBlock, Rental, cost, format_known_cost
from shoal.cloud.service.host_costs import HostPrices
from shoal.cloud.service.leader import Leadership
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import AccountClient
from shoal.cloud.service.scheduling import STEP_WAIT_S, Clock
from shoal.cloud.service.slurm import QueuedJob, Slurm
from shoal.errors import LedgerError, SlurmError
from shoal.roles.elastic import HOLD_MAX_AGE_S
from shoal.slurm.state import NodeState
from shoal.spec.rental import Budget, RentedSet

log = logging.getLogger("shoal.elastic")

REJECTED_OFFER_BLOCK_S = 600.0
"""How long an offer is blocked for a nodeset after one of its machines did not become a working node."""


class Joiner(Protocol):
    """Turns machines into nodes of the cluster."""

    async def join(self, nodes: Mapping[str, RentedInstance]) -> Mapping[str, str]:
        """Join machines that are up, concurrently, until slurmd has registered and the GPUs work.

        Returns the error of every node, `""` for one that takes jobs now. It may be called again for the same machine.
        An error that begins with a prefix of `UNFIT_SCOPES` is final: the machine cannot become a node.
        """

    async def leave(self, nodes: Mapping[str, RentedInstance]) -> None:
        """Log machines out of a network that lists them by name, before they are deleted.

        It takes seconds at most and never fails: an unreachable machine is deleted all the same.
        """

    async def register(self, nodes: Mapping[str, RentedInstance]) -> None:
        """Have joined machines register with slurmctld again. It never fails; containers may not be able to."""


UNFIT_PREFIX = "unfit: "
"""The prefix of a joiner's error for a machine that is up but defective, for example with a broken GPU."""
UNFIT_TYPE_PREFIX = "unfit type: "
"""The same where all machines of its type are: too small for the nodeset."""
UNFIT_IMAGE_PREFIX = "unfit image: "
"""The same where all machines of the account are: their system has another Slurm, or no cgroups."""
RejectionScope = Literal["place", "type", "account"]
UNFIT_SCOPES: Mapping[str, RejectionScope] = {
    UNFIT_PREFIX: "place",
    UNFIT_TYPE_PREFIX: "type",
    UNFIT_IMAGE_PREFIX: "account",
}


def read_unfit(problem: str) -> tuple[RejectionScope, str] | None:
    """What to block because of a joiner's error, and the cause; None where a retry may help."""
    for prefix, scope in UNFIT_SCOPES.items():
        if problem.startswith(prefix):
            return scope, problem.removeprefix(prefix)
    return None


@dataclass
class ServiceContext:
    """The rented nodesets of a cluster, and the clients that the service uses."""

    cluster: str
    sets: Mapping[str, RentedSet]
    accounts: Mapping[str, AccountClient]
    """The provider accounts, by name."""
    ledger: Ledger
    slurm: Slurm
    joiner: Joiner
    clock: Clock
    public_key: str = ""
    """The controller's SSH key, as a line of authorized_keys."""
    budget: Budget | None = None
    step_wait_s: float = STEP_WAIT_S
    """How long a step waits for calls to providers before they continue in the background."""
    leadership: Leadership = field(default_factory=Leadership)
    """Whether this service may act."""
    pause_file: Path | None = None
    """While this file exists and is recent, no machine joins."""
    job_comments: dict[str, str] = field(default_factory=dict)
    """The last comment that was set on each job."""
    ports: tuple[str, ...] = ()
    """What the firewalls of providers must admit to rented nodes: `tcp:22`."""
    unfit_offers: Sequence[OrderBlock] = ()
    """What is never rented: the Slurm of its image cannot talk to the controller's."""
    host_prices: HostPrices = field(default_factory=HostPrices)
    """What rented hosts cost."""
    affordable_nodes: frozenset[str] = frozenset()
    """Nodes that are down because of a budget which now allows their machines: they are retried at once."""
    set_by_node: dict[str, RentedSet] = field(init=False)
    _problems: set[tuple[str, str]] = field(default_factory=set)
    """Failures of one node's part of a step, so that each is logged once and not in every step."""

    def __post_init__(self) -> None:
        self.set_by_node = {node: nodeset for nodeset in self.sets.values() for node in nodeset.nodes}

    @property
    def joins_paused(self) -> bool:
        """Whether machines must wait to join: keys are being rotated, and they would get the old ones."""
        try:
            return (
                self.pause_file is not None and abs(self.clock.now() - self.pause_file.stat().st_mtime) < HOLD_MAX_AGE_S
            )
        except OSError:
            return False

    @contextmanager
    def isolated(self, node: str) -> Iterator[None]:
        """Work on one node or its rental. If it fails, the next step retries, and the work on others goes on."""
        try:
            yield
        except Exception as error:
            if isinstance(error, LedgerError) and error.__cause__ is not None:
                raise  # SQLite's: the ledger fails for all
            if (node, repr(error)) not in self._problems:
                log.exception("%s: cannot update it; the next step retries", node)
            self._problems.add((node, repr(error)))

    def blocks(self, nodeset: str) -> list[OrderBlock]:
        """What must not be ordered now for a nodeset."""
        unfit = [block for block in self.unfit_offers if block.nodeset == nodeset]
        return [*unfit, *self.ledger.blocks(self.clock.now(), nodeset)]

    def release(self, rental: Rental, why: str) -> None:
        """Mark a rental for release; the next step deletes its machine."""
        if rental.state != "releasing":
            _log_release(rental, why)
            self.ledger.record_release(rental.token, why, self.clock.now())

    def reject(self, rental: Rental, why: str, scope: RejectionScope = "place") -> None:
        """Release a machine that did not become a working node, and block what is like it for its nodeset.

        Other nodesets may need less: fewer CPUs, a higher price. A machine of the same type may work elsewhere, and
        there later; a type stays as it is until `shoal up`, and so does an image, for all nodesets that have it.
        """
        unfit_machine = ""
        if scope == "place":
            self.block_place(rental, why)
            account = self.accounts.get(rental.account)
            machine = account.machine(rental) if account else None
            unfit_machine = machine.machine_id if machine else ""
        else:
            type = rental.offer.type if scope == "type" else ""
            again = f"{why}; nothing more of it is rented until `shoal up`"
            for nodeset in [rental.nodeset] if scope == "type" else self._sets_with_image_of(rental):
                self.ledger.block(rental.account, type, "", "", None, again, nodeset)
        if rental.state != "releasing":
            _log_release(rental, why)
            self.ledger.record_rejection(rental.token, why, self.clock.now(), unfit_machine)

    def block_place(self, rental: Rental, why: str) -> None:
        """Order nothing like this rental in its place for a while."""
        offer, until = rental.offer, self.clock.now() + REJECTED_OFFER_BLOCK_S
        self.ledger.block(rental.account, offer.type, offer.place, offer.market, until, why, rental.nodeset)

    def _sets_with_image_of(self, rental: Rental) -> set[str]:
        images = {
            (name, offer.image)
            for name, rented in self.sets.items()
            for offer in rented.offers
            if offer.provider == rental.account
        }
        own = {image for name, image in images if name == rental.nodeset}
        return {rental.nodeset, *(name for name, image in images if image in own)}

    def rejected_machines(self, job: str) -> tuple[str, int]:
        """What the machines that did not become nodes of a job cost, and why the last did not; and their number.

        They count on whatever node, as Slurm requeues a job onto others, and until the job starts.
        """
        now, since = self.clock.now(), self.leadership.since
        rejected = [one for one in self.ledger.rejected() if job in one.jobs and one.intended_at >= since]
        if not rejected:
            return "", 0
        last = rejected[-1]
        price = format_known_cost(
            sum(cost(rental, now) for rental in rejected), sum(rental.usd_hour is None for rental in rejected)
        )
        count = "a machine was" if len(rejected) == 1 else f"{len(rejected)} machines were"
        return f"{count} rejected ({price}): {last.reason}", len(rejected)

    def record_starts(self, jobs: Iterable[QueuedJob]) -> None:
        """Record which jobs have started of those whose machines were rejected."""
        rejected = {job for rental in self.ledger.rejected() for job in rental.jobs}
        for job in jobs:
            if job.state == "RUNNING" and job.id in rejected:
                self.ledger.record_start(job.id)

    async def update_slurm(self, update: Awaitable[None]) -> bool:
        """Apply a change in Slurm. If it is rejected, the next step retries: one node must not block the others."""
        try:
            await update
        except SlurmError as error:
            log.warning("Slurm rejected the update: %s", error.message)
            return False
        return True

    async def comment_job(self, job: str, text: str) -> None:
        """Set a job's comment, if it changed."""
        if job and self.job_comments.get(job) != text:
            self.job_comments[job] = text
            log.info("job %s: %s", job, text)
            await self.update_slurm(self.slurm.comment(job, text))


def _log_release(rental: Rental, why: str) -> None:
    log.info("%s: releasing %s of %s: %s", rental.node, rental.id or "the order", rental.account, why)


@dataclass
class ClusterSnapshot:
    """The state of Slurm and the ledger in one step."""

    now: float
    nodes: Mapping[str, NodeState]
    """The nodes of rented nodesets that Slurm has."""
    jobs: Sequence[QueuedJob]
    rentals: Sequence[Rental] = ()
    """All rentals whose machine exists, or may exist."""
    busy: frozenset[Hashable] = frozenset()
    """The groups that were being served when Slurm was queried: their state may be outdated."""
    _version: object = None
    _by_node: dict[str, list[Rental]] = field(default_factory=dict)
    _jobs_by_node: dict[str, list[QueuedJob]] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        now: float,
        nodes: Iterable[NodeState],
        jobs: Sequence[QueuedJob],
        context: ServiceContext,
        busy: frozenset[Hashable] = frozenset(),
    ) -> ClusterSnapshot:
        snapshot = cls(now, {node.name: node for node in nodes if node.name in context.set_by_node}, jobs, busy=busy)
        for job in jobs:
            for node in job.nodes if job.active else ():
                snapshot._jobs_by_node.setdefault(node, []).append(job)
        snapshot.refresh(context.ledger)
        return snapshot

    def refresh(self, ledger: Ledger) -> None:
        """Read the ledger again, if it changed."""
        if self._version == ledger.version:
            return
        self._version, self.rentals = ledger.version, ledger.live()
        self._by_node = {}
        for rental in self.rentals:
            if rental.state != "releasing":
                self._by_node.setdefault(rental.node, []).append(rental)

    def rentals_of(self, node: str) -> Sequence[Rental]:
        """The rentals of a node, without those that are being released."""
        return self._by_node.get(node, ())

    def jobs_on(self, node: str) -> Sequence[QueuedJob]:
        """The jobs on a node."""
        return self._jobs_by_node.get(node, ())
