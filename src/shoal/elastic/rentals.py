"""A machine that was wanted, made, used and given back, as the ledger keeps it. Pure.

intended ──▶ made ──▶ joined ──▶ releasing ──▶ gone        also: made, joined ──▶ gone       it died
    │                                                            intended ──▶ releasing      wanted no longer
    └──────▶ failed                                              failed ──▶ made             it turned up late
                                                                 gone ──▶ releasing          it turned up again
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import Any, Literal, TypeVar

from shoal.elastic.money import dollars, micros
from shoal.providers.rental import Billing, Market, Offer

RentalState = Literal["intended", "made", "joined", "releasing", "gone", "failed"]

LIVE: tuple[RentalState, ...] = ("intended", "made", "joined", "releasing")
"""In these a machine is there, or may be: it counts against budgets and is looked for at its provider."""

STEPS: dict[RentalState, tuple[RentalState, ...]] = {
    "intended": ("made", "releasing", "failed"),
    "made": ("joined", "releasing", "gone"),
    "joined": ("releasing", "gone"),
    "releasing": ("gone",),
    "gone": ("releasing",),
    "failed": ("made",),
}
"""From each state, where to. The step to the state it is in is always fine and changes nothing."""

BY_THE_SECOND = Billing()

T = TypeVar("T", Offer, Billing)


@dataclass(frozen=True)
class Rental:
    """One machine for one node, from the wish to the end. Times are seconds since 1970."""

    token: str
    """Ours alone; the machine carries it."""
    node: str
    nodeset: str
    account: str
    """The provider's account, as the spec names it."""
    offer: Offer
    state: RentalState = "intended"
    id: str = ""
    """The provider's name of the machine; empty until it is known."""
    usd_hour: float | None = None
    """What it costs now: what the provider told last, until then what the offer said."""
    intended_at: float = 0.0
    made_at: float | None = None
    joined_at: float | None = None
    released_at: float | None = None
    gone_at: float | None = None
    jobs: tuple[str, ...] = ()
    """The jobs it was wanted for."""
    reason: str = ""
    """Why it goes, or why there is none."""
    trouble: str = ""
    """The kind of trouble, where the order failed: a value of `Trouble`."""
    billing: Billing = BY_THE_SECOND
    """How its provider turns time into money: `renter.abilities.billing`."""
    billed_from: float | None = None
    """From when on the provider bills, where it told; otherwise from `made_at`."""
    billed_until: float | None = None
    """Until when, where it is known: mostly when it took our delete. Otherwise until `gone_at`."""
    prices: tuple[tuple[float, float], ...] = ()
    """What the provider told of the price: from when on, and US dollars an hour. The first is from the beginning."""

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def begun(self) -> float:
        """Since when it is there, or may be: its lifetime counts from then."""
        return self.intended_at if self.made_at is None else self.made_at


@dataclass(frozen=True)
class Block:
    """What is not to be ordered for a while. An empty field stands for all there are."""

    account: str
    type: str = ""
    place: str = ""
    """A zone, or a region with all of its zones."""
    market: Market | Literal[""] = ""
    until: float | None = None
    """None: until somebody acts and runs `shoal up`."""
    why: str = ""

    def covers(self, offer: Offer) -> bool:
        return (
            self.account == offer.provider
            and self.type in ("", offer.type)
            and self.place in ("", offer.zone, offer.region)
            and self.market in ("", offer.market)
        )


_SAME = ("token", "node", "nodeset", "account", "state", "id", "trouble", "reason")
_TIMES = ("intended_at", "made_at", "joined_at", "released_at", "gone_at", "billed_from", "billed_until")


def to_row(rental: Rental) -> dict[str, object]:
    """A rental as the columns of the ledger's table."""
    price = rental.offer.usd_hour if rental.usd_hour is None else rental.usd_hour
    return {
        **{name: getattr(rental, name) for name in (*_SAME, *_TIMES)},
        "offer": json.dumps(asdict(rental.offer)),
        "jobs": json.dumps(rental.jobs),
        "micros_hour": price_of(price),
        "billing": json.dumps(asdict(rental.billing)),
        "prices": prices_text(rental.prices),
    }


def from_row(row: Mapping[str, Any]) -> Rental:
    """The same back."""
    return Rental(
        **{name: row[name] for name in (*_SAME, *_TIMES)},
        offer=_offer(row["offer"]),
        jobs=tuple(json.loads(row["jobs"])),
        usd_hour=None if row["micros_hour"] is None else dollars(row["micros_hour"]),
        billing=_billing(row["billing"]),
        prices=tuple((since, dollars(amount)) for since, amount in json.loads(row.get("prices", "[]"))),
    )


def price_of(usd: float | None) -> int | None:
    """A price in millionths, where there is one."""
    return None if usd is None else micros(usd)


def prices_text(prices: Iterable[tuple[float, float]]) -> str:
    """Prices with their times, as the ledger's column has them: in millionths."""
    return json.dumps([(since, micros(usd)) for since, usd in prices])


@lru_cache(maxsize=4096)
def _offer(text: str) -> Offer:
    """An offer from its JSON; most rows have one of a few."""
    return _known(Offer, text)


@lru_cache(maxsize=64)
def _billing(text: str) -> Billing:
    return _known(Billing, text)


def _known(kind: type[T], text: str) -> T:
    """A value from its JSON. A field that a later Shoal wrote is nothing to us."""
    known = {field.name for field in fields(kind)}
    return kind(**{name: value for name, value in json.loads(text).items() if name in known})
