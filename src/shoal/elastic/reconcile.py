"""Compares what Slurm wants, what the ledger says and what providers list, and corrects what differs.

Slurm is what is wanted and the provider what there is; between them stands the ledger, which says whose a machine is.
Each rule looks at the present alone, so that it does not matter what was under way when the service was last killed.

    machine without a rental        an orphan: given back after its grace, again and again until no list shows it
    rental without a machine        lost: the node goes down, its jobs back into the queue, and it may be woken again
    node asleep, rental there       given back
    node in use, no rental          down, and back to sleep
    node down by us or by Slurm     what it had is given back; when its time has come it goes back to sleep
    node down by a person           left alone
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.elastic.clock import due
from shoal.elastic.fleet import Fleet, World, log
from shoal.elastic.rentals import Rental, price_of
from shoal.elastic.slurm import RESUME_TIMEOUT, again, by_slurm, in_use, is_down, leaving, ours, reason
from shoal.elastic.source import LOOK_SECONDS, Source
from shoal.providers.rental import Rented, Trouble
from shoal.slurm.state import NodeState


async def reconcile(fleet: Fleet, world: World) -> dict[str, list[Rented]]:
    """One comparison. What it decides is in the ledger and in Slurm when it returns; deletes come with the release.

    What it returns are orphans, by account: machines that are to be deleted, and that the ledger knows nothing of.
    """
    _recognise(fleet, world)
    world.read(fleet.ledger)
    _overdue(fleet, world)
    lost = await _lost(fleet, world)
    world.read(fleet.ledger)
    await _nodes(fleet, world, lost)
    return _orphans(fleet, world)


def without_slurm(fleet: Fleet, world: World) -> dict[str, list[Rented]]:
    """The same while it is not known what Slurm wants: nothing outlives its time, and nobody's machines go."""
    _recognise(fleet, world)
    world.read(fleet.ledger)
    _overdue(fleet, world)
    return _orphans(fleet, world)


def _overdue(fleet: Fleet, world: World) -> None:
    """Machines whose lifetime is over go, whatever Slurm or a person makes of their nodes. Jobs were warned before."""
    for rental in world.rentals:
        nodeset = fleet.sets.get(rental.nodeset)
        if nodeset is not None and nodeset.lifetime and world.now >= rental.begun + nodeset.lifetime:
            fleet.release(rental, f"its lifetime of {nodeset.lifetime} s is over")
    world.read(fleet.ledger)


def _recognise(fleet: Fleet, world: World) -> None:
    """Find the machines of orders whose answer got lost, and learn prices."""
    for rental in world.rentals:
        source = fleet.sources.get(rental.account)
        if source is None or rental.token in source.ordering:
            continue  # its answer says more than any list
        machine = source.machine(rental)
        if machine is not None:
            _learn(fleet, rental, machine, world.now)
        elif not rental.id and source.gone(rental):
            if rental.state == "intended":
                why = f"no machine of this order turned up within {LOOK_SECONDS:.0f} s"
                fleet.ledger.failed(rental.token, Trouble.AMBIGUOUS, why, world.now)
            else:
                fleet.ledger.gone(rental.token, world.now)


def _learn(fleet: Fleet, rental: Rental, machine: Rented, now: float) -> None:
    ledger = fleet.ledger
    if not rental.id:
        log.info("%s: the order %s did make %s at %s", rental.node, rental.token, machine.id, rental.account)
        ledger.made(rental.token, machine.id, machine.usd_hour, max(_since(machine, now), rental.intended_at))
        rental = ledger.get(rental.token) or rental
    if machine.usd_hour is not None and (not rental.prices or price_of(machine.usd_hour) != price_of(rental.usd_hour)):
        ledger.priced(rental.token, machine.usd_hour, now)
    if rental.billed_from is None and (since := _billed_from(rental, machine, now)) is not None:
        ledger.billed(rental.token, since=since)
    nodeset = fleet.sets.get(rental.nodeset)
    price, most = machine.usd_hour, nodeset.max_price if nodeset else None
    if rental.state == "made" and price is not None and most is not None and price > most:
        fleet.useless(rental, f"{rental.account} wants ${price:.2f} an hour for {rental.offer.type}, above max_price")


def _billed_from(rental: Rental, machine: Rented, now: float) -> float | None:
    """From when on the provider bills, as far as it can be seen."""
    if rental.billing.from_up:
        return now if machine.state == "up" else None
    # Two clocks tell two times; it was not made before we asked for it.
    return None if machine.created is None else min(now, max(machine.created, rental.intended_at))


def _since(machine: Rented, now: float) -> float:
    return now if machine.created is None else min(now, machine.created)


async def _lost(fleet: Fleet, world: World) -> set[str]:
    """Machines that died: their nodes go down, so that jobs start again, and are woken again. Returns these nodes."""
    told: set[str] = set()
    for rental in world.rentals:
        source = fleet.sources.get(rental.account)
        if source is None or rental.state not in ("made", "joined"):
            continue
        machine = source.machine(rental)
        if machine is None and source.gone(rental):
            why = f"{rental.id} of {rental.account} is gone"
            _remember(fleet, rental, why)
            fleet.ledger.gone(rental.token, world.now)
        elif machine is not None and _dead(rental, machine):
            why = f"{rental.id} of {rental.account} is {machine.raw_state}"
            _remember(fleet, rental, why)
            fleet.release(rental, why)
        else:
            continue
        node = world.nodes.get(rental.node)
        if node is not None and in_use(node):
            log.warning("%s: %s", rental.node, why)
            if await fleet.tell(fleet.slurm.down([rental.node], reason(why, world.now))):
                told.add(rental.node)
    return told


