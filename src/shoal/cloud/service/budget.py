"""Hard limits on money: whether machines may be ordered, and which must end, with the reason as people read it.

`per_hour` limits what all machines together cost an hour, orders included. `per_day` and `per_month` limit what is
spent, by UTC: machines are ordered only while an hour of them, and of all that runs already, still fits. So a job that
was given nodes has at least that hour. When the money of a day or month was spent follows from the ledger alone.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from shoal.cloud.providers.api import Billing, Offer
from shoal.cloud.rental import (
    BY_THE_SECOND,
    HOUR_S,
    Rental,
    cost_between,
    cost_of_time,
    day_of,
    format_dollars,
    hourly_rate,
    micros,
    month_of,
)
from shoal.cloud.service.context import ClusterSnapshot, ServiceContext
from shoal.cloud.service.slurm import refused_by_budget, wants_machine
from shoal.contract import GRACE_S
from shoal.spec.rental import Budget

WARNING_LEAD_S = GRACE_S + 60.0
"""How long before their budget is spent machines are drained: jobs save their work, then they are deleted."""
FIX = "raise `budget` and run `shoal up`, or wait"


@dataclass(frozen=True)
class Purchase:
    """Machines to order: all of them, or none."""

    nodeset: str
    offer: Offer
    count: int
    billing: Billing = BY_THE_SECOND
    """How the offer's provider bills: `provider.abilities.billing`."""


def ledger_start(now: float) -> float:
    """From when on the ledger's rows count: `ledger.all(ledger_start(now))`."""
    return month_of(now)[0]


def refusal(
    purchase: Purchase, whole: Budget | None, own: Mapping[str, Budget | None], rentals: Sequence[Rental], now: float
) -> str | None:
    """Why these machines may not be ordered; None if they may.

    `whole` is the cluster's budget and `own` what nodesets have of their own; `rentals` are all since `since(now)`.
    """
    offer, own_rentals = purchase.offer, [one for one in rentals if one.nodeset == purchase.nodeset]
    limits = (("", whole, rentals), (purchase.nodeset, own.get(purchase.nodeset), own_rentals))
    for nodeset, budget, counted in limits:
        if budget is None or (budget.per_hour, budget.per_day, budget.per_month) == (None, None, None):
            continue
        if offer.usd_hour is None:
            return (
                f"the price of {offer.type} at {offer.provider} {offer.place} is unknown, so no budget can cover it"
                " (run `shoal up` if `shoal offers` has its price; else rent another type, or remove the budget)"
            )
        if why := _refusal(purchase, budget, nodeset, counted, now):
            return why
    return None


def exhausted_nodesets(
    whole: Budget | None,
    own: Mapping[str, Budget | None],
    rentals: Sequence[Rental],
    now: float,
    ahead: float = WARNING_LEAD_S,
) -> dict[str, str]:
    """The nodesets whose machines must end because a budget with `then: end` is used up, with the reason."""
    ending: dict[str, str] = {}
    live = {rental.nodeset for rental in rentals if rental.live and rental.nodeset}
    for nodeset, budget in (("", whole), *own.items()):
        if budget is None or budget.end_after is None:
            continue
        counted = [one for one in rentals if nodeset in ("", one.nodeset)]
        if why := _used_up(budget, nodeset, counted, now, ahead - budget.end_after):
            ending.update(dict.fromkeys(live & {nodeset} if nodeset else live, why))
    return ending


def _refusal(purchase: Purchase, budget: Budget, nodeset: str, rentals: Sequence[Rental], now: float) -> str | None:
    price = micros(purchase.offer.usd_hour or 0.0)
    machines = f"{purchase.count} × {purchase.offer.type}" if purchase.count > 1 else purchase.offer.type
    if budget.per_hour is not None:
        running = sum(hourly_rate(rental) for rental in rentals)
        if running + purchase.count * price > micros(budget.per_hour):
            hourly = format_dollars(micros(budget.per_hour))
            return (
                f"{_named(nodeset)} of {hourly} an hour: {format_dollars(running)} is in use, and"
                f" {machines} costs {format_dollars(purchase.count * price)} an hour ({FIX} until others end)"
            )
    for limit, period in _periods(budget, now):
        ahead = min(HOUR_S, period.end - now)
        used = _used(rentals, period, now)
        hour = _coming(rentals, now, ahead) + purchase.count * cost_of_time(price, purchase.billing.seconds(ahead))
        if used + hour > limit:
            return (
                f"{_named(nodeset)} of {format_dollars(limit)} a {period.word}: {format_dollars(used)} is spent, and an"
                f" hour of what runs and of {machines} costs {format_dollars(hour)} ({FIX} until {period.next})"
            )
    return None


def _used_up(budget: Budget, nodeset: str, rentals: Sequence[Rental], now: float, ahead: float) -> str | None:
    """Why machines must end: the limit is reached in `ahead` seconds; negative: it was reached that long ago."""
    for limit, period in _periods(budget, now):
        at = _used(rentals, period, min(now, now + ahead))
        if ahead > 0:
            at += _coming(rentals, now, ahead)
        if at >= limit:
            used, late = format_dollars(_used(rentals, period, now)), f" for {budget.after}" if budget.after else ""
            return f"{_named(nodeset)} of {format_dollars(limit)} a {period.word} is used up{late}: {used} is spent"
    return None


