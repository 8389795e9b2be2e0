"""Gives machines back, and goes on until their provider lists them no longer.

Each account has its deletes in a call of their own, beside the others'.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from shoal.elastic.background import BackgroundCalls
from shoal.elastic.clock import due
from shoal.elastic.fleet import Fleet, World, log
from shoal.elastic.rentals import Rental
from shoal.elastic.source import AGAIN_SECONDS, Source
from shoal.providers.rental import Rented


@dataclass
class Release:
    """What was asked for, while the service runs. A new one asks again, which does no harm."""

    fleet: Fleet
    wake: Callable[[], None] = lambda: None
    """Called when a delete has ended that nobody waited for any more."""
    _asked: dict[str, float] = field(default_factory=dict)
    """When a delete was last asked for, by token."""
    _taken: dict[str, float] = field(default_factory=dict)
    """When the provider took it."""
    _deletes: BackgroundCalls = field(init=False)

    def __post_init__(self) -> None:
        self._deletes = BackgroundCalls(self.fleet.patience, self.wake)

    async def step(self, world: World, orphans: Mapping[str, Sequence[Rented]] = MappingProxyType({})) -> None:
        """Delete what is to go, and strike off what no list shows any more. `orphans` are nobody's, by account."""
        going: dict[str, list[Rental]] = {}
        for rental in world.rentals:
            if rental.state != "releasing" or not rental.id or rental.account not in self.fleet.sources:
                continue  # one without an id is still being looked for
            source = self.fleet.sources[rental.account]
            if self._is_gone(source, rental):
                self.fleet.ledger.gone(rental.token, world.now)
                self._asked.pop(rental.token, None)
                self._taken.pop(rental.token, None)
            elif due(self._asked.get(rental.token, float("-inf")) + AGAIN_SECONDS, world.now):
                going.setdefault(rental.account, []).append(rental)
        for name in {*going, *orphans} - self._deletes.running:
            source = self.fleet.sources[name]
            self._deletes.start(name, self._delete(source, going.get(name, ()), orphans.get(name, ())))
        await self._deletes.wait()
        world.read(self.fleet.ledger)

    async def close(self) -> None:
        await self._deletes.close()

    def _is_gone(self, source: Source, rental: Rental) -> bool:
        if source.gone(rental):
            return True
        taken = self._taken.get(rental.token)
        return taken is not None and source.seen is not None and source.seen.at > taken and not source.machine(rental)

    def _runs_on(self, source: Source, rental: Rental) -> bool:
        """Whether a machine is listed as running although its provider took our delete: it costs on."""
        machine, since = source.machine(rental), rental.billed_until
        listed_after = source.seen is not None and since is not None and source.seen.at > since
        return listed_after and machine is not None and machine.state in ("pending", "up")

    async def _delete(self, source: Source, rentals: Sequence[Rental], orphans: Sequence[Rented]) -> None:
        now = self.fleet.clock.now()
        machines = [source.machine(rental) or _unseen(self.fleet.cluster, rental) for rental in rentals]
        there = {
            rental.node: machine
            for rental, machine in zip(rentals, machines, strict=True)
            if rental.token not in self._asked and machine.state == "up"
        }
        for rental in rentals:
            self._asked[rental.token] = now
        await self.fleet.joiner.part(there)
        outcomes = await source.give_back([*machines, *orphans])
        for machine, outcome in zip(orphans, outcomes[len(machines) :], strict=True):
            said = "is given back" if outcome.ok else f"could not be given back: {outcome.message}"
            log.warning("%s: %s (%s) belongs to nobody and %s", source.name, machine.id, machine.node, said)
        for rental, outcome in zip(rentals, outcomes[: len(machines)], strict=True):
            known = self.fleet.ledger.get(rental.token)
            if known is None or known.state != "releasing":
                continue  # a list has shown before the answer came that it is gone: its bill ended then
            if outcome.ok:
                if rental.billed_until is None or self._runs_on(source, rental):
                    self.fleet.ledger.billed(rental.token, until=self.fleet.clock.now())
                self._taken[rental.token] = self.fleet.clock.now()
            else:
                self._asked[rental.token] = now + max(0.0, outcome.retry_after - AGAIN_SECONDS)
                log.warning("%s: %s could not be given back: %s", source.name, rental.id, outcome.message)


def _unseen(cluster: str, rental: Rental) -> Rented:
    """A machine that is known by its id alone: lists lag, and it must go all the same."""
    offer = rental.offer
    return Rented(
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
