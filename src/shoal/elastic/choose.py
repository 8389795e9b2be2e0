"""Where a nodeset's next machines come from: which offers to try, in what order, and what to leave alone. Pure.

What was out is remembered: capacity for ten minutes where it was missing, a quota and an empty account for an hour, an
account that is not let in until somebody acts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from shoal.elastic.rentals import Block
from shoal.providers.rental import Offer, Outcome, Query, Trouble
from shoal.spec.rented import OfferChoice, RentedSet

TRIES = 25
"""So many offers are tried for one job at most, before it waits."""
CAPACITY_SECONDS = 600.0
QUOTA_SECONDS = 3600.0
MONEY_SECONDS = 3600.0
"""An account without money is tried again after so long: whoever pays says so to the provider, not to us."""
_READILY = {"yes": 0, "low": 1, "unknown": 2, "no": 3}

Listed = Sequence[tuple[OfferChoice, Sequence[Offer]]]
"""The lines of a nodeset, each with what its provider offers for it."""


def query(choice: OfferChoice) -> Query:
    """What to ask a provider for a line of the file."""
    return Query(
        types=(choice.type,) if choice.type else (),
        regions=(choice.region,) if choice.region else (),
        zones=(choice.zone,) if choice.zone else (),
        market=choice.market,
    )


def candidates(nodeset: RentedSet, listed: Listed, blocks: Sequence[Block]) -> list[Offer]:
    """The offers to try, best first, as the nodeset prefers. Each comes once, and none that is blocked or too dear.

    What the provider says it has none of is tried last, and only where the file names that very place: such lists are
    neither complete nor quite true, but each try takes time.
    """
    found: dict[tuple[str, ...], tuple[tuple[float, ...], Offer]] = {}
    for line, (choice, offers) in enumerate(listed):
        for offer in offers:
            if not _fits(choice, offer) or any(block.covers(offer) for block in blocks):
                continue
            if _too_dear(nodeset, offer) or (offer.available == "no" and not (choice.region or choice.zone)):
                continue
            found.setdefault(offer.identity, (_order(nodeset, line, offer), offer))
    return [offer for _, offer in sorted(found.values(), key=lambda one: (one[0], one[1].place))][:TRIES]


def block(offer: Offer, outcome: Outcome, now: float) -> Block | None:
    """What to leave alone after an order that was not filled; None where it can be sent again as it is."""
    account, place = offer.provider, _place(offer, outcome)
    match outcome.trouble:
        case Trouble.CAPACITY:
            why = f"{_at(account, place)} out of {offer.type}{_spot(offer)}"
            return Block(account, offer.type, place, offer.market, now + CAPACITY_SECONDS, why)
        case Trouble.QUOTA if outcome.scope == "provider":
            return Block(account, until=now + QUOTA_SECONDS, why=f"{account} has no more for us: our quota is used up")
        case Trouble.QUOTA:
            region = offer.region
            why = f"{_at(account, region)} has no more {offer.type} for us: our quota is used up"
            return Block(account, offer.type, region, until=now + QUOTA_SECONDS, why=why)
        case Trouble.BALANCE:
            why = f"{account} has no money left of ours (top it up; it is tried again every hour)"
            return Block(account, until=now + MONEY_SECONDS, why=why)
        case Trouble.AUTH:
            return Block(account, why=f"{account} does not accept our key (replace it, then run `shoal up`)")
        case Trouble.INVALID | Trouble.CONFLICT:
            said = f": {outcome.message}" if outcome.message else ""
            why = f"{_at(account, place)} does not take an order for {offer.type}{said}"
            return Block(account, offer.type, place, offer.market, now + QUOTA_SECONDS, why)
        case _:
            return None


def trying(offer: Offer, trouble: str = "") -> str:
    """Where a job's nodes are looked for, as its owner reads it, with what stood in the way before."""
    where = f"trying {_at(offer.provider, offer.place)}{_spot(offer)}"
    return f"{trouble}, {where}" if trouble else where


def why_none(nodeset: RentedSet, listed: Listed, blocks: Sequence[Block], now: float) -> tuple[str, float | None]:
    """Why there is nothing to try, and when that may change: None for not before somebody acts.

    For a nodeset without candidates.
    """
    reasons: dict[str, float | None] = {}
    for choice, offers in listed:
        fitting = [offer for offer in offers if _fits(choice, offer)]
        covering = [one for one in blocks if _concerns(one, choice) or any(one.covers(offer) for offer in fitting)]
        for one in covering:
            reasons[one.why] = one.until
        free = [offer for offer in fitting if not any(one.covers(offer) for one in covering)]
        if not fitting and not covering:
            reasons[f"{_line(choice)} offers nothing now"] = now + CAPACITY_SECONDS
        elif free and all(_too_dear(nodeset, offer) for offer in free):
            reasons[_dearest(nodeset, choice, free)] = now + CAPACITY_SECONDS
        elif free:
            reasons[f"{_line(choice)} has none left"] = now + CAPACITY_SECONDS
    times = [until for until in reasons.values() if until is not None]
    again = min(times, default=None)
    return _sentence(list(reasons), again), again


def _sentence(reasons: Sequence[str], again: float | None) -> str:
    named = "; ".join(reasons[:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    when = "" if again is None else f"; next try at {datetime.fromtimestamp(again, UTC):%H:%M} UTC"
    return named + when


def _order(nodeset: RentedSet, line: int, offer: Offer) -> tuple[float, ...]:
    price = float("inf") if offer.usd_hour is None else offer.usd_hour
    readily = _READILY[offer.available]
    out = float(offer.available == "no")
    return (out, price, readily, line) if nodeset.prefer == "cheapest" else (out, line, price, readily)


def _fits(choice: OfferChoice, offer: Offer) -> bool:
    """Whether an offer is what a line of the file says."""
    return offer.provider == choice.provider and query(choice).admits(offer)


def _too_dear(nodeset: RentedSet, offer: Offer) -> bool:
    return nodeset.max_price is not None and (offer.usd_hour is None or offer.usd_hour > nodeset.max_price)


def _dearest(nodeset: RentedSet, choice: OfferChoice, offers: Iterable[Offer]) -> str:
    known = [offer.usd_hour for offer in offers if offer.usd_hour is not None]
    if not known:
        return f"{_line(choice)} gives no price, and max_price is ${nodeset.max_price:.2f}"
    return f"{_line(choice)} costs ${min(known):.2f} an hour, and max_price is ${nodeset.max_price:.2f}"


def _concerns(one: Block, choice: OfferChoice) -> bool:
    """Whether a block says something of a line for which nothing is listed."""
    return (
        one.account == choice.provider
        and one.type in ("", choice.type)
        and (one.place in ("", choice.zone, choice.region) or not (choice.zone or choice.region))
        and one.market in ("", choice.market)
    )


def _place(offer: Offer, outcome: Outcome) -> str:
    """How much of a provider is out of it."""
    return {"provider": "", "region": offer.region}.get(outcome.scope, offer.place)


def _line(choice: OfferChoice) -> str:
    return " ".join(filter(None, (choice.provider, choice.zone or choice.region, choice.type)))


def _at(account: str, place: str) -> str:
    return f"{account} {place}" if place else account


def _spot(offer: Offer) -> str:
    return " spot" if offer.market == "spot" else ""
