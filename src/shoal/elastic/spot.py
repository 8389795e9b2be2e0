"""Machines that are about to be taken away: their jobs are warned as by Slurm's own preemption, and go on elsewhere.

The end of a machine is known beforehand when its provider's list gives notice, when its lifetime is over, and when the
budget is spent and says `then: end`. Then

    at once          jobs that `shoal run` started get the warning signal, and the node takes no new ones
    shortly before   what still runs is put back into the queue
    when it is free  the node goes down and to sleep, and its machine is given back

How far this is stands in the reason of the node, so that a service that was killed goes on from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from shoal.elastic.fleet import Fleet, World, log
from shoal.elastic.rentals import Rental
from shoal.elastic.slurm import Job, again, in_use, ours, reason, text
from shoal.train.contract import GRACE_SECONDS

MARGIN = 5.0
"""So long before the end what still runs is put back into the queue."""


@dataclass(frozen=True)
class Ending:
    """Why a machine goes, and how long its jobs have."""

    why: str
    seconds: float


async def end(fleet: Fleet, world: World, spent: Mapping[str, str]) -> None:
    """See to the machines that are about to go. `spent` says which nodesets are to end now, and why."""
    for rental in world.rentals:
        node = world.nodes.get(rental.node)
        if rental.state != "joined" or node is None or not in_use(node):
            continue
        jobs = world.jobs_on(rental.node)
        if "DRAIN" in node.state and ours(node):
            if not jobs or world.now >= again(node):
                await _take(fleet, rental, jobs, text(node), world.now)
        elif ending := _ending(fleet, rental, world.now, spent):
            await _warn(fleet, rental, jobs, ending, world.now)


async def _warn(fleet: Fleet, rental: Rental, jobs: Sequence[Job], ending: Ending, now: float) -> None:
    log.warning("%s: %s; %d jobs on it have %.0f s", rental.node, ending.why, len(jobs), ending.seconds)
    for job in jobs:
        # A second signal does no harm, where a service was killed before it could note the first.
        if job.saves:
            await fleet.tell(fleet.slurm.warn(job.id))
        await fleet.say(job.id, f"{rental.node}: {ending.why}")
    until = now + (max(0.0, ending.seconds - MARGIN) if jobs else 0.0)
    await fleet.tell(fleet.slurm.drain([rental.node], reason(ending.why, until)))


async def _take(fleet: Fleet, rental: Rental, jobs: Sequence[Job], why: str, now: float) -> None:
    """Its jobs have left, or must: whatever is still there goes with the machine."""
    for job in jobs:
        await fleet.tell(fleet.slurm.requeue(job.id))
    await fleet.tell(fleet.slurm.down([rental.node], reason(why, now)))


def _ending(fleet: Fleet, rental: Rental, now: float, spent: Mapping[str, str]) -> Ending | None:
    source = fleet.sources.get(rental.account)
    machine = source.machine(rental) if source else None
    if source is not None and machine is not None and machine.ending:
        return Ending(f"{rental.account} takes {rental.id} away", float(source.abilities.notice_seconds))
    nodeset = fleet.sets.get(rental.nodeset)
    if nodeset is not None and nodeset.lifetime and (left := rental.begun + nodeset.lifetime - now) <= GRACE_SECONDS:
        return Ending(f"its lifetime of {nodeset.lifetime} s is over", max(0.0, left))
    if rental.nodeset in spent:
        return Ending(spent[rental.nodeset], float(GRACE_SECONDS))
    return None
