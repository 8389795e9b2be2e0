"""Ends rentals: warns the jobs of a machine that is about to go, drains its node, and deletes the machine.

The end of a machine is known beforehand when its provider gives notice, when its lifetime is over, and when the budget
is spent and says `then: end`. Then

    at once          jobs that `shoal run` started get the warning signal, and the node takes no new ones
    shortly before   what still runs is requeued
    when it is free  the node is set down and powered down, and its machine is deleted

The progress is in the reason of the node, so a restarted service continues from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shoal.cloud.providers.api import RentedInstance
from shoal.cloud.rental import Rental
from shoal.cloud.service.context import ClusterSnapshot, ServiceContext, log
from shoal.cloud.service.provider_account import DELETE_RETRY_S, AccountClient
from shoal.cloud.service.scheduling import BackgroundCalls, is_due
from shoal.cloud.service.slurm import QueuedJob, format_reason, is_registered, reason_text, retry_time, set_by_us
from shoal.contract import GRACE_S
from shoal.roles.rented import NOTICE_REASON
from shoal.slurm.state import NodeState

STOP_S = 30.0
"""How long a machine that its provider already stops goes on, at most."""
REQUEUE_MARGIN_S = 5.0
"""How long before the end jobs that still run are requeued."""


async def end_machines(context: ServiceContext, snapshot: ClusterSnapshot, spent: Mapping[str, str]) -> None:
    """Warn and drain machines that are about to end. `spent` has the nodesets to end now, with the reason."""
    for rental in snapshot.rentals:
        with context.isolated(rental.node):
            await _end_machine(context, snapshot, rental, spent)


async def _end_machine(
    context: ServiceContext, snapshot: ClusterSnapshot, rental: Rental, spent: Mapping[str, str]
) -> None:
    node = snapshot.nodes.get(rental.node)
    if rental.state != "joined" or node is None or not is_registered(node):
        return
    jobs = snapshot.jobs_on(rental.node)
    if "DRAIN" in node.state and set_by_us(node):
        if not jobs or snapshot.now >= retry_time(node):
            await _take_node_down(context, rental, jobs, reason_text(node), snapshot.now)
    elif termination := _termination(context, rental, node, snapshot.now, spent):
        await _warn(context, rental, jobs, *termination, snapshot.now)


async def _warn(
    context: ServiceContext, rental: Rental, jobs: Sequence[QueuedJob], why: str, seconds: float, now: float
) -> None:
    log.warning("%s: %s; %d jobs on it have %.0f s", rental.node, why, len(jobs), seconds)
    for job in jobs:
        # a second signal is harmless: a service may have been killed before it recorded the first
        if job.saves:
            await context.update_slurm(context.slurm.warn(job.id))
        await context.comment_job(job.id, f"{rental.node}: {why}")
    until = now + (max(0.0, seconds - REQUEUE_MARGIN_S) if jobs else 0.0)
    await context.update_slurm(context.slurm.drain([rental.node], format_reason(why, until)))


async def _take_node_down(
    context: ServiceContext, rental: Rental, jobs: Sequence[QueuedJob], why: str, now: float
) -> None:
    """Requeue the remaining jobs of a node and set it down."""
    for job in jobs:
        await context.update_slurm(context.slurm.requeue(job.id))
    await context.update_slurm(context.slurm.down([rental.node], format_reason(why, now)))


def _termination(
    context: ServiceContext, rental: Rental, node: NodeState, now: float, spent: Mapping[str, str]
) -> tuple[str, float] | None:
    """Why a machine ends, and how many seconds its jobs have."""
    account = context.accounts.get(rental.account)
    machine = account.machine(rental) if account else None
    if account is not None and node.reason == NOTICE_REASON:  # its machine read that, at the start of the notice
        return f"{rental.account} takes {rental.id} away", account.abilities.notice_s
    if account is not None and machine is not None and machine.ending:
        return f"{rental.account} takes {rental.id} away", min(account.abilities.notice_s, STOP_S)
    nodeset = context.sets.get(rental.nodeset)
    if nodeset is not None and nodeset.lifetime and (left := rental.begun + nodeset.lifetime - now) <= GRACE_S:
        return f"its lifetime of {nodeset.lifetime} s is over", max(0.0, left)
    return (spent[rental.nodeset], GRACE_S) if rental.nodeset in spent else None


@dataclass
class InstanceReleaser:
    """Deletes machines. A restarted service repeats requests, which is harmless."""

    context: ServiceContext
    wake: Callable[[], None] = lambda: None
    """Called when a background delete has ended."""
    _asked: dict[str, float] = field(default_factory=dict)
    """When a delete was last requested, by token."""
    _taken: dict[str, float] = field(default_factory=dict)
    """When the provider accepted it."""
    _deletes: BackgroundCalls = field(init=False)

    def __post_init__(self) -> None:
        self._deletes = BackgroundCalls(self.context.step_wait_s, self.wake)

    async def step(
        self, snapshot: ClusterSnapshot, orphans: Mapping[str, Sequence[RentedInstance]] = MappingProxyType({})
    ) -> None:
        """Delete released machines, and mark those as gone that are no longer listed. `orphans` have no rental."""
        going: dict[str, list[Rental]] = {}
        for rental in snapshot.rentals:
            if rental.state != "releasing" or not rental.id or rental.account not in self.context.accounts:
                continue  # an order without an id is still searched for
            account = self.context.accounts[rental.account]
            if self._is_gone(account, rental):
                with self.context.isolated(rental.node):
                    self.context.ledger.record_end(rental.token, snapshot.now)
                    self._asked.pop(rental.token, None)
                    self._taken.pop(rental.token, None)
            elif is_due(self._asked.get(rental.token, float("-inf")) + DELETE_RETRY_S, snapshot.now):
                going.setdefault(rental.account, []).append(rental)
        for name in {*going, *orphans} - self._deletes.running:
            account = self.context.accounts[name]
            self._deletes.start(name, self._delete(account, going.get(name, ()), orphans.get(name, ())))
        await self._deletes.wait()
        snapshot.refresh(self.context.ledger)

    async def close(self) -> None:
        await self._deletes.close()

    def _is_gone(self, account: AccountClient, rental: Rental) -> bool:
        if account.gone(rental):
            return True
        taken = self._taken.get(rental.token)
        return (
            taken is not None
            and account.listing is not None
            and account.listing.at > taken
            and not account.machine(rental)
        )

    def _runs_on(self, account: AccountClient, rental: Rental) -> bool:
        """Whether a machine is listed as running although its provider accepted the delete: it still costs money."""
        machine, since = account.machine(rental), rental.billed_until
        listed_after = account.listing is not None and since is not None and account.listing.at > since
        return listed_after and machine is not None and machine.state in ("pending", "up")

    async def _delete(
        self, account: AccountClient, rentals: Sequence[Rental], orphans: Sequence[RentedInstance]
    ) -> None:
        now = self.context.clock.now()
        machines = [
            account.machine(rental) or _instance_from_rental(self.context.cluster, rental) for rental in rentals
        ]
        there = {
            rental.node: machine
            for rental, machine in zip(rentals, machines, strict=True)
            if rental.token not in self._asked and machine.state == "up"
        }
        for rental in rentals:
            self._asked[rental.token] = now
        try:
            await self.context.joiner.leave(there)
        except Exception:  # a machine that cannot log out must not cost on
            log.exception("%s: cannot log out %s", account.name, ", ".join(there))
        outcomes = await account.delete([*machines, *orphans])
        for machine, outcome in zip(orphans, outcomes[len(machines) :], strict=True):
            result = "deleted" if outcome.ok else f"cannot be deleted: {outcome.message}"
            log.warning("%s: orphan %s (%s) %s", account.name, machine.id, machine.node, result)
        for rental, outcome in zip(rentals, outcomes[: len(machines)], strict=True):
            current = self.context.ledger.get(rental.token)
            if current is None or current.state != "releasing":
                continue  # a list has already shown that it is gone
            if outcome.ok:
                if rental.billed_until is None or self._runs_on(account, rental):
                    self.context.ledger.record_billing(rental.token, until=self.context.clock.now())
                self._taken[rental.token] = self.context.clock.now()
            else:
                self._asked[rental.token] = now + max(0.0, outcome.retry_after - DELETE_RETRY_S)
                log.warning("%s: cannot delete %s: %s", account.name, rental.id, outcome.message)


def _instance_from_rental(cluster: str, rental: Rental) -> RentedInstance:
    """A machine that is known only by its id: lists lag, and it must be deleted all the same."""
    offer = rental.offer
    return RentedInstance(
        id=rental.id,
        cluster=cluster,
        node=rental.node,
        token=rental.token,
        state="pending",
        raw_state="",
        type=offer.type,
        region=offer.region,
        zone=offer.zone,
        market=offer.market,
    )
