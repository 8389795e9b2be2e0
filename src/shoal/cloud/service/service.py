"""The service: runs on the controller, rents machines for nodes that Slurm resumes, and deletes them again.

It repeats a step, which keeps no state that matters: killed anywhere, the next start continues from there. Slow work
runs in the background, per account, so a provider that hangs delays no spot notice and no machine of another.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.rental import Rental
from shoal.cloud.service.boot import NodeBooter
from shoal.cloud.service.context import ClusterSnapshot, ServiceContext, log
from shoal.cloud.service.host_costs import record_hosts
from shoal.cloud.service.offers import OfferCatalog
from shoal.cloud.service.provider_account import AccountClient
from shoal.cloud.service.provision import Provisioner
from shoal.cloud.service.reconcile import reconcile, without_slurm
from shoal.cloud.service.release import InstanceReleaser, end_machines
from shoal.cloud.service.scheduling import BackgroundCalls
from shoal.cloud.service.slurm import retry_time, set_by_us, wants_machine
from shoal.cloud.service.slurm_requests import PowerRequest, RequestQueue
from shoal.cloud.status_file import ServiceStatus, machine_entry, write_status
from shoal.errors import SlurmError, UsageError

RECONCILE_INTERVAL_S = 60.0
"""The interval between two lists of a provider from which nothing is expected."""
LISTING_INTERVAL_S = 2.0
"""The same while machines start or end; shorter in the first seconds after an order."""
STEP_INTERVAL_S = 1.0
"""The interval between two steps while something is expected; shorter in the first seconds after an order."""
MIN_INTERVAL_S = 0.3
LATE_FRACTION = 20
"""A machine may be noticed to be up this fraction of its boot time late."""
QUEUE_POLL_INTERVAL_S = 0.2
"""How often the request queue is checked."""


@contextmanager
def single_instance(path: Path) -> Iterator[None]:
    """Hold the lock of the one service that may rent. Raises UsageError if another process has it."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600), "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"another process holds {path}", hint="shoal-elastic.service runs already; two would rent twice"
            ) from None
        yield


