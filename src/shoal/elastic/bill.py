"""What one rental costs: its provider's rule applied to its times. Pure, and exact: sums over periods add up."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise

from shoal.elastic.money import for_time, micros
from shoal.elastic.rentals import Rental


def cost(rental: Rental, at: float, *, whole: bool = False) -> int:
    """What was billed for it up to that time, in millionths of a dollar.

    What is not known to be billed yet costs nothing, or, with `whole`, what it costs if it was billed at once: that is
    how budgets count.
    """
    begun = _begun(rental, whole)
    if begun is None or rental.usd_hour is None or at <= begun:
        return 0
    ended = min(at, _ended(rental))
    spent, counted = 0, 0
    for until, usd_hour in _prices(rental, rental.usd_hour):
        # A step that has begun costs what it cost when it began.
        billed = rental.billing.seconds(min(ended, until) - begun) if until > begun else 0
        spent += for_time(micros(usd_hour), max(0, billed - counted))
        counted = max(counted, billed)
    return spent


def _prices(rental: Rental, last: float) -> Iterator[tuple[float, float]]:
    """Until when each price was asked, in their order."""
    for (_, usd_hour), (changed, _) in pairwise(rental.prices):
        yield changed, usd_hour
    yield float("inf"), last


def between(rental: Rental, since: float, until: float, *, whole: bool = False) -> int:
    """What was billed for it in a period. A step of the bill counts where it begins."""
    return cost(rental, until, whole=whole) - cost(rental, since, whole=whole)


def rate(rental: Rental) -> int:
    """What it costs an hour now, in millionths: priced orders count, what the bill has ended for does not."""
    return micros(rental.usd_hour) if rental.usd_hour is not None and rental.live and not rental.billed_until else 0


def presence(rental: Rental, since: float, until: float) -> tuple[float, float] | None:
    """From when to when its machine was there within a period; None where it was not."""
    begun = _begun(rental, False)
    if begun is None or begun >= until or _ended(rental) < since:
        return None
    return max(since, begun), max(since, begun, min(until, _ended(rental)))


def day_of(at: float) -> tuple[float, float]:
    """The day of a time, by UTC: its beginning and its end."""
    begin = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return begin.timestamp(), (begin + timedelta(days=1)).timestamp()


def month_of(at: float) -> tuple[float, float]:
    """The month of a time, by UTC: its beginning and its end."""
    begin = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    following = (begin + timedelta(days=32)).replace(day=1)
    return begin.timestamp(), following.timestamp()


def _begun(rental: Rental, whole: bool) -> float | None:
    if rental.billed_from is not None:
        return rental.billed_from
    if rental.made_at is not None and (rental.joined_at is not None or not rental.billing.from_up):
        return rental.made_at
    # An order of which nothing is known, or a machine that is not up at a provider that bills from then on.
    return rental.begun if whole and rental.live else None


def _ended(rental: Rental) -> float:
    if rental.billed_until is not None:
        return rental.billed_until
    return rental.gone_at if rental.gone_at is not None else float("inf")
