"""Keeps orders within the budgets: the limits, less what the ledger has and what others are about to order."""

from __future__ import annotations

from collections.abc import Container, Hashable, Sequence

from shoal.elastic import budget
from shoal.elastic.fleet import Fleet
from shoal.elastic.rentals import Rental
from shoal.providers.rental import Offer


class BudgetGuard:
    """The budgets of a cluster. Between the question and the order nobody else can take the money: it is reserved."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._own = {name: nodeset.budget for name, nodeset in fleet.sets.items()}
        self._counted: dict[str, Rental] | None = None
        """The ledger's rows of this month, with what was ordered since they were read."""
        self._reserved: dict[Hashable, list[Rental]] = {}

    @property
    def limited(self) -> bool:
        """Whether there is a budget to keep. Then groups are served in the order of their jobs."""
        return self._fleet.budget is not None or any(self._own.values())

    def spent(self, now: float) -> dict[str, str]:
        """The nodesets whose machines are to go because a budget says so, each with the reason."""
        if all(one is None or one.end_after is None for one in (self._fleet.budget, *self._own.values())):
            return {}
        return budget.spent(self._fleet.budget, self._own, list(self._fleet.ledger.all(budget.since(now))), now)

    def step(self, busy: Container[Hashable]) -> None:
        """Read the ledger again. Only groups that are still being served keep what is reserved for them."""
        self._counted = None
        self._reserved = {key: kept for key, kept in self._reserved.items() if key in busy}

    def refusal(self, group: Hashable, nodeset: str, offer: Offer, count: int, now: float) -> str | None:
        """Why a group may not have so many machines; None where it may. What others have reserved counts."""
        if not self.limited:
            return None
        if self._counted is None:
            self._counted = {one.token: one for one in self._fleet.ledger.all(budget.since(now))}
        others = [one for key, reserved in self._reserved.items() if key != group for one in reserved]
        wish = budget.Wish(nodeset, offer, count, self._fleet.sources[offer.provider].abilities.billing)
        return budget.refusal(wish, self._fleet.budget, self._own, [*self._counted.values(), *others], now)

    def reserve(self, group: Hashable, rentals: Sequence[Rental]) -> None:
        """What a group is about to order, or has to wait for, in place of what it reserved before."""
        self._reserved[group] = list(rentals)

    def ordered(self, rentals: Sequence[Rental]) -> None:
        """These are in the ledger now."""
        if self._counted is not None:
            self._counted.update({rental.token: rental for rental in rentals})

    def uncount(self, rental: Rental) -> None:
        """Nothing was made, or it goes again."""
        if self._counted is not None:
            self._counted.pop(rental.token, None)
