"""Hard limits on money: whether machines may be ordered, and which must go, in words that a person reads. Pure.

An hour's limit is on what all machines together cost an hour, orders included. A day's and a month's limit is on what
is spent, by UTC: machines are ordered only while an hour of them, and of all that runs already, still fits. So a job
that was given nodes has at least that hour before anything is ended. When a day's or a month's money is spent follows
from the ledger alone, also when it was spent a while ago.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from shoal.elastic.bill import between, cost, day_of, month_of, rate
from shoal.elastic.money import HOUR, for_time, micros, told
from shoal.elastic.rentals import BY_THE_SECOND, Rental
from shoal.providers.rental import Billing, Offer
from shoal.spec.rented import Budget
from shoal.train.contract import GRACE_SECONDS

AHEAD = GRACE_SECONDS + 60.0
"""Machines are told to go so many seconds before their budget is spent: jobs save their work, then they are deleted."""
FIX = "raise `budget` and run `shoal up`, or wait"


@dataclass(frozen=True)
class Wish:
    """Machines that somebody wants: all of them, or none."""

    nodeset: str
    offer: Offer
    count: int
    billing: Billing = BY_THE_SECOND
    """How the offer's provider bills: `renter.abilities.billing`."""


def since(now: float) -> float:
    """From when on the ledger's rows matter: `ledger.all(budget.since(now))`."""
    return month_of(now)[0]


def refusal(
    wish: Wish, whole: Budget | None, own: Mapping[str, Budget | None], rentals: Sequence[Rental], now: float
) -> str | None:
    """Why these machines may not be ordered; None where they may.

    `whole` is the cluster's budget and `own` what nodesets have of their own; `rentals` are all since `since(now)`.
    """
    limits = [("", whole, rentals)]
    limits.append((wish.nodeset, own.get(wish.nodeset), [one for one in rentals if one.nodeset == wish.nodeset]))
    for nodeset, budget, counted in limits:
        if budget is None or not _limited(budget):
            continue
        if wish.offer.usd_hour is None:
            return _unpriced(wish)
        if why := _refusal(wish, budget, nodeset, counted, now):
            return why
    return None


def spent(
    whole: Budget | None,
    own: Mapping[str, Budget | None],
    rentals: Sequence[Rental],
    now: float,
    ahead: float = AHEAD,
) -> dict[str, str]:
    """The nodesets whose machines are to go because a budget that says `then: end` is used up, each with the reason."""
    ending: dict[str, str] = {}
    live = {rental.nodeset for rental in rentals if rental.live}
    for nodeset, budget in (("", whole), *own.items()):
        if budget is None or budget.end_after is None:
            continue
        counted = [one for one in rentals if nodeset in ("", one.nodeset)]
        if why := _used_up(budget, nodeset, counted, now, ahead - budget.end_after):
            ending.update(dict.fromkeys(live & {nodeset} if nodeset else live, why))
    return ending


def _refusal(wish: Wish, budget: Budget, nodeset: str, rentals: Sequence[Rental], now: float) -> str | None:
    price = micros(wish.offer.usd_hour or 0.0)
    machines = f"{wish.count} × {wish.offer.type}" if wish.count > 1 else wish.offer.type
    if budget.per_hour is not None:
        running = sum(rate(rental) for rental in rentals)
        if running + wish.count * price > micros(budget.per_hour):
            return (
                f"{_named(nodeset)} of {told(micros(budget.per_hour))} an hour: {told(running)} is in use, and"
                f" {machines} costs {told(wish.count * price)} an hour ({FIX} until others end)"
            )
    for limit, period in _periods(budget, now):
        ahead = min(HOUR, period.end - now)
        used = _used(rentals, period, now)
        # One that goes costs a few seconds more; the bill of one that runs goes on.
        running = sum(
            cost(rental, now + ahead, whole=True) - cost(rental, now, whole=True) for rental in _staying(rentals)
        )
        wanted = wish.count * for_time(price, wish.billing.seconds(ahead))
        if used + running + wanted > limit:
            return (
                f"{_named(nodeset)} of {told(limit)} a {period.word}: {told(used)} is spent, and an hour of what runs"
                f" and of {machines} costs {told(running + wanted)} ({FIX} until {period.next})"
            )
    return None


def _used_up(budget: Budget, nodeset: str, rentals: Sequence[Rental], now: float, ahead: float) -> str | None:
    """Why machines are to go: the limit is reached `ahead` seconds from now; less than none is so long ago."""
    for limit, period in _periods(budget, now):
        at = _used(rentals, period, min(now, now + ahead))
        if ahead > 0:
            at += sum(cost(one, now + ahead, whole=True) - cost(one, now, whole=True) for one in _staying(rentals))
        if at >= limit:
            used, late = told(_used(rentals, period, now)), f" for {budget.after}" if budget.after else ""
            return f"{_named(nodeset)} of {told(limit)} a {period.word} is used up{late}: {used} is spent"
    return None


@dataclass(frozen=True)
class _Period:
    word: str
    begin: float
    end: float

    @property
    def next(self) -> str:
        """When the next one begins: `16 November 00:00 UTC`."""
        return f"{datetime.fromtimestamp(self.end, UTC):%-d %B %H:%M} UTC"


def _periods(budget: Budget, now: float) -> Iterable[tuple[int, _Period]]:
    if budget.per_day is not None:
        yield micros(budget.per_day), _Period("day", *day_of(now))
    if budget.per_month is not None:
        yield micros(budget.per_month), _Period("month", *month_of(now))


def _used(rentals: Iterable[Rental], period: _Period, now: float) -> int:
    return sum(between(rental, period.begin, now, whole=True) for rental in rentals)


def _staying(rentals: Iterable[Rental]) -> Iterable[Rental]:
    return (rental for rental in rentals if rental.live and rental.state != "releasing")


def _limited(budget: Budget) -> bool:
    return any(limit is not None for limit in (budget.per_hour, budget.per_day, budget.per_month))


def _named(nodeset: str) -> str:
    return f"the budget of nodeset {nodeset}" if nodeset else "the budget"


def _unpriced(wish: Wish) -> str:
    offer = wish.offer
    return (
        f"it is not known what {offer.provider} {offer.place} asks for {offer.type}, so no budget can hold it"
        " (rent a type that has a price in `shoal offers`, or take the budget away)"
    )