def _dead(rental: Rental, machine: Rented) -> bool:
    """Whether a machine is of no more use. One that was told that it must go still runs: its jobs save their work."""
    if machine.state == "stopping":
        return not (machine.ending and rental.state == "joined")
    return machine.state in ("error", "stopped")


def _remember(fleet: Fleet, rental: Rental, why: str) -> None:
    """A machine that never came up says something about its offer; one that served its time does not."""
    if rental.state == "made":
        fleet.useless(rental, why)


async def _nodes(fleet: Fleet, world: World, lost: set[str]) -> None:
    """See that no node has a machine it should not have, or lacks one that Slurm counts on.

    The `lost` ones went down a moment ago, and keep the reason that they were given.
    """
    asleep: list[str] = []
    back: list[str] = []
    for node in world.nodes.values():
        kept = _one_of(fleet, world.kept(node.name))
        if leaving(node):
            for rental in kept:
                if rental.state == "made" and node.reason == RESUME_TIMEOUT:
                    fleet.useless(rental, f"{rental.id} of {rental.account} did not become a node in time")
                fleet.release(rental, "Slurm has put the node to sleep")
            if _stuck(node, world.now):
                back.append(node.name)
        elif is_down(node):
            if not (ours(node) or by_slurm(node)):
                continue
            for rental in kept:
                fleet.release(rental, f"the node is down: {node.reason or 'no reason given'}")
            if not ours(node) or due(again(node), world.now):
                asleep.append(node.name)
        elif in_use(node) and not kept and node.name not in lost:
            await fleet.tell(fleet.slurm.down([node.name], reason("no machine is behind this node", world.now)))
        elif in_use(node) and kept and kept[0].state == "made":
            fleet.ledger.joined(kept[0].token, world.now)  # it registered, and nobody wrote it down
    for rental in world.rentals:
        if rental.node not in world.nodes:
            fleet.release(rental, "the cluster has no such node any more")
    for verb, names in ((fleet.slurm.power_down, asleep), (fleet.slurm.resume, back)):
        if names and not await fleet.tell(verb(names)) and len(names) > 1:
            for name in names:
                await fleet.tell(verb([name]))


def _stuck(node: NodeState, now: float) -> bool:
    """Whether a node that sleeps keeps a mark of the past, by which Slurm would not wake it."""
    if "POWERED_DOWN" not in node.state or "POWERING_DOWN" in node.state or not {"DOWN", "DRAIN"} & set(node.state):
        return False
    return due(again(node), now) if ours(node) else by_slurm(node)


def _one_of(fleet: Fleet, kept: Iterable[Rental]) -> list[Rental]:
    """Of several rentals for one node the one that works, else the newest; the others are given back."""
    ordered = sorted(kept, key=lambda rental: (rental.state == "joined", rental.intended_at), reverse=True)
    for rental in ordered[1:]:
        fleet.release(rental, f"another machine serves the node: {ordered[0].id or ordered[0].token}")
    return ordered[:1]


def _orphans(fleet: Fleet, world: World) -> dict[str, list[Rented]]:
    world.read(fleet.ledger)  # orders go on beside: what was made and listed meanwhile is somebody's
    live = {rental.token: rental for rental in world.rentals}
    found = {name: _strays(fleet, source, live) for name, source in fleet.sources.items()}
    world.read(fleet.ledger)
    return {name: strays for name, strays in found.items() if strays}


def _strays(fleet: Fleet, source: Source, live: Mapping[str, Rental]) -> list[Rented]:
    """Machines with our mark that no live rental accounts for."""
    orphans: list[Rented] = []
    for token, machines in source.seen.machines.items() if source.seen else ():
        rental = live.get(token)
        for machine in machines:
            if rental is not None and rental.id in ("", machine.id):
                continue
            if machine.state != "stopping" and _orphaned(fleet, source, machine, rental is not None):
                orphans.append(machine)
    return orphans


def _orphaned(fleet: Fleet, source: Source, machine: Rented, twin: bool) -> bool:
    """Whether to delete a machine here and now. One that the ledger knows is left to the release, which bills it."""
    known = None if twin else fleet.ledger.get(machine.token)
    if twin or (known is not None and known.id not in ("", machine.id)):
        return source.may_ask_again(machine)  # a second machine of one order
    if known is not None and known.live:
        return False
    now = fleet.clock.now()
    if known is None:
        return now >= source.first_seen(machine) + source.abilities.grace_seconds and source.may_ask_again(machine)
    if known.state == "failed":
        fleet.ledger.made(known.token, machine.id, machine.usd_hour, max(_since(machine, now), known.intended_at))
    fleet.ledger.releasing(known.token, "it turned up when nobody counted on it any more", now)
    return False
