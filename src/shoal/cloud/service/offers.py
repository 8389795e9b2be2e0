"""Which offers to try for a nodeset, in what order, and which are blocked for now.

Blocks are remembered in the ledger: missing capacity for ten minutes at its place, an exhausted quota or balance for an
hour, a rejected key until `shoal up` runs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from shoal.cloud.providers.api import FailureKind, Offer, Query, RequestOutcome
from shoal.cloud.providers.responses import ApiError
from shoal.cloud.rental import OrderBlock
from shoal.cloud.service.context import ServiceContext, log
from shoal.cloud.service.provider_account import MAX_FAILURES, UNREACHABLE_PAUSE_S, error_text
from shoal.cloud.service.scheduling import is_due
from shoal.spec.rental import OfferChoice, RentedSet

MAX_OFFERS = 25
"""The most offers that are tried for one job before it waits."""
CAPACITY_RETRY_S = 600.0
QUOTA_RETRY_S = 3600.0
BALANCE_RETRY_S = 3600.0
"""An account without money is retried after this time: payments are not reported to us."""
_AVAILABILITY_RANK = {"yes": 0, "low": 1, "unknown": 2, "no": 3}

ListedOffers = Sequence[tuple[OfferChoice, Sequence[Offer]]]
"""The `offers` of a nodeset, each with what its provider lists for it."""


def query(choice: OfferChoice) -> Query:
    """The query for one of a nodeset's `offers`."""
    return Query(
        types=(choice.type,) if choice.type else (),
        regions=(choice.region,) if choice.region else (),
        zones=(choice.zone,) if choice.zone else (),
        market=choice.market,
    )


def candidates(nodeset: RentedSet, listed: ListedOffers, blocks: Sequence[OrderBlock]) -> list[Offer]:
    """The offers to try, as the nodeset prefers, without duplicates, blocked ones and those above max_price.

    Offers that the provider lists as unavailable come last, and only where the spec names their place: such lists are
    not reliable, but each attempt takes time.
    """
    ranked: dict[tuple[str, ...], tuple[tuple[float, ...], Offer]] = {}
    for line, (choice, offers) in enumerate(listed):
        for offer in offers:
            if not _fits(choice, offer) or any(block.covers(offer) for block in blocks):
                continue
            if _too_expensive(nodeset, offer) or (offer.available == "no" and not (choice.region or choice.zone)):
                continue
            ranked.setdefault(offer.identity, (_order(nodeset, line, offer), offer))
    return [offer for _, offer in sorted(ranked.values(), key=lambda one: (one[0], one[1].place))][:MAX_OFFERS]


def image_of(nodeset: RentedSet, offer: Offer) -> str:
    """The image that the spec names for an offer; empty for the provider's default."""
    return next((choice.image or "" for choice in nodeset.offers if _fits(choice, offer)), "")


def block_for(offer: Offer, outcome: RequestOutcome, now: float) -> OrderBlock | None:
    """What to block after a failed order; None if the order can be repeated."""
    account = offer.provider
    place = {"provider": "", "region": offer.region}.get(outcome.scope, offer.place)  # that the failure concerns
    match outcome.failure:
        case FailureKind.CAPACITY:
            why = f"{_at(account, place)} out of {offer.type}{_spot(offer)}"
            return OrderBlock(account, offer.type, place, offer.market, now + CAPACITY_RETRY_S, why)
        case FailureKind.QUOTA if outcome.scope == "provider":
            return OrderBlock(
                account, until=now + QUOTA_RETRY_S, why=f"{account} has no more for us: our quota is used up"
            )
        case FailureKind.QUOTA:
            why = f"{_at(account, offer.region)} has no more {offer.type} for us: our quota is used up"
            return OrderBlock(account, offer.type, offer.region, until=now + QUOTA_RETRY_S, why=why)
        case FailureKind.BALANCE:
            why = f"{account} has no money left of ours (top it up; it is tried again every hour)"
            return OrderBlock(account, until=now + BALANCE_RETRY_S, why=why)
        case FailureKind.AUTH:
            return OrderBlock(account, why=f"{account} does not accept our key (replace it, then run `shoal up`)")
        case FailureKind.INVALID | FailureKind.CONFLICT:
            message = f": {outcome.message}" if outcome.message else ""
            why = f"{_at(account, place)} does not take an order for {offer.type}{message}"
            return OrderBlock(account, offer.type, place, offer.market, now + QUOTA_RETRY_S, why)
        case _:
            return None


