"""A rental: one machine for one node, from the order to the bill, as the ledger stores it. Pure.

intended ──▶ made ──▶ joined ──▶ releasing ──▶ gone        also: made, joined ──▶ gone       the machine died
    │                                                            intended ──▶ releasing      no longer needed
    └──────▶ failed                                              failed ──▶ made             it was listed late
                                                                 gone ──▶ releasing          it was listed again

Money is whole millionths of a dollar: sums of these are exact, sums of floats are not.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from datetime import UTC, datetime, timedelta
from decimal import ROUND_HALF_UP, Decimal
from functools import lru_cache
from typing import Any, Literal

from shoal.cloud.providers.api import Billing, Market, Offer
from shoal.remote.rental_ledger import LIVE_STATES

RentalState = Literal["intended", "made", "joined", "releasing", "gone", "failed"]

LIVE: tuple[RentalState, ...] = LIVE_STATES
"""In these states a machine exists, or may exist: it counts against budgets and is searched for at its provider."""

TRANSITIONS: dict[RentalState, tuple[RentalState, ...]] = {
    "intended": ("made", "releasing", "failed"),
    "made": ("joined", "releasing", "gone"),
    "joined": ("releasing", "gone"),
    "releasing": ("gone",),
    "gone": ("releasing",),
    "failed": ("made",),
}
"""The allowed transitions. One to the current state is always allowed and changes nothing."""

REJECTED = "rejected"
"""The `trouble` of a rental whose machine did not become a node, and whose job has not started since."""
REPLACED = "replaced"
"""The same once the job has started."""

BY_THE_SECOND = Billing()
UNKNOWN_OFFER = Offer("", "", "")


@dataclass(frozen=True)
class Rental:
    """One machine for one node, from order to bill. Times are seconds since 1970."""

    token: str
    """Unique; the machine carries it."""
    node: str
    nodeset: str = ""
    account: str = ""
    """The provider account, as the spec names it."""
    offer: Offer = UNKNOWN_OFFER
    state: RentalState = "intended"
    id: str = ""
    """The machine's id at the provider; empty until known."""
    usd_hour: float | None = None
    """The current price: the provider's last, until then the offer's."""
    intended_at: float = 0.0
    made_at: float | None = None
    joined_at: float | None = None
    released_at: float | None = None
    gone_at: float | None = None
    jobs: tuple[str, ...] = ()
    """The jobs it was ordered for."""
    reason: str = ""
    """Why it is released, or why the order failed."""
    trouble: str = ""
    """The kind of failure of an order, a value of `FailureKind`; or REJECTED, REPLACED: its machine became no node."""
    billing: Billing = BY_THE_SECOND
    """How its provider bills time: `provider.abilities.billing`."""
    billed_from: float | None = None
    """When billing starts, if known; otherwise at `made_at`."""
    billed_until: float | None = None
    """When billing ends, if known: mostly when the delete was accepted. Otherwise at `gone_at`."""
    prices: tuple[tuple[float, float], ...] = ()
    """The provider's prices: start time and US dollars an hour. The first counts from the beginning."""
    host_key: str = ""
    """The public host key that the machine must show; empty: trusted on first use."""
    unfit_machine: str = ""
    """The `machine_id` of a rejected machine: it is not rented again. Empty where the provider does not tell."""

    def __str__(self) -> str:
        return f"{self.node} ({self.account} {self.id or 'on order'})"

    @property
    def live(self) -> bool:
        return self.state in LIVE

    @property
    def begun(self) -> float:
        """Since when it exists, or may exist: its lifetime counts from then."""
        return self.intended_at if self.made_at is None else self.made_at


@dataclass(frozen=True)
class OrderBlock:
    """What must not be ordered for a while. An empty field matches everything."""

    account: str
    type: str = ""
    place: str = ""
    """A zone, or a region with all of its zones."""
    market: Market | Literal[""] = ""
    until: float | None = None
    """None: until `shoal up` runs."""
    why: str = ""
    nodeset: str = ""

    def covers(self, offer: Offer) -> bool:
        return (
            self.account == offer.provider
            and self.type in ("", offer.type)
            and self.place in ("", offer.zone, offer.region)
            and self.market in ("", offer.market)
        )


_UNCONVERTED_FIELDS = (
    *("token", "node", "nodeset", "account", "state", "id", "trouble", "reason", "host_key", "unfit_machine"),
)
_TIMES = ("intended_at", "made_at", "joined_at", "released_at", "gone_at", "billed_from", "billed_until")


def to_row(rental: Rental) -> dict[str, object]:
    """A rental as the columns of the ledger's table."""
    price = rental.offer.usd_hour if rental.usd_hour is None else rental.usd_hour
    return {
        **{name: getattr(rental, name) for name in (*_UNCONVERTED_FIELDS, *_TIMES)},
        "offer": json.dumps(asdict(rental.offer)),
        "jobs": json.dumps(rental.jobs),
        "micros_hour": price_of(price),
        "billing": json.dumps(asdict(rental.billing)),
        "prices": prices_text(rental.prices),
    }


def from_row(row: Mapping[str, Any]) -> Rental:
    """A rental from the columns of the ledger's table."""
    return Rental(
        **{name: row[name] for name in (*_UNCONVERTED_FIELDS, *_TIMES)},
        offer=_from_json(Offer, row["offer"]),
        jobs=tuple(json.loads(row["jobs"])),
        usd_hour=None if row["micros_hour"] is None else dollars(row["micros_hour"]),
        billing=_from_json(Billing, row["billing"]),
        prices=tuple((since, dollars(amount)) for since, amount in json.loads(row["prices"])),
    )