class RentalService:
    """The service, with state between steps that only saves work."""

    def __init__(
        self, context: ServiceContext, *, requests: RequestQueue | None = None, status_file: Path | None = None
    ) -> None:
        self.context = context
        self._requests = requests
        self._status_file = status_file
        self._wake = asyncio.Event()
        self._listings = BackgroundCalls(context.step_wait_s, self._wake.set)
        self._releaser = InstanceReleaser(context, self._wake.set)
        self._booter = NodeBooter(context, self._wake.set)
        self._provisioner = Provisioner(context, self._wake.set)
        self._problem = ""
        self._hosts_recorded: dict[str, float] = {}
        """The time of the last list, by account, whose rented hosts are in the ledger."""

    @property
    def catalog(self) -> OfferCatalog:
        """The offers that providers listed."""
        return self._provisioner.catalog

    async def step(self, requests: Sequence[PowerRequest] = ()) -> float:
        """Do what is due. Returns the seconds until the next step, at most."""
        context = self.context
        if not context.leadership.superseded:
            await self._list_instances()
        if context.leadership.superseded:
            self._problem = context.leadership.superseded
            self._report(None)
            return RECONCILE_INTERVAL_S
        snapshot = await self._snapshot()
        try:
            if snapshot is None:
                # What Slurm wants is unknown. Deletes go on, and lifetimes are enforced.
                blind = ClusterSnapshot.of(context.clock.now(), (), (), context)
                await self._releaser.step(blind, without_slurm(context, blind))
                return STEP_INTERVAL_S
            await self._act(snapshot, requests)
            return self._next(snapshot)
        finally:
            self._report(snapshot)

    async def _act(self, snapshot: ClusterSnapshot, requests: Sequence[PowerRequest]) -> None:
        """What is due when it is known what Slurm wants."""
        context = self.context
        orphans: Mapping[str, Sequence[RentedInstance]] = {}
        try:
            self._provisioner.budgets.find_affordable(snapshot)
            orphans = await reconcile(context, snapshot)
            await end_machines(context, snapshot, self._provisioner.budgets.spent(snapshot.now))
            await self._booter.step(snapshot)
            context.record_starts(snapshot.jobs)
            await self._provisioner.step(snapshot, requests)
            await self._provisioner.comment_started(snapshot)
        finally:  # deletes go on, whatever failed before
            snapshot.refresh(context.ledger)
            await self._releaser.step(snapshot, orphans)

    async def run(self) -> None:
        """Repeat steps forever."""
        self.context.ledger.unblock_accounts()  # a person may have acted
        while True:
            self._wake.clear()
            try:
                wait = await self.step(self._requests.take() if self._requests else [])
            except Exception:
                # a failed step must not end the service: machines would cost on
                log.exception("a step failed; the next one retries")
                wait = STEP_INTERVAL_S
            await self._sleep(wait)

    async def close(self) -> None:
        for part in (self._booter, self._provisioner, self._releaser, self._listings):
            await part.close()
        for account in self.context.accounts.values():
            await account.provider.close()

    async def _list_instances(self) -> None:
        """List the machines of every account that is due."""
        context, now = self.context, self.context.clock.now()
        # machines that start or end, and spot machines, which may get notice
        awaited = [one for one in context.ledger.live() if one.state != "joined" or one.offer.market == "spot"]

        def due(account: AccountClient) -> bool:
            rentals = [rental for rental in awaited if rental.account == account.name]
            age = min(LISTING_INTERVAL_S, boot_interval(rentals, now)) if rentals else RECONCILE_INTERVAL_S
            return now >= account.next_listing(age)

        for account in context.accounts.values():
            if account.name not in self._listings.running and due(account):
                self._listings.start(account.name, account.list_instances())
        await self._listings.wait()
        for name, account in context.accounts.items():
            if account.listing is not None and account.listing.at > self._hosts_recorded.get(name, 0.0):
                record_hosts(context.ledger, name, account.listing, context.host_prices, account.abilities.billing)
                self._hosts_recorded[name] = account.listing.at
        context.leadership.check(context.accounts.values(), lambda token: context.ledger.get(token) is not None)

    async def _snapshot(self) -> ClusterSnapshot | None:
        slurm, busy = self.context.slurm, self._provisioner.busy
        try:
            # in this order: a node that is resumed for a job is one whose job is listed
            nodes = await slurm.nodes()
            jobs = await slurm.jobs()
        except SlurmError as error:
            self._note_problem(f"slurmctld does not answer: {error.message}")
            return None
        snapshot = ClusterSnapshot.of(self.context.clock.now(), nodes, jobs, self.context, busy)
        if self.context.set_by_node and not snapshot.nodes:
            # It has another slurm.conf than ours; never conclude that all nodes left the cluster.
            self._note_problem("slurmctld has none of the rented nodes; run `shoal up`")
            return None
        self._problem = ""
        return snapshot

    def _note_problem(self, problem: str) -> None:
        if not self._problem:
            log.warning("%s", problem)
        self._problem = problem

    def _next(self, snapshot: ClusterSnapshot) -> float:
        incomplete = any(rental.state != "joined" for rental in snapshot.rentals)
        if self._booter.waits or incomplete or any(map(wants_machine, snapshot.nodes.values())):
            return min(STEP_INTERVAL_S, boot_interval(snapshot.rentals, snapshot.now))
        spot = any(rental.offer.market == "spot" for rental in snapshot.rentals)
        wait = LISTING_INTERVAL_S if spot else RECONCILE_INTERVAL_S / 4
        retry_at = [retry_time(node) for node in snapshot.nodes.values() if "DOWN" in node.state and set_by_us(node)]
        return max(STEP_INTERVAL_S, min([wait, *(at - snapshot.now for at in retry_at)]))

    def _report(self, snapshot: ClusterSnapshot | None) -> None:
        if self._status_file is None:
            return
        context, rentals = self.context, snapshot.rentals if snapshot else self.context.ledger.live()
        left = {rental.account for rental in rentals} - context.accounts.keys()
        states = {job.id: job.state for job in snapshot.jobs} if snapshot else {}
        for job in context.job_comments.keys() - states.keys() if snapshot else ():
            del context.job_comments[job]
        status = ServiceStatus(
            at=context.clock.now(),
            problem=self._problem,
            accounts={name: account.problem for name, account in context.accounts.items()}
            | dict.fromkeys(left, "machines are rented there, but the spec has no such account"),
            jobs={job: text for job, text in context.job_comments.items() if states.get(job) != "RUNNING"},
            machines={rental.token: machine_entry(rental, self._booter.problem(rental)) for rental in rentals},
            hosts={host.token: machine_entry(host) for host in context.ledger.hosts(context.clock.now()) if host.live},
        )
        write_status(self._status_file, status)

    async def _sleep(self, seconds: float) -> None:
        """Wait until the time is over, a background call ends, or a request arrives."""
        loop = asyncio.get_running_loop()
        end = loop.time() + seconds
        while loop.time() < end and not self._wake.is_set() and not (self._requests and self._requests.waiting()):
            # not `wait_for`, which may swallow a cancellation when a join ends at the same moment
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(min(QUEUE_POLL_INTERVAL_S, max(0.0, end - loop.time()))):
                    await self._wake.wait()


def boot_interval(rentals: Iterable[Rental], now: float) -> float:
    """How long to wait before looking again whether the machine that was ordered last is up."""
    ages = [max(0.0, now - rental.intended_at) for rental in rentals if rental.state == "made"]
    return max(MIN_INTERVAL_S, min(ages) / LATE_FRACTION) if ages else LISTING_INTERVAL_S
