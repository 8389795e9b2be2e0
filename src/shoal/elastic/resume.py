"""Rents a machine for every node that Slurm wakes: all nodes of a job in one place, or none of them.

A group is the nodes of one job in one nodeset. Its offers are tried in order, within the same job of Slurm: where one
is out, what was already ordered there is given back and the next place is tried for the whole group. Before an order
goes out its price must fit the budget, and it stands in the ledger; nothing is ordered twice for a node while it is
open what became of the first order. When nothing is left to try, the nodes go down with the reason and the job back
into the queue, until what was out may be had again.

Groups are served side by side. Where a provider takes long to answer, its group is still being served when the next
steps come, so before each order it is looked at again: what Slurm wants and what the ledger has may have changed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Sequence

from shoal.elastic import choose
from shoal.elastic.background import BackgroundCalls
from shoal.elastic.budget_guard import BudgetGuard
from shoal.elastic.catalog import Catalog
from shoal.elastic.fleet import Fleet, World, all_of, log
from shoal.elastic.group import Group
from shoal.elastic.inbox import Request
from shoal.elastic.rentals import Rental
from shoal.elastic.slurm import in_use, reason, wants_machine
from shoal.elastic.source import PATIENCE, SILENT_SECONDS, Source, told
from shoal.elastic.unclaimed import boot_script
from shoal.providers.rental import Offer, Order, Outcome, Trouble
from shoal.spec.rented import RentedSet

SIDE_BY_SIDE = 16
"""So many orders are under way at one provider that takes one at a time and asks for no pause."""
SHORTEST, USUAL, LONGEST = 30.0, 600.0, 3600.0
"""A node for which there is no machine is down for so long at least, where nobody knows better, and at most."""
CONFLICT_SECONDS = 15.0
CONFLICTS = 3
"""A name that is taken is tried again so often: what had it may be on its way out."""
REPLACED = 2
"""A machine that fails beside others that serve the job already is replaced in the same place so often."""


class Resume:
    """Serves all groups, side by side. What it remembers of notes saves an order now and then, and no more."""

    def __init__(self, fleet: Fleet, wake: Callable[[], None] = lambda: None) -> None:
        self._fleet = fleet
        self._catalog = Catalog(fleet)
        self._budgets = BudgetGuard(fleet)
        self._serving = BackgroundCalls(fleet.patience, wake)
        self._world = World(fleet.clock.now(), {}, ())
        """As the last step found it."""
        self._by_hand: set[str] = set()
        """Nodes that somebody has woken without a job, as Slurm's notes say."""
        self._needless: set[str] = set()

    @property
    def busy(self) -> frozenset[Hashable]:
        """The groups that are being served now, by their keys."""
        return self._serving.running

    async def close(self) -> None:
        await self._serving.close()

    def spent(self, now: float) -> dict[str, str]:
        """The nodesets whose machines are to go because a budget says so, each with the reason."""
        return self._budgets.spent(now)

    async def step(self, world: World, requests: Sequence[Request] = ()) -> None:
        """Order what is wanted and not ordered, as far as providers let us now."""
        for request in requests:
            if request.verb == "resume":
                self._by_hand |= set(request.nodes) - {node for _, nodes in request.jobs for node in nodes}
        self._world = world
        self._budgets.step(self.busy)
        groups = self._groups(world)
        await self._leave(world)
        in_turn = self._budgets.limited  # whose job came first chooses first, as long as nobody hangs
        for group in groups:
            self._serving.start(group.key, self._served(group))
            if in_turn:
                await self._serving.wait(group.key)
                in_turn = group.key not in self.busy
        await self._serving.wait()

    async def arrived(self, world: World) -> None:
        """Say on jobs that have started where their nodes come from, in place of where they were looked for."""
        for job in world.jobs:
            if job.state == "RUNNING" and "trying " in self._fleet.said.get(job.id, ""):
                places = dict.fromkeys(
                    f"{rental.account} {rental.offer.place}" for node in job.nodes for rental in world.kept(node)
                )
                await self._fleet.say(job.id, f"rented from {', '.join(places)}")

    def _groups(self, world: World) -> list[Group]:
        """The groups that lack machines."""
        groups: dict[tuple[str, str], Group] = {}
        for node in world.nodes.values():
            if not wants_machine(node) or world.kept(node.name):
                continue
            nodeset = self._fleet.set_by_node[node.name]
            job = next(iter(world.jobs_on(node.name)), None)
            if job is None and node.name not in self._by_hand:
                continue
            name, beside = (job.id, job.nodes) if job else ("", (node.name,))
            nodes = tuple(one for one in beside if self._fleet.set_by_node.get(one) is nodeset)
            group = Group(name, nodeset, nodes)
            if group.key not in world.busy | self.busy:
                groups.setdefault(group.key, group)
        return sorted(groups.values(), key=lambda group: (int(re.sub(r"\D.*", "", group.job) or 0), group.job))

    async def _leave(self, world: World) -> None:
        """Send nodes back to sleep that are woken for a job which is no longer there, before anything is rented."""
        needless = {
            node.name
            for node in world.nodes.values()
            if wants_machine(node)
            and not world.kept(node.name)
            and not world.jobs_on(node.name)
            and node.name not in self._by_hand
        }
        sure = sorted(needless & self._needless)  # seen twice: the job may have come between two questions
        self._needless = needless
        self._by_hand = {node for node in self._by_hand if node in world.nodes and wants_machine(world.nodes[node])}
        if sure:
            log.info("nobody waits for %s any more", ", ".join(sure))
            await self._fleet.tell(self._fleet.slurm.power_down(sure))

    def _looked_at(self, group: Group) -> bool:
        """Take in what has become of a group's machines. Whether it lacks some, and Slurm still waits for them."""
        world = self._world
        world.read(self._fleet.ledger)
        group.kept = {node: rental for node in group.nodes for rental in world.kept(node)[:1]}
        if self._fleet.fence.ended:
            return False
        return bool(group.wanting) and all(
            node in world.nodes
            and wants_machine(world.nodes[node])
            and (any(job.id == group.job for job in world.jobs_on(node)) if group.job else node in self._by_hand)
            for node in group.wanting
        )

    async def _served(self, group: Group) -> None:
        """Serve a group. A bug that shows with one job is told of, and keeps no other from being served."""
        try:
            await self._serve(group)
        except Exception:
            self._budgets.reserve(group.key, ())
            log.exception("job %s could not be served; the next step tries again", group.job or "(none)")

    async def _serve(self, group: Group) -> None:
        """Order until the group has what it wants, must wait, or nothing is left to try."""
        fleet = self._fleet
        while self._looked_at(group):
            listed = await self._catalog.offers(group.nodeset)
            if not self._looked_at(group):  # a provider was asked, which may take long
                break
            now = fleet.clock.now()
            blocks = fleet.ledger.blocks(now)
            offers = self._beside(group, choose.candidates(group.nodeset, listed, blocks))
            if not offers and self._catalog.unsure(group.nodeset, blocks):
                return  # ask again before a job is sent back
            if not offers:
                why, again = choose.why_none(group.nodeset, listed, blocks, now)
                return await self._give_up(group, why or "the job's other nodes cannot be joined", again)
            offer, refusal = self._affordable(group, group.begun_first(offers), now)
            if refusal:
                why = f"{group.trouble}; {refusal}" if group.trouble else refusal
                if going := self._going(group):  # and makes room
                    return await fleet.say(group.job, f"{why}; waiting for {going} to go")
                return await self._give_up(group, why, None)
            if not all(one.offer.identity == offer.identity for one in group.coming):
                for rental in group.coming:
                    self._drop(rental, f"the job's nodes are to be in one place: {group.trouble}")
                continue
            source = fleet.sources[offer.provider]
            self._reserve(group, offer, source)  # so that it gets all of its nodes or none
            await fleet.say(group.job, choose.trying(offer, group.trouble))
            if not source.may_order() or (key_name := await self._key_name(source)) is None:
                return  # until the next step
            if self._looked_at(group):
                await self._order(group, offer, source, key_name)
        self._budgets.reserve(group.key, ())

    def _going(self, group: Group) -> str:
        """What these nodes had, still costs and is on its way out: what no account is left for is not."""
        return ", ".join(
            f"{one.id or 'an order'} of {one.account}"
            for one in self._world.rentals
            if one.node in group.wanting and not one.billed_until and one.account in self._fleet.sources
        )

    def _beside(self, group: Group, offers: list[Offer]) -> list[Offer]:
        """Where some nodes of the job work already, the others belong beside them."""
        if not group.serving:
            return offers
        offer = group.serving[0].offer
        near = [one for one in offers if (one.provider, one.place) == (offer.provider, offer.place)]
        known = offer.provider in self._fleet.sources
        return near or ([offer] if known and self._failures(group) < REPLACED else [])

    def _failures(self, group: Group) -> int:
        """How often machines for the nodes that still lack one came to nothing, for this job."""
        histories = (self._fleet.ledger.of_node(node) for node in group.wanting)
        return max(sum(group.job in one.jobs and one.joined_at is None for one in history) for history in histories)

    def _affordable(self, group: Group, offers: Sequence[Offer], now: float) -> tuple[Offer, str]:
        """The first offer that every budget admits for all that the group lacks, or why there is none."""
        refusals: list[str] = []
        for offer in offers:
            # What is on its way counts already, where the group stays with its offer.
            count = len(group.wanting) + sum(one.offer.identity != offer.identity for one in group.coming)
            why = self._budgets.refusal(group.key, group.nodeset.name, offer, count, now)
            if why is None:
                return offer, ""
            refusals.append(why)
        return offers[0], refusals[0]

    def _reserve(self, group: Group, offer: Offer, source: Source) -> None:
        """What a group still lacks counts as ordered for the others."""
        self._budgets.reserve(group.key, self._rentals(group, group.wanting, offer, source))

    def _rentals(self, group: Group, nodes: Sequence[str], offer: Offer, source: Source) -> list[Rental]:
        now, fence = self._fleet.clock.now(), self._fleet.fence
        return [group.rental(fence.token(), node, offer, source, now) for node in nodes]

    async def _key_name(self, source: Source) -> str | None:
        try:
            return await source.key_name(self._fleet.public_key)
        except Exception as error:
            log.warning("%s: %s", source.name, told(error))
            source.not_before = self._fleet.clock.now() + SHORTEST
            return None

    async def _order(self, group: Group, offer: Offer, source: Source, key_name: str) -> None:
        """One round of orders at one offer: written down, sent, and what came of each written down."""
        fleet, able = self._fleet, source.abilities
        now = fleet.clock.now()
        nodes = group.wanting[: able.at_once * (1 if able.create_interval else SIDE_BY_SIDE)]
        rentals = self._rentals(group, nodes, offer, source)
        fleet.ledger.paced(source.name, now)
        fleet.ledger.intend(*rentals)
        group.kept.update({rental.node: rental for rental in rentals})
        self._budgets.ordered(rentals)
        self._reserve(group, offer, source)  # what is left of it

        async def send(some: Sequence[Rental]) -> None:
            outcomes = await source.order([self._order_of(rental, group.nodeset, key_name) for rental in some])
            for rental, outcome in zip(some, outcomes, strict=True):
                self._note(group, rental, outcome, source)

        await all_of(send(rentals[start : start + able.at_once]) for start in range(0, len(rentals), able.at_once))

    def _note(self, group: Group, rental: Rental, outcome: Outcome, source: Source) -> None:
        """Write down what came of one order."""
        fleet, now = self._fleet, self._fleet.clock.now()
        if outcome.ok:
            fleet.ledger.made(rental.token, outcome.id, outcome.usd_hour, now)
            return
        assert outcome.trouble is not None
        log.info("%s: %s: %s", rental.node, rental.account, outcome.message or outcome.trouble.value)
        if outcome.trouble is Trouble.AMBIGUOUS:
            return  # it stays as it is, and is looked for
        if not self._failed(rental, outcome.trouble, outcome.message, now):
            return
        if outcome.trouble is Trouble.TRANSIENT and source.refusals >= PATIENCE:
            why = f"{source.name} cannot be asked"
            fleet.ledger.block(source.name, "", "", "", now + SILENT_SECONDS, why)
            group.trouble = why
        elif outcome.trouble is Trouble.CONFLICT and self._conflicts(rental) < CONFLICTS:
            source.not_before = max(source.not_before, now + CONFLICT_SECONDS)
        elif block := choose.block(rental.offer, outcome, now):
            fleet.ledger.block(block.account, block.type, block.place, block.market, block.until, block.why)
            group.trouble = block.why

    def _order_of(self, rental: Rental, nodeset: RentedSet, key_name: str) -> Order:
        return Order(
            cluster=self._fleet.cluster,
            node=rental.node,
            token=rental.token,
            offer=rental.offer,
            public_key=self._fleet.public_key,
            key_name=key_name,
            user_data=boot_script(self._fleet.sources[rental.account].abilities, nodeset.lifetime),
            disk_gb=nodeset.disk_gb,
            lifetime=nodeset.lifetime,
        )

    def _failed(self, rental: Rental, trouble: Trouble, message: str, now: float) -> bool:
        """Write down that nothing was made; False where a machine of that order is listed all the same."""
        before = self._fleet.ledger.get(rental.token)
        if before is not None and before.id:
            return False
        if before is not None and before.state == "releasing":  # nobody wanted it any more when the answer came
            self._fleet.ledger.gone(rental.token, now)
        else:
            self._fleet.ledger.failed(rental.token, trouble, message, now)
        self._budgets.uncount(rental)
        return True

    def _drop(self, rental: Rental, why: str) -> None:
        self._fleet.release(rental, why)
        self._budgets.uncount(rental)

    def _conflicts(self, rental: Rental) -> int:
        """How often the name was taken, of late, where this order went."""
        since = rental.intended_at - USUAL
        before = [one for one in self._fleet.ledger.of_node(rental.node) if one.intended_at >= since]
        return sum(one.trouble == Trouble.CONFLICT.value and one.offer.place == rental.offer.place for one in before)

    async def _give_up(self, group: Group, why: str, again: float | None) -> None:
        """Nothing is left to try now: the job goes back into the queue, and what it has of machines is given back."""
        fleet, now = self._fleet, self._fleet.clock.now()
        self._budgets.reserve(group.key, ())
        log.warning("job %s gets no nodes of %s: %s", group.job or "(none)", group.nodeset.name, why)
        for rental in group.coming:
            self._drop(rental, f"the job does not get all its nodes: {why}")
        await fleet.say(group.job, why)
        until = now + (USUAL if again is None else min(max(again - now, SHORTEST), LONGEST))
        waking = [node for node in group.nodes if node not in {rental.node for rental in group.serving}]
        await fleet.tell(fleet.slurm.down(waking, reason(why, until)))
        # What serves this job alone has nothing to do any more.
        alone = [
            rental.node
            for rental in group.serving
            if all(job.id == group.job for job in self._world.jobs_on(rental.node))
            and rental.node in self._world.nodes
            and in_use(self._world.nodes[rental.node])
        ]
        if alone:
            await fleet.tell(fleet.slurm.power_down(alone))