@dataclass(frozen=True)
class _Period:
    word: str
    begin: float
    end: float

    @property
    def next(self) -> str:
        """When the next period starts: `16 November 00:00 UTC`."""
        return f"{datetime.fromtimestamp(self.end, UTC):%-d %B %H:%M} UTC"


def _periods(budget: Budget, now: float) -> Iterable[tuple[int, _Period]]:
    if budget.per_day is not None:
        yield micros(budget.per_day), _Period("day", *day_of(now))
    if budget.per_month is not None:
        yield micros(budget.per_month), _Period("month", *month_of(now))


def _used(rentals: Iterable[Rental], period: _Period, now: float) -> int:
    return sum(cost_between(rental, period.begin, now, whole=True) for rental in rentals)


def _coming(rentals: Iterable[Rental], now: float, ahead: float) -> int:
    """The cost of the next `ahead` seconds. Released machines cost only a few seconds more, and do not count."""
    staying = (rental for rental in rentals if rental.live and rental.state != "releasing")
    return sum(cost_between(rental, now, now + ahead, whole=True) for rental in staying)


def _named(nodeset: str) -> str:
    return f"the budget of nodeset {nodeset}" if nodeset else "the budget"


@dataclass(frozen=True)
class _RefusedGroup:
    nodeset: str
    nodes: tuple[str, ...]
    count: int
    """How many of them need a machine."""
    offers: tuple[Offer, ...]


class BudgetGuard:
    """The budgets of a cluster. Reserves money between the check and the order."""

    def __init__(self, context: ServiceContext) -> None:
        self._context = context
        self._nodeset_budgets = {name: nodeset.budget for name, nodeset in context.sets.items()}
        self._counted: dict[str, Rental] | None = None
        """The rentals of this month, with those ordered since they were read."""
        self._reserved: dict[Hashable, list[Rental]] = {}
        self._refused: dict[Hashable, _RefusedGroup] = {}

    @property
    def limited(self) -> bool:
        """Whether there is a budget. Then groups are served in the sequence of their jobs."""
        return self._context.budget is not None or any(self._nodeset_budgets.values())

    def spent(self, now: float) -> dict[str, str]:
        """The nodesets whose machines must end because of a budget, with the reason."""
        if all(one is None or one.end_after is None for one in (self._context.budget, *self._nodeset_budgets.values())):
            return {}
        return exhausted_nodesets(
            self._context.budget, self._nodeset_budgets, list(self._context.ledger.all(ledger_start(now))), now
        )

    def step(self, busy: Container[Hashable]) -> None:
        """Start a step: read the ledger again, and drop reservations of groups that are no longer served."""
        self._counted = None
        self._reserved = {key: kept for key, kept in self._reserved.items() if key in busy}

    def refusal(self, group: Hashable, nodeset: str, offer: Offer, count: int, now: float) -> str | None:
        """Why a group may not order `count` machines; None if it may. Reservations of others count."""
        if not self.limited:
            return None
        if self._counted is None:
            self._counted = {one.token: one for one in self._context.ledger.all(ledger_start(now))}
        others = [one for key, reserved in self._reserved.items() if key != group for one in reserved]
        purchase = Purchase(nodeset, offer, count, self._context.accounts[offer.provider].abilities.billing)
        return refusal(purchase, self._context.budget, self._nodeset_budgets, [*self._counted.values(), *others], now)

    def note_refusal(
        self, group: Hashable, nodeset: str, nodes: Sequence[str], joined: int, offers: Sequence[Offer]
    ) -> None:
        """Remember a refused group, to find out when its money is there. `joined` of its nodes have machines."""
        self._refused[group] = _RefusedGroup(nodeset, tuple(nodes), len(nodes) - joined, tuple(offers))

    def find_affordable(self, snapshot: ClusterSnapshot) -> None:
        """Find nodes that are down because of a budget which now allows them: at once, not at their next retry.

        A node whose refusal an earlier service recorded is retried too: that service may have had another budget.
        """
        down = {name for name, node in snapshot.nodes.items() if refused_by_budget(node)}
        present = down | {name for name, node in snapshot.nodes.items() if wants_machine(node)}
        self._refused = {key: one for key, one in self._refused.items() if present.intersection(one.nodes)}
        if self._refused:
            self._counted = None
        for key, one in self._refused.items():
            if all(self.refusal(key, one.nodeset, offer, one.count, snapshot.now) for offer in one.offers):
                down.difference_update(one.nodes)
        self._context.affordable_nodes = frozenset(down)

    def reserve(self, group: Hashable, rentals: Sequence[Rental]) -> None:
        """Replace a group's reservation."""
        self._reserved[group] = list(rentals)

    def ordered(self, rentals: Sequence[Rental]) -> None:
        """Count rentals that are now in the ledger."""
        if self._counted is not None:
            self._counted.update({rental.token: rental for rental in rentals})

    def uncount(self, rental: Rental) -> None:
        """Stop counting a rental whose order failed, or that is released."""
        if self._counted is not None:
            self._counted.pop(rental.token, None)