def host_to_row(host: Rental, at: float) -> dict[str, object]:
    """A rented host, seen at this time, as the columns of its table."""
    row = to_row(host)
    shared = ("token", "node", "account", "offer", "id", "micros_hour", "billing")
    return {**{name: row[name] for name in shared}, "begun": host.begun, "seen": max(at, host.begun), "stopped": 0}


def host_from_row(row: Mapping[str, Any]) -> Rental:
    """A time in which a rented host ran, as a rental without a nodeset."""
    begun: float = row["begun"]
    return Rental(
        token=f"{row['token']}@{begun:.0f}",
        node=row["node"],
        account=row["account"],
        offer=_from_json(Offer, row["offer"]),
        state="gone" if row["stopped"] else "joined",
        id=row["id"],
        usd_hour=None if row["micros_hour"] is None else dollars(row["micros_hour"]),
        intended_at=begun,
        made_at=begun,
        joined_at=begun,
        gone_at=row["seen"] if row["stopped"] else None,
        billing=_from_json(Billing, row["billing"]),
    )


def price_of(usd: float | None) -> int | None:
    """A price in millionths, if there is one."""
    return None if usd is None else micros(usd)


def prices_text(prices: Iterable[tuple[float, float]]) -> str:
    """Prices with their times, as stored in the ledger: in millionths."""
    return json.dumps([(since, micros(usd)) for since, usd in prices])


@lru_cache(maxsize=4096)
def _from_json(kind: type[Any], text: str) -> Any:
    """A value from its JSON. Cached, as many rows share an offer."""
    return kind(**known_fields(kind, json.loads(text)))


def known_fields(kind: type[Any], data: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a dataclass in stored data, without those that only a later version has."""
    names = {field.name for field in fields(kind)}
    return {name: value for name, value in data.items() if name in names}


MILLION = 1_000_000
HOUR_S = 3600


def micros(usd: float | str | Decimal) -> int:
    """Dollars in millionths."""
    if isinstance(usd, float):
        return round(usd * MILLION)
    return int((Decimal(str(usd)) * MILLION).to_integral_value(ROUND_HALF_UP))


def dollars(amount: int) -> float:
    """Millionths in dollars."""
    return amount / MILLION


def cost_of_time(micros_hour: int, seconds: int) -> int:
    """The cost of `seconds` at a price per hour."""
    return (micros_hour * seconds + HOUR_S // 2) // HOUR_S


def format_dollars(amount: int) -> str:
    """`$31.92`, to the cent, as a person reads it."""
    cents = (Decimal(amount) / MILLION).quantize(Decimal("0.01"), ROUND_HALF_UP)
    return f"-${-cents:,}" if cents < 0 else f"${cents:,}"


def format_known_cost(amount: int, unpriced: int) -> str:
    """A sum that leaves out `unpriced` machines of unknown price: it is unknown too, or only a lower limit."""
    if not unpriced:
        return format_dollars(amount)
    return f"at least {format_dollars(amount)}" if amount else "price unknown"


def cost(rental: Rental, at: float, *, whole: bool = False) -> int:
    """What was billed for it until `at`, in millionths of a dollar.

    A machine that is not known to be billed yet costs nothing; with `whole`, as budgets count, it is billed from the
    order.
    """
    start = _billing_start(rental, whole)
    if start is None or rental.usd_hour is None or at <= start:
        return 0
    end = min(at, _billing_end(rental))
    total, counted_s = 0, 0
    changes = [*(since for since, _ in rental.prices[1:]), float("inf")]
    prices = [*(usd for _, usd in rental.prices[:-1]), rental.usd_hour]
    for change, usd_hour in zip(changes, prices, strict=True):
        # a billing step costs the price at its start
        billed_s = rental.billing.seconds(min(end, change) - start) if change > start else 0
        total += cost_of_time(micros(usd_hour), max(0, billed_s - counted_s))
        counted_s = max(counted_s, billed_s)
    return total


def cost_between(rental: Rental, since: float, until: float, *, whole: bool = False) -> int:
    """What was billed for it in a period. A billing step counts where it starts."""
    return cost(rental, until, whole=whole) - cost(rental, since, whole=whole)


def hourly_rate(rental: Rental) -> int:
    """What it costs per hour now, in millionths: orders count, machines whose billing has ended do not."""
    return micros(rental.usd_hour) if rental.usd_hour is not None and rental.live and not rental.billed_until else 0


def presence(rental: Rental, since: float, until: float) -> tuple[float, float] | None:
    """From when to when its machine existed within a period; None if it did not."""
    start = _billing_start(rental, False)
    if start is None or start >= until or _billing_end(rental) < since:
        return None
    return max(since, start), max(since, start, min(until, _billing_end(rental)))


def day_of(at: float) -> tuple[float, float]:
    """Start and end of the day of a time, in UTC."""
    begin = datetime.fromtimestamp(at, UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    return begin.timestamp(), (begin + timedelta(days=1)).timestamp()


def month_of(at: float) -> tuple[float, float]:
    """Start and end of the month of a time, in UTC."""
    begin = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    next_month = (begin + timedelta(days=32)).replace(day=1)
    return begin.timestamp(), next_month.timestamp()


def _billing_start(rental: Rental, from_order: bool) -> float | None:
    if rental.billed_from is not None:
        return rental.billed_from
    if rental.made_at is not None and (rental.joined_at is not None or not rental.billing.from_up):
        return rental.made_at
    # an order without an answer, or a machine that is not up where billing starts with that
    return rental.begun if from_order and rental.live else None


def _billing_end(rental: Rental) -> float:
    if rental.billed_until is not None:
        return rental.billed_until
    return rental.gone_at if rental.gone_at is not None else float("inf")