def trying_text(offer: Offer, before: str = "") -> str:
    """The comment for a job's owner: where its nodes are tried now, and why not elsewhere."""
    where = f"trying {_at(offer.provider, offer.place)}{_spot(offer)}"
    return f"{before}, {where}" if before else where


def why_none(
    nodeset: RentedSet, listed: ListedOffers, blocks: Sequence[OrderBlock], now: float
) -> tuple[str, float | None]:
    """For a nodeset without candidates: why, and when to retry; None for not before a person acts."""
    reasons: dict[str, float | None] = {}
    for choice, offers in listed:
        fitting = [offer for offer in offers if _fits(choice, offer)]
        covering = [one for one in blocks if _block_applies(one, choice) or any(one.covers(offer) for offer in fitting)]
        for one in covering:
            reasons[one.why] = one.until
        free = [offer for offer in fitting if not any(one.covers(offer) for one in covering)]
        if not fitting and not covering:
            reasons[f"{_line(choice)} offers nothing now"] = now + CAPACITY_RETRY_S
        elif free and all(_too_expensive(nodeset, offer) for offer in free):
            reasons[_price_text(nodeset, choice, free)] = now + CAPACITY_RETRY_S
        elif free:
            reasons[f"{_line(choice)} has none left"] = now + CAPACITY_RETRY_S
    again = min((until for until in reasons.values() if until is not None), default=None)
    text = "; ".join([*reasons][:3]) + (f" and {len(reasons) - 3} more" if len(reasons) > 3 else "")
    return text + ("" if again is None else f"; next try at {datetime.fromtimestamp(again, UTC):%H:%M} UTC"), again


def _order(nodeset: RentedSet, line: int, offer: Offer) -> tuple[float, ...]:
    price = float("inf") if offer.usd_hour is None else offer.usd_hour
    rank = _AVAILABILITY_RANK[offer.available]
    out = float(offer.available == "no")
    return (out, price, rank, line) if nodeset.prefer == "cheapest" else (out, line, price, rank)


def _fits(choice: OfferChoice, offer: Offer) -> bool:
    """Whether an offer matches one of the nodeset's `offers`."""
    return offer.provider == choice.provider and query(choice).admits(offer)


def _too_expensive(nodeset: RentedSet, offer: Offer) -> bool:
    return nodeset.max_price is not None and (offer.usd_hour is None or offer.usd_hour > nodeset.max_price)


def _price_text(nodeset: RentedSet, choice: OfferChoice, offers: Iterable[Offer]) -> str:
    price = min((offer.usd_hour for offer in offers if offer.usd_hour is not None), default=None)
    cost = "gives no price" if price is None else f"costs ${price:.2f} an hour"
    return f"{_line(choice)} {cost}, and max_price is ${nodeset.max_price:.2f}"


def _block_applies(one: OrderBlock, choice: OfferChoice) -> bool:
    """Whether a block covers a choice for which nothing is listed."""
    return (
        one.account == choice.provider
        and one.type in ("", choice.type)
        and (one.place in ("", choice.zone, choice.region) or not (choice.zone or choice.region))
        and one.market in ("", choice.market)
    )


def _line(choice: OfferChoice) -> str:
    return " ".join(filter(None, (choice.provider, choice.zone or choice.region, choice.type)))


def _at(account: str, place: str) -> str:
    return f"{account} {place}" if place else account


def _spot(offer: Offer) -> str:
    return " spot" if offer.market == "spot" else ""


