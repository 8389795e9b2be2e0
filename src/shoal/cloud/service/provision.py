"""Rents a machine for every node that Slurm resumes: all nodes of a job in one place, or none of them.

Where an offer is out, what was already ordered there is released and the next place is tried for the whole group. A
node gets no second order while the result of the first is unknown. When no offer is left, the nodes go down with the
reason and the job goes back into the queue. A slow provider delays its group across several steps, so each order starts
with a fresh look at what Slurm wants and what the ledger has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace

from shoal.cloud.providers.api import FailureKind, Offer, RentalOrder, RequestOutcome
from shoal.cloud.providers.http import gather_all
from shoal.cloud.rental import Rental
from shoal.cloud.service import offers as choose
from shoal.cloud.service.boot import boot_script
from shoal.cloud.service.budget import BudgetGuard
from shoal.cloud.service.context import ClusterSnapshot, ServiceContext, log
from shoal.cloud.service.machine_keys import MachineKey
from shoal.cloud.service.offers import OfferCatalog
from shoal.cloud.service.provider_account import MAX_FAILURES, UNREACHABLE_PAUSE_S, AccountClient, error_text
from shoal.cloud.service.scheduling import BackgroundCalls
from shoal.cloud.service.slurm import format_reason, is_registered, wants_machine
from shoal.cloud.service.slurm_requests import PowerRequest
from shoal.spec.rental import RentedSet


@dataclass
class NodeGroup:
    """The nodes of one job in one nodeset. They get machines in one place, or none of them does."""

    job: str
    """Empty if a person powered the node up without a job."""
    nodeset: RentedSet
    nodes: tuple[str, ...]
    rentals: dict[str, Rental] = field(default_factory=dict)
    """The rentals of its nodes."""
    last_refusal: str = ""
    """Why the last order failed."""

    @property
    def key(self) -> tuple[str, str]:
        """The job, or the node without a job, and the nodeset."""
        return self.job or self.nodes[0], self.nodeset.name

    @property
    def missing(self) -> list[str]:
        return [node for node in self.nodes if node not in self.rentals]

    @property
    def joined(self) -> list[Rental]:
        return [rental for rental in self.rentals.values() if rental.state == "joined"]

    @property
    def pending(self) -> list[Rental]:
        return [rental for rental in self.rentals.values() if rental.state != "joined"]


MAX_CONCURRENT_ORDERS = 16
"""The most concurrent calls to a provider that takes one order per call and requires no pause."""
MIN_RETRY_S, DEFAULT_RETRY_S, MAX_RETRY_S = 30.0, 600.0, 3600.0
"""How long a node without a machine stays down: at least, if the end is unknown, and at most."""
CONFLICT_RETRY_S = 15.0
MAX_CONFLICTS = 3
"""How often an order with a taken name is retried: the other machine may be ending."""
MAX_REPLACEMENTS = 2
"""How many machines of a job that did not become nodes are replaced: each of them cost money."""
NODES_PER_REPLACEMENT = 4
"""A job of many nodes gets one for so many nodes: some of many machines are bad."""


def max_replacements(nodes: int) -> int:
    """How many bad machines of a job with so many nodes are replaced."""
    return max(MAX_REPLACEMENTS, nodes // NODES_PER_REPLACEMENT)


class Provisioner:
    """Serves all groups concurrently. Its state between steps only saves orders."""

    def __init__(self, context: ServiceContext, wake: Callable[[], None] = lambda: None) -> None:
        self._context = context
        self.catalog = OfferCatalog(context)
        self.budgets = BudgetGuard(context)
        self._serving = BackgroundCalls(context.step_wait_s, wake)
        self._snapshot = ClusterSnapshot(context.clock.now(), {}, ())
        """Of the last step."""
        self._manual_nodes: set[str] = set()
        """Nodes that were powered up without a job, from power requests."""
        self._unneeded: set[str] = set()

    @property
    def busy(self) -> frozenset[Hashable]:
        """The keys of the groups that are being served."""
        return self._serving.running

    async def close(self) -> None:
        await self._serving.close()

    async def step(self, snapshot: ClusterSnapshot, requests: Sequence[PowerRequest] = ()) -> None:
        """Order machines for nodes that need them, as far as providers allow now."""
        for request in requests:
            if request.verb == "resume":
                self._manual_nodes |= set(request.nodes) - {node for _, nodes in request.jobs for node in nodes}
        self._snapshot = snapshot
        self.budgets.step(self.busy)
        groups = self._groups(snapshot)
        await self._power_down_unneeded(snapshot)
        in_turn = self.budgets.limited  # under a budget older jobs come first, unless a provider hangs
        for group in groups:
            self._serving.start(group.key, self._serve_logged(group))
            if in_turn:
                await self._serving.wait(group.key)
                in_turn = group.key not in self.busy
        await self._serving.wait()

    async def comment_started(self, snapshot: ClusterSnapshot) -> None:
        """Set the comment of jobs that have started to where their nodes come from."""
        for job in snapshot.jobs:
            if job.state == "RUNNING" and "trying " in self._context.job_comments.get(job.id, ""):
                places = dict.fromkeys(
                    f"{rental.account} {rental.offer.place}"
                    for node in job.nodes
                    for rental in snapshot.rentals_of(node)
                )
                await self._context.comment_job(job.id, f"rented from {', '.join(places)}")

    def _groups(self, snapshot: ClusterSnapshot) -> list[NodeGroup]:
        """The groups that need machines."""
        groups: dict[tuple[str, str], NodeGroup] = {}
        for node in snapshot.nodes.values():
            if not wants_machine(node) or snapshot.rentals_of(node.name):
                continue
            nodeset = self._context.set_by_node[node.name]
            job = next(iter(snapshot.jobs_on(node.name)), None)
            if job is None and node.name not in self._manual_nodes:
                continue
            name, beside = (job.id, job.nodes) if job else ("", (node.name,))
            nodes = tuple(one for one in beside if self._context.set_by_node.get(one) is nodeset)
            group = NodeGroup(name, nodeset, nodes)
            if group.key not in snapshot.busy | self.busy:
                groups.setdefault(group.key, group)
        return sorted(groups.values(), key=lambda group: (int(re.sub(r"\D.*", "", group.job) or 0), group.job))

    async def _power_down_unneeded(self, snapshot: ClusterSnapshot) -> None:
        """Power nodes down again whose job is gone, before anything is rented."""
        unneeded = {
            node.name
            for node in snapshot.nodes.values()
            if wants_machine(node)
            and not snapshot.rentals_of(node.name)
            and not snapshot.jobs_on(node.name)
            and node.name not in self._manual_nodes
        }
        confirmed = sorted(unneeded & self._unneeded)  # seen twice: the job may have come between two queries
        self._unneeded = unneeded
        self._manual_nodes &= {name for name, node in snapshot.nodes.items() if wants_machine(node)}
        if confirmed:
            log.info("no job waits for %s any more", ", ".join(confirmed))
            await self._context.update_slurm(self._context.slurm.power_down(confirmed))

    def _needs_machines(self, group: NodeGroup) -> bool:
        """Update a group's rentals. Returns whether it needs machines that Slurm still waits for."""
        snapshot = self._snapshot
        snapshot.refresh(self._context.ledger)
        group.rentals = {node: rental for node in group.nodes for rental in snapshot.rentals_of(node)[:1]}
        if self._context.leadership.superseded:
            return False
        return bool(group.missing) and all(
            node in snapshot.nodes
            and wants_machine(snapshot.nodes[node])
            and (
                any(job.id == group.job for job in snapshot.jobs_on(node)) if group.job else node in self._manual_nodes
            )
            for node in group.missing
        )

    async def _serve_logged(self, group: NodeGroup) -> None:
        """Serve a group. A bug with one job is logged and must not block the others."""
        try:
            await self._serve(group)
        except Exception:
            self.budgets.reserve(group.key, ())
            log.exception("cannot serve job %s; the next step retries", group.job or "(none)")

    async def _serve(self, group: NodeGroup) -> None:
        """Order until the group is complete, must wait, or no offer is left."""
        context = self._context
        group.last_refusal, rejected = context.rejected_machines(group.job)
        if rejected > max_replacements(len(group.nodes)) and self._needs_machines(group):
            why = f"{group.last_refusal}; no more are rented for this job: solve that, then submit it again"
            # Slurm offers it nodes again and again, and each refusal sets them down: not for long, others need them
            return await self._give_up(group, why, context.clock.now() + MIN_RETRY_S)
        while self._needs_machines(group):
            listed = await self.catalog.offers(group.nodeset)
            if not self._needs_machines(group):  # listing offers may take long
                break
            now = context.clock.now()
            blocks = context.blocks(group.nodeset.name)
            offers = self._near_joined(group, choose.candidates(group.nodeset, listed, blocks))
            if not offers and self.catalog.unsure(group.nodeset, blocks):
                return  # list again before the job is requeued
            if not offers:
                why, again = choose.why_none(group.nodeset, listed, blocks, now)
                return await self._give_up(group, why or "the job's other nodes cannot be joined", again)
            offer, refusal = self._affordable(group, offers, now)
            if refusal:
                why = f"{group.last_refusal}; {refusal}" if group.last_refusal else refusal
                if going := self._make_room(group, offer):
                    return await context.comment_job(group.job, f"{why}; waiting for {going} to end")
                self.budgets.note_refusal(group.key, group.nodeset.name, group.nodes, len(group.joined), offers)
                return await self._give_up(group, why, None)
            if not all(one.offer.identity == offer.identity for one in group.pending):
                self._drop(group, f"the job's nodes must be in one place: {group.last_refusal}")
                continue
            account = context.accounts[offer.provider]
            self._reserve(group, offer, account)  # for all of its nodes or none
            await context.comment_job(group.job, choose.trying_text(offer, group.last_refusal))
            if not account.may_order() or (key_name := await self._key_name(account)) is None:
                return  # until the next step
            if self._needs_machines(group):
                await self._order(group, offer, account, key_name)
        self.budgets.reserve(group.key, ())

    def _make_room(self, group: NodeGroup, offer: Offer) -> str:
        """Release machines elsewhere than the next offer. Returns those of the group that end and still cost money."""
        for rental in group.pending:
            if rental.offer.identity != offer.identity:  # it counts until it has ended
                self._context.release(rental, f"the next place is tried: {group.last_refusal}")
        self._needs_machines(group)
        return ", ".join(
            f"{one.id or 'an order'} of {one.account}"
            for one in self._snapshot.rentals
            if one.node in group.missing and not one.billed_until and one.account in self._context.accounts
        )

    def _near_joined(self, group: NodeGroup, offers: list[Offer]) -> list[Offer]:
        """If some nodes of the job already work, only offers in their place."""
        if not group.joined:
            return offers
        offer = group.joined[0].offer
        near = [one for one in offers if (one.provider, one.place) == (offer.provider, offer.place)]
        usable = offer.provider in self._context.accounts
        return near or ([offer] if usable and self._failures(group) < MAX_REPLACEMENTS else [])

    def _failures(self, group: NodeGroup) -> int:
        """How often machines for the missing nodes have failed for this job."""
        histories = (self._context.ledger.of_node(node) for node in group.missing)
        return max(sum(group.job in one.jobs and one.joined_at is None for one in history) for history in histories)

    def _affordable(self, group: NodeGroup, offers: Sequence[Offer], now: float) -> tuple[Offer, str]:
        """The first offer that all budgets allow for the whole group, or why there is none."""
        refusals: list[str] = []
        started = {rental.offer.identity for rental in group.pending}
        offers = sorted(offers, key=lambda offer: offer.identity not in started)  # first those that are on order
        for offer in offers:
            # pending orders of the same offer already count
            count = len(group.missing) + sum(one.offer.identity != offer.identity for one in group.pending)
            why = self.budgets.refusal(group.key, group.nodeset.name, offer, count, now)
            if why is None:
                return offer, ""
            refusals.append(why)
        return offers[0], refusals[0]

    def _reserve(self, group: NodeGroup, offer: Offer, account: AccountClient) -> None:
        """Reserve budget for the machines that a group still needs."""
        self.budgets.reserve(group.key, self._rentals(group, group.missing, offer, account))

    def _rentals(self, group: NodeGroup, nodes: Sequence[str], offer: Offer, account: AccountClient) -> list[Rental]:
        return [
            Rental(
                token=self._context.leadership.token(),
                node=node,
                nodeset=group.nodeset.name,
                account=account.name,
                offer=offer,
                usd_hour=offer.usd_hour,
                intended_at=self._context.clock.now(),
                jobs=(group.job,) if group.job else (),
                billing=account.abilities.billing,
            )
            for node in nodes
        ]

    async def _key_name(self, account: AccountClient) -> str | None:
        try:
            return await account.key_name(self._context.public_key)
        except Exception as error:
            log.warning("%s: %s", account.name, error_text(error))
            account.not_before = self._context.clock.now() + MIN_RETRY_S
            return None

    async def _order(self, group: NodeGroup, offer: Offer, account: AccountClient, key_name: str) -> None:
        """One round of orders for one offer: record, send, and record each result."""
        context, able = self._context, account.abilities
        now = context.clock.now()
        nodes = group.missing[: able.at_once * (1 if able.create_interval else MAX_CONCURRENT_ORDERS)]
        rentals, keys = self._rentals(group, nodes, offer, account), {}
        if able.boots_with != "none":
            calls = (len(rentals) + able.at_once - 1) // able.at_once
            made = [MachineKey.make() for _ in range(calls)]  # the machines of one call get one boot script
            keys = {rental.token: made[number // able.at_once] for number, rental in enumerate(rentals)}
            rentals = [replace(rental, host_key=keys[rental.token].public) for rental in rentals]
        context.ledger.record_order_time(account.name, now)
        context.ledger.intend(*rentals)
        group.rentals.update({rental.node: rental for rental in rentals})
        self.budgets.ordered(rentals)
        self._reserve(group, offer, account)  # for the rest

        async def send(some: Sequence[Rental]) -> None:
            orders = [self._rental_order(one, group.nodeset, key_name, keys.get(one.token)) for one in some]
            outcomes = await account.order(orders)
            for rental, outcome in zip(some, outcomes, strict=True):
                self._record_outcome(group, rental, outcome, account)

        await gather_all(send(rentals[start : start + able.at_once]) for start in range(0, len(rentals), able.at_once))

    def _record_outcome(
        self, group: NodeGroup, rental: Rental, outcome: RequestOutcome, account: AccountClient
    ) -> None:
        """Record the result of one order."""
        context, now = self._context, self._context.clock.now()
        if outcome.ok:
            context.ledger.record_machine(rental.token, outcome.id, outcome.usd_hour, now)
            return
        assert outcome.failure is not None
        log.info("%s: %s: %s", rental.node, rental.account, outcome.message or outcome.failure.value)
        if outcome.failure is FailureKind.AMBIGUOUS:
            return  # the rental stays intended, and is searched for
        if not self._failed(rental, outcome.failure, outcome.message, now):
            return
        if outcome.failure is FailureKind.TRANSIENT and account.refusals >= MAX_FAILURES:
            why = f"{account.name} does not answer"
            context.ledger.block(account.name, "", "", "", now + UNREACHABLE_PAUSE_S, why)
            group.last_refusal = why
        elif outcome.failure is FailureKind.CONFLICT and self._conflicts(rental) < MAX_CONFLICTS:
            account.not_before = max(account.not_before, now + CONFLICT_RETRY_S)
        elif block := choose.block_for(rental.offer, outcome, now):
            context.ledger.block(block.account, block.type, block.place, block.market, block.until, block.why)
            group.last_refusal = block.why

    def _rental_order(
        self, rental: Rental, nodeset: RentedSet, key_name: str, host_key: MachineKey | None
    ) -> RentalOrder:
        return RentalOrder(
            cluster=self._context.cluster,
            node=rental.node,
            token=rental.token,
            offer=rental.offer,
            public_key=self._context.public_key,
            key_name=key_name,
            user_data=boot_script(self._context.accounts[rental.account].abilities, nodeset.lifetime, host_key),
            image=choose.image_of(nodeset, rental.offer),
            disk_gb=nodeset.disk_gb,
            cpus=nodeset.cpus or 0,
            memory_mb=nodeset.memory_mb or 0,
            ports=self._context.ports,
            lifetime=nodeset.lifetime,
        )

    def _failed(self, rental: Rental, failure: FailureKind, message: str, now: float) -> bool:
        """Record that an order failed; False if its machine is listed nevertheless."""
        before = self._context.ledger.get(rental.token)
        if before is not None and before.id:
            return False
        if before is not None and before.state == "releasing":  # released before the answer came
            self._context.ledger.record_end(rental.token, now)
        else:
            self._context.ledger.record_failure(rental.token, failure, message, now)
        self.budgets.uncount(rental)
        return True

    def _drop(self, group: NodeGroup, why: str) -> None:
        """Release the machines of a group whose nodes do not take jobs yet."""
        for rental in group.pending:
            self._context.release(rental, why)
            self.budgets.uncount(rental)

    def _conflicts(self, rental: Rental) -> int:
        """How often the name was taken recently in this place."""
        since, place = rental.intended_at - DEFAULT_RETRY_S, rental.offer.place
        before = [one for one in self._context.ledger.of_node(rental.node) if one.intended_at >= since]
        return sum(one.trouble == FailureKind.CONFLICT.value and one.offer.place == place for one in before)

    async def _give_up(self, group: NodeGroup, why: str, again: float | None) -> None:
        """No offer is left: requeue the job and release its machines."""
        context, now = self._context, self._context.clock.now()
        self.budgets.reserve(group.key, ())
        log.warning("job %s gets no nodes from %s: %s", group.job or "(none)", group.nodeset.name, why)
        self._drop(group, f"the job cannot get all its nodes: {why}")
        await context.comment_job(group.job, why)
        until = now + (DEFAULT_RETRY_S if again is None else min(max(again - now, MIN_RETRY_S), MAX_RETRY_S))
        joined = [rental.node for rental in group.joined]
        resuming = [node for node in group.nodes if node not in joined]
        await context.update_slurm(context.slurm.down(resuming, format_reason(why, until)))
        # nodes that only this job used are idle now
        alone = [
            node
            for node in joined
            if all(job.id == group.job for job in self._snapshot.jobs_on(node))
            and node in self._snapshot.nodes
            and is_registered(self._snapshot.nodes[node])
        ]
        if alone:
            await context.update_slurm(context.slurm.power_down(alone))
