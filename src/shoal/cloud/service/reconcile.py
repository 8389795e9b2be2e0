"""Compares what Slurm wants, what the ledger has and what providers list, and corrects the differences.

Slurm is what is wanted, the provider what exists, and the ledger says whose a machine is. Each rule looks only at the
present state, so it does not matter where the service was last killed.

    machine without a rental        orphan: deleted after its grace time, until no list shows it
    rental without a machine        lost: the node is set down, its jobs are requeued, and it may be resumed again
    node powered down, rental live  released
    node powered down, lacking      it gets the features back that its last machine did not have
    node in use, no rental          set down, and powered down
    node down by us or by Slurm     its rental is released; when its time has come it is powered down,
                                    and earlier when the budget that kept it down allows it
    node down by a person           left alone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal

from shoal.cloud.providers.api import FailureKind, RentedInstance
from shoal.cloud.rental import Rental, price_of
from shoal.cloud.service import slurm
from shoal.cloud.service.context import ClusterSnapshot, ServiceContext, log
from shoal.cloud.service.provider_account import LOST_ORDER_SEARCH_S, AccountClient
from shoal.cloud.service.scheduling import is_due
from shoal.slurm.state import NodeState


async def reconcile(context: ServiceContext, snapshot: ClusterSnapshot) -> dict[str, list[RentedInstance]]:
    """Compare once. Its decisions are in the ledger and in Slurm when it returns; the releaser deletes.

    Returns orphans, by account: machines to delete that the ledger does not have.
    """
    _update_rentals(context, snapshot)
    lost = await _handle_lost(context, snapshot)
    snapshot.refresh(context.ledger)
    await _correct_nodes(context, snapshot, lost)
    await _restore_features(context, snapshot)
    return _orphans_by_account(context, snapshot)


def without_slurm(context: ServiceContext, snapshot: ClusterSnapshot) -> dict[str, list[RentedInstance]]:
    """The same while Slurm does not answer: only lifetimes and orphans."""
    _update_rentals(context, snapshot)
    return _orphans_by_account(context, snapshot)


def _update_rentals(context: ServiceContext, snapshot: ClusterSnapshot) -> None:
    """Find the machines of orders whose answer was lost, update prices, and release machines whose lifetime is over."""
    for rental in snapshot.rentals:
        with context.isolated(rental.node):
            _find_machine(context, rental, snapshot.now)
    snapshot.refresh(context.ledger)
    for rental in snapshot.rentals:  # whatever the state of their nodes: their jobs were warned before
        nodeset = context.sets.get(rental.nodeset)
        if nodeset is not None and nodeset.lifetime and snapshot.now >= rental.begun + nodeset.lifetime:
            with context.isolated(rental.node):
                context.release(rental, f"its lifetime of {nodeset.lifetime} s is over")
    snapshot.refresh(context.ledger)


def _find_machine(context: ServiceContext, rental: Rental, now: float) -> None:
    account = context.accounts.get(rental.account)
    if account is None or rental.token in account.ordering:
        return  # the answer is more reliable than any list
    machine = account.machine(rental)
    if machine is not None:
        _update_rental(context, rental, machine, now)
    elif not rental.id and account.gone(rental):
        if rental.state == "intended":
            why = f"no machine of this order was listed within {LOST_ORDER_SEARCH_S:.0f} s"
            context.ledger.record_failure(rental.token, FailureKind.AMBIGUOUS, why, now)
        else:
            context.ledger.record_end(rental.token, now)


def _update_rental(context: ServiceContext, rental: Rental, machine: RentedInstance, now: float) -> None:
    ledger = context.ledger
    if not rental.id:
        log.info("%s: order %s made %s at %s", rental.node, rental.token, machine.id, rental.account)
        ledger.record_machine(
            rental.token, machine.id, machine.usd_hour, max(_created(machine, now), rental.intended_at)
        )
        rental = ledger.get(rental.token) or rental
    if machine.usd_hour is not None and (not rental.prices or price_of(machine.usd_hour) != price_of(rental.usd_hour)):
        ledger.record_price(rental.token, machine.usd_hour, now)
    if rental.billed_from is None and (since := _billed_from(rental, machine, now)) is not None:
        ledger.record_billing(rental.token, since=since)
    nodeset = context.sets.get(rental.nodeset)
    price, most = machine.usd_hour, nodeset.max_price if nodeset else None
    if rental.state == "made" and price is not None and most is not None and price > most:
        offer = rental.offer
        context.reject(rental, f"{rental.account} charges ${price:.2f} an hour for {offer.type}, above max_price")


def _billed_from(rental: Rental, machine: RentedInstance, now: float) -> float | None:
    """When billing starts, if known."""
    if rental.billing.from_up:
        return now if machine.state == "up" else None
    # clocks differ; it was not made before the order
    return None if machine.created is None else min(now, max(machine.created, rental.intended_at))


def _created(machine: RentedInstance, now: float) -> float:
    return now if machine.created is None else min(now, machine.created)


async def _handle_lost(context: ServiceContext, snapshot: ClusterSnapshot) -> set[str]:
    """Set nodes down whose machines died, so that their jobs are requeued. Returns these nodes."""
    down: set[str] = set()
    for rental in snapshot.rentals:
        with context.isolated(rental.node):
            if await _set_down_if_lost(context, snapshot, rental):
                down.add(rental.node)
    return down


async def _set_down_if_lost(context: ServiceContext, snapshot: ClusterSnapshot, rental: Rental) -> bool:
    """Release a rental whose machine died. Returns whether its node was set down."""
    account = context.accounts.get(rental.account)
    if account is None or rental.state not in ("made", "joined"):
        return False
    machine = account.machine(rental)
    if machine is None and account.gone(rental):
        why = f"{rental.id} of {rental.account} is gone"
    elif machine is not None and _is_dead(rental, machine):
        why = f"{rental.id} of {rental.account} is {machine.raw_state}"
    else:
        return False
    if rental.state == "made":
        _end_boot(context, rental, machine, why)
    if machine is None:
        context.ledger.record_end(rental.token, snapshot.now)
    else:
        context.release(rental, why)
    node = snapshot.nodes.get(rental.node)
    if node is None or not slurm.is_registered(node):
        return False
    log.warning("%s: %s", rental.node, why)
    return await context.update_slurm(context.slurm.down([rental.node], slurm.format_reason(why, snapshot.now)))


def _end_boot(context: ServiceContext, rental: Rental, machine: RentedInstance | None, why: str) -> None:
    """Release a machine that ended before it became a node. One that was deleted or preempted was not unfit."""
    deleted = machine is None or machine.state == "stopping"
    preempted = machine is not None and machine.state == "stopped" and rental.offer.market == "spot"
    if deleted or preempted:
        context.block_place(rental, why)
        context.release(rental, why)
    else:
        context.reject(rental, why)


def _is_dead(rental: Rental, machine: RentedInstance) -> bool:
    """Whether a machine is unusable. One that got notice still runs while its jobs save their work."""
    if machine.state == "stopping":
        return not (machine.ending and rental.state == "joined")
    return machine.state in ("error", "stopped")


async def _correct_nodes(context: ServiceContext, snapshot: ClusterSnapshot, lost: set[str]) -> None:
    """Release machines that nodes should not have, and set nodes down that lack one.

    The `lost` nodes were just set down and keep their reason.
    """
    to_power_down: list[str] = []
    to_resume: list[str] = []
    for node in snapshot.nodes.values():
        with context.isolated(node.name):
            command = await _correct_node(context, snapshot, node, node.name in lost)
            if command is not None:
                (to_power_down if command == "power down" else to_resume).append(node.name)
    for rental in snapshot.rentals:
        if rental.node not in snapshot.nodes:
            with context.isolated(rental.node):
                context.release(rental, "the cluster no longer has this node")
    for verb, names in ((context.slurm.power_down, to_power_down), (context.slurm.resume, to_resume)):
        if names and not await context.update_slurm(verb(names)) and len(names) > 1:
            for name in names:
                await context.update_slurm(verb([name]))


async def _restore_features(context: ServiceContext, snapshot: ClusterSnapshot) -> None:
    """Give nodes that sleep all features of slurm.conf, so that jobs may rent them again. Slurm does not."""
    by_features: dict[tuple[str, ...], list[str]] = {}
    for node in filter(slurm.lacks_features, snapshot.nodes.values()):
        by_features.setdefault(node.declared_features, []).append(node.name)
    for features, names in by_features.items():
        await context.update_slurm(context.slurm.keep_features(names, features))


async def _correct_node(
    context: ServiceContext, snapshot: ClusterSnapshot, node: NodeState, lost: bool
) -> Literal["power down", "resume"] | None:
    """Correct one node. Returns what Slurm is to do with it."""
    kept = _keep_one(context, snapshot.rentals_of(node.name))
    if slurm.is_powering_down(node):
        for rental in kept:
            if rental.state == "made" and node.reason == slurm.RESUME_TIMEOUT:
                context.reject(rental, f"{rental.id} of {rental.account} did not join in time")
            context.release(rental, "Slurm has powered the node down")
        return "resume" if _is_stuck(context, node, snapshot.now) else None
    if slurm.is_down(node):
        if not (slurm.set_by_us(node) or slurm.set_by_slurm(node)):
            return None
        for rental in kept:
            context.release(rental, f"the node is down: {node.reason or 'no reason given'}")
        return "power down" if not slurm.set_by_us(node) or _may_retry(context, node, snapshot.now) else None
    if slurm.is_registered(node) and not kept and not lost:
        why = slurm.format_reason("this node has no machine", snapshot.now)
        await context.update_slurm(context.slurm.down([node.name], why))
    elif slurm.is_registered(node) and kept and kept[0].state == "made":
        context.ledger.record_join(kept[0].token, snapshot.now)  # a service was killed before it recorded this
    return None


def _may_retry(context: ServiceContext, node: NodeState, now: float) -> bool:
    """Whether the time of a node that the service set down has come."""
    return node.name in context.affordable_nodes or is_due(slurm.retry_time(node), now)


def _is_stuck(context: ServiceContext, node: NodeState, now: float) -> bool:
    """Whether a powered-down node is still down or drained, so that Slurm would not resume it."""
    if "POWERED_DOWN" not in node.state or "POWERING_DOWN" in node.state or not {"DOWN", "DRAIN"} & set(node.state):
        return False
    return _may_retry(context, node, now) if slurm.set_by_us(node) else slurm.set_by_slurm(node)


def _keep_one(context: ServiceContext, kept: Iterable[Rental]) -> list[Rental]:
    """Keep one rental per node, the joined or else the newest one; release the others."""
    ordered = sorted(kept, key=lambda rental: (rental.state == "joined", rental.intended_at), reverse=True)
    for rental in ordered[1:]:
        context.release(rental, f"another machine serves the node: {ordered[0].id or ordered[0].token}")
    return ordered[:1]


def _orphans_by_account(context: ServiceContext, snapshot: ClusterSnapshot) -> dict[str, list[RentedInstance]]:
    snapshot.refresh(context.ledger)  # orders run concurrently: a machine that was made meanwhile has a rental
    live = {rental.token: rental for rental in snapshot.rentals}
    by_account = {name: _orphans_of(context, account, live) for name, account in context.accounts.items()}
    snapshot.refresh(context.ledger)
    return {name: orphans for name, orphans in by_account.items() if orphans}


def _orphans_of(context: ServiceContext, account: AccountClient, live: Mapping[str, Rental]) -> list[RentedInstance]:
    """Machines with our mark that have no live rental."""
    orphans: list[RentedInstance] = []
    for token, machines in account.listing.instances.items() if account.listing else ():
        rental = live.get(token)
        for machine in machines:
            if machine.state == "stopping" or (rental is not None and rental.id in ("", machine.id)):
                continue
            with context.isolated(machine.node):
                if _is_orphan(context, account, machine, rental is not None):
                    orphans.append(machine)
    return orphans


def _is_orphan(context: ServiceContext, account: AccountClient, machine: RentedInstance, twin: bool) -> bool:
    """Whether to delete a machine now. One that the ledger has is released instead, so that it is billed."""
    rental = None if twin else context.ledger.get(machine.token)
    if twin or (rental is not None and rental.id not in ("", machine.id)):
        return account.may_retry_delete(machine)  # a second machine of one order
    if rental is not None and rental.live:
        return False
    now = context.clock.now()
    if rental is None:
        settled = now >= account.first_seen(machine) + account.abilities.grace_s
        return settled and account.may_retry_delete(machine)
    if rental.state == "failed":
        context.ledger.record_machine(
            rental.token, machine.id, machine.usd_hour, max(_created(machine, now), rental.intended_at)
        )
    context.ledger.record_release(rental.token, "it was listed after the order was abandoned", now)
    return False
