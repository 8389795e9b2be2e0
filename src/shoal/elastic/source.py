"""An account at a provider as the service uses it: what it lists, how fast it may be asked, what it is known to have.

A list that fails leaves what was known before, and its age: nothing is ever taken for gone because nobody could be
asked. A machine counts as gone when lists that came after it show it no longer.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shoal.elastic.clock import Clock, due
from shoal.elastic.ledger import Ledger
from shoal.elastic.rentals import Rental
from shoal.errors import ProviderError
from shoal.providers.rental import Abilities, Offer, Order, Outcome, Query, Rented, Renter, Trouble

log = logging.getLogger("shoal.elastic.source")

LOOK_SECONDS = 120.0
"""An order whose answer got lost is looked for so long before anything is ordered again."""
ABSENCES = 2
"""A machine that was there is gone when so many lists in a row do not show it."""
AGAIN_SECONDS = 30.0
"""A machine that is still listed is deleted again after so long."""
PATIENCE = 3
SILENT_SECONDS = 60.0
"""A provider that could not be asked PATIENCE times in a row is left alone for so long."""
_FIRST_WAIT, _LONGEST_WAIT = 5.0, 60.0


def told(error: Exception) -> str:
    """What a call to a provider failed of. Of a bug in its client only the kind: the text may hold anything."""
    return error.message if isinstance(error, ProviderError) else f"its client failed: {type(error).__name__}"


@dataclass(frozen=True)
class Seen:
    """An answer to the question what there is."""

    at: float
    """When it was asked: what happened later is not in it."""
    machines: Mapping[str, tuple[Rented, ...]]
    """Those of our cluster, by token. More than one of a token is one too many."""


@dataclass
class Source:
    """One account, with what is remembered of it while the service runs."""

    name: str
    renter: Renter
    cluster: str
    ledger: Ledger
    clock: Clock
    seen: Seen | None = None
    problem: str = ""
    """Why the last list failed; empty when it did not."""
    not_before: float = 0.0
    """No order before this time: the provider has asked for patience."""
    refusals: int = 0
    """So many orders in a row came to nothing because the provider could not be asked."""
    ordering: set[str] = field(default_factory=set)
    """The tokens of orders that are under way: nobody knows yet what comes of them."""
    _asked_at: float = float("-inf")
    _failures: int = 0
    _absences: dict[str, int] = field(default_factory=dict)
    _first_seen: dict[str, float] = field(default_factory=dict)
    _orphans: dict[str, float] = field(default_factory=dict)
    _key_name: str | None = None
    _answered: dict[str, float] = field(default_factory=dict)
    """When orders were answered or given up on, by token."""
    _began: float = field(init=False)

    def __post_init__(self) -> None:
        self._began = self.clock.now()

    @property
    def abilities(self) -> Abilities:
        return self.renter.abilities

    # ---- what there is

    def due(self, age: float) -> float:
        """When to list again, so that what is known is at most so old; later where the provider does not answer."""
        if self._asked_at > self.clock.now():
            return self.clock.now()  # the clock was set back
        wait = min(_LONGEST_WAIT, _FIRST_WAIT * 2 ** (self._failures - 1)) if self._failures else 0.0
        return self._asked_at + max(age, wait)

    async def look(self) -> None:
        """Ask what there is."""
        self._asked_at = self.clock.now()
        self._began = min(self._began, self._asked_at)  # the clock may be set back
        machines: dict[str, tuple[Rented, ...]] = {}
        try:
            for machine in await self.renter.rented(self.cluster):
                if machine.cluster == self.cluster and machine.token:  # what has no mark of ours is not ours
                    machines[machine.token] = (*machines.get(machine.token, ()), machine)
        except Exception as error:  # whatever it is: one provider's client must not hold up the others
            self._not_listed(told(error))
            return
        if self.problem:
            log.info("%s answers again", self.name)
        self._failures, self.problem = 0, ""
        self.seen = Seen(self._asked_at, machines)
        for token in machines:
            self._first_seen[token] = min(self._first_seen.get(token, self._asked_at), self._asked_at)
            self._absences[token] = 0
        for token in self._absences.keys() - machines.keys():
            self._absences[token] += 1

    def _not_listed(self, why: str) -> None:
        self._failures += 1
        if not self.problem:
            log.warning("%s cannot be asked what there is: %s", self.name, why)
        self.problem = why
        if self.seen is None and self._failures >= PATIENCE:
            until = self.clock.now() + SILENT_SECONDS
            self.ledger.block(self.name, "", "", "", until, f"{self.name} cannot be asked what there is")

    def machine(self, rental: Rental) -> Rented | None:
        """The machine of a rental, as it was last listed."""
        found = self.seen.machines.get(rental.token, ()) if self.seen else ()
        return next((one for one in found if one.id == rental.id), found[0] if found and not rental.id else None)

    def first_seen(self, machine: Rented) -> float:
        """Since when it is known that there is such a machine."""
        since = self._first_seen.get(machine.token, self.clock.now())
        return since if machine.created is None else min(since, machine.created)

    def gone(self, rental: Rental) -> bool:
        """Whether the machine of a rental is certainly there no longer; False as long as nobody can know."""
        if self.seen is None or self.machine(rental) is not None or rental.token in self.ordering:
            return False
        if rental.made_at is None:
            # From when the answer was given up on: an order itself may take a while. Who starts again knows of none.
            since = max(self._past(rental.intended_at), self._past(self._answered.get(rental.token, self._began)))
            return self.seen.at >= since + LOOK_SECONDS
        lag = self._past(rental.made_at) + self.abilities.grace_seconds
        if rental.token not in self._first_seen and self.seen.at < lag:
            return False
        absences = self._absences.setdefault(rental.token, 0 if rental.token in self._first_seen else 1)
        return absences >= ABSENCES

    # ---- what we do there

    def may_order(self) -> bool:
        """Whether an order may go out now: not before a list has come, which shows whether it is for us to order."""
        if self.seen is None or not due(self.not_before, self.clock.now()):
            return False
        pause = self.abilities.create_interval
        return not pause or due(self.ledger.last_rate(self.name) + pause, self.clock.now(), pause)

    async def key_name(self, public_key: str) -> str:
        """The controller's key as the provider knows it. Raises what the client raises."""
        if self._key_name is None:
            self._key_name = await self.renter.ensure_key(self.cluster, public_key)
        return self._key_name

    async def order(self, orders: Sequence[Order]) -> list[Outcome]:
        """Order machines of one offer, at most `abilities.at_once`. The intents are in the ledger already."""
        tokens = {order.token for order in orders}
        self.ordering |= tokens
        try:
            outcomes = _whole(await self.renter.create(orders), len(orders))
            outcomes = [_NAMELESS if one.ok and not one.id else one for one in outcomes]
        except Exception as error:
            # It may have raised before anything was sent or after: we look, which is always right.
            outcomes = [Outcome(trouble=Trouble.AMBIGUOUS, message=told(error))] * len(orders)
        finally:
            self.ordering -= tokens
            self._answered |= dict.fromkeys(tokens, self.clock.now())
        for outcome in outcomes:
            self.refusals = self.refusals + 1 if outcome.trouble is Trouble.TRANSIENT else 0
            if outcome.trouble in (Trouble.RATE, Trouble.TRANSIENT):
                wait = outcome.retry_after or max(self.abilities.create_interval, _FIRST_WAIT)
                self.not_before = max(self.not_before, self.clock.now() + wait)
        return outcomes

    def may_ask_again(self, machine: Rented) -> bool:
        """Whether to delete a machine that belongs to nobody, or whether that was just asked for."""
        again = self._orphans.get(machine.id, float("-inf")) + AGAIN_SECONDS
        if not due(again, self.clock.now(), AGAIN_SECONDS):
            return False
        self._orphans[machine.id] = self.clock.now()
        return True

    def _past(self, at: float) -> float:
        """A time that was noted; where the clock has been set back since, so that it is yet to come, our beginning."""
        return at if at <= self.clock.now() else self._began

    async def give_back(self, machines: Sequence[Rented]) -> list[Outcome]:
        """Delete machines. What could not be done shows in the outcomes, and is tried again later."""
        try:
            return _whole(await self.renter.delete(machines), len(machines))
        except Exception as error:
            return [Outcome(one.id, Trouble.TRANSIENT, message=told(error)) for one in machines]


_NAMELESS = Outcome(trouble=Trouble.AMBIGUOUS, message="it was made, and its client does not say which machine it is")


def _whole(outcomes: Sequence[Outcome], count: int) -> list[Outcome]:
    """What a client says of so many machines. One outcome too few or too many, and nobody knows whose is which."""
    if len(outcomes) != count or not all(isinstance(one, Outcome) for one in outcomes):
        raise ProviderError(f"its client told {len(outcomes)} outcomes of {count}")
    return list(outcomes)


class Unusable:
    """Stands for a renter that cannot be made, a key that is none for one: it says so whatever it is asked."""

    def __init__(self, error: ProviderError) -> None:
        self.abilities = Abilities()
        self._error = error

    async def offers(self, query: Query) -> list[Offer]:
        raise self._error

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        return [Outcome(trouble=Trouble.AUTH, scope="provider", message=self._error.message) for _ in orders]

    async def rented(self, cluster: str) -> list[Rented]:
        raise self._error

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        raise self._error

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        raise self._error

    async def close(self) -> None:
        pass