MAX_AGE_S = 60.0
RETRY_INTERVAL_S = 5.0


@dataclass
class OfferCatalog:
    """The offers of all nodesets, each as old as MAX_AGE_S at most while its provider answers."""

    context: ServiceContext
    _known: dict[tuple[str, Query], tuple[float, tuple[Offer, ...]]] = field(default_factory=dict)
    _failed: dict[str, tuple[float, int]] = field(default_factory=dict)
    """When an account last failed to answer, and how often in a row."""
    _asking: dict[tuple[str, Query], asyncio.Lock] = field(default_factory=dict)

    async def offers(self, nodeset: RentedSet) -> tuple[tuple[OfferChoice, tuple[Offer, ...]], ...]:
        """The offers for each choice of the nodeset, in sequence. Empty for a provider that never answered."""
        offers = await asyncio.gather(*(self._of(choice) for choice in nodeset.offers))
        return tuple(zip(nodeset.offers, offers, strict=True))

    async def refresh(self, nodeset: RentedSet, max_age_s: float) -> None:
        """Ask providers about choices for which nothing is known, or nothing newer than that."""
        oldest = self.context.clock.now() - max_age_s
        keys = [(choice.provider, query(choice)) for choice in nodeset.offers]
        if any(self._known.get(key, (float("-inf"), ()))[0] < oldest for key in keys):
            await self.offers(nodeset)

    def known(self, nodeset: RentedSet) -> tuple[tuple[OfferChoice, tuple[Offer, ...]], ...]:
        """What providers listed for each choice when they were last asked. Asks nobody."""
        return tuple(
            (choice, self._known.get((choice.provider, query(choice)), (0.0, ()))[1]) for choice in nodeset.offers
        )

    def unsure(self, nodeset: RentedSet, blocks: Sequence[OrderBlock]) -> bool:
        """Whether some account did not answer just now, so that its offers are unknown."""
        shut = {block.account for block in blocks if not block.type}
        return any(account in self._failed for account in nodeset.accounts if account not in shut)

    async def _of(self, choice: OfferChoice) -> tuple[Offer, ...]:
        key = (choice.provider, query(choice))
        account = self.context.accounts.get(choice.provider)
        if account is None:
            return ()
        async with self._asking.setdefault(key, asyncio.Lock()):
            at, offers = self._known.get(key, (float("-inf"), ()))
            now = self.context.clock.now()
            if not is_due(at + MAX_AGE_S, now, MAX_AGE_S):
                return offers
            failed_at, failures = self._failed.get(choice.provider, (float("-inf"), 0))
            if not is_due(failed_at + RETRY_INTERVAL_S, now):
                return offers
            try:
                offers = tuple(await account.offers(query(choice)))
            except Exception as error:  # any error: one provider's client must not block the others
                self._note_failure(choice, error, failures + 1)
                return offers  # the last offers; an order shows whether it is still valid
            self._failed.pop(choice.provider, None)
            self._known[key] = (self.context.clock.now(), offers)
            return offers

    def _note_failure(self, choice: OfferChoice, error: Exception, failures: int) -> None:
        now, account = self.context.clock.now(), choice.provider
        log.warning("%s: cannot list offers: %s", account, error_text(error))
        self._failed[account] = (now, failures)
        if isinstance(error, ApiError) and error.failure is FailureKind.RATE:
            self._failed[account] = (now + error.retry_after, failures - 1)  # it does answer
            return
        if isinstance(error, ApiError) and error.scope == "provider":
            offer = Offer(account, choice.type or "", choice.region or "")
            # only failures of the whole account count here: nothing was ordered
            block = block_for(offer, error.outcome(), now)
            if block is not None and not block.type:
                self.context.ledger.block(account, "", "", "", block.until, block.why)
        if failures >= MAX_FAILURES:
            self.context.ledger.block(account, "", "", "", now + UNREACHABLE_PAUSE_S, f"{account} does not answer")
            del self._failed[account]
