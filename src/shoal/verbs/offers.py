"""`shoal offers`: which machines the providers of the spec have now, where, and for how much."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.errors import ShoalError
from shoal.providers.prices import prices, refreshed
from shoal.providers.rental import Account, Offer, Query, Renter
from shoal.providers.rented import renter
from shoal.verbs.accounts import Open, ask_all, open_accounts
from shoal.verbs.context import Context


@dataclass(frozen=True)
class OffersResult:
    cluster: str
    offers: tuple[Offer, ...]
    """Cheapest first; what has no price comes after, and last what cannot be had now."""
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """The accounts that could not be asked."""


async def offers(context: Context, query: Query, providers: Iterable[str] = (), opened: Open = renter) -> OffersResult:
    """Ask all accounts, or those named, side by side. Prices that an API lacks come from our table, with their day."""
    accounts = open_accounts(context.spec, providers)
    with context.progress.phase("providers asked", len(accounts.usable)) as phase:

        async def question(account: Account, one: Renter) -> list[Offer]:
            found = await one.offers(query)
            phase.done(account.name)
            return found

        answers, failures = await ask_all(accounts, question, opened)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    found: list[Offer] = []
    for account in accounts.usable:
        told = answers.get(account.name, [])
        if not account.url:  # what a simulator asks is nobody's price
            refreshed(account.kind, told, today)
        # Some learn what is in a machine from our table only.
        found += (offer for offer in prices().fill(account.kind, told) if query.admits(offer))
    return OffersResult(context.cluster, tuple(sorted(found, key=_order)), failures)


def _order(offer: Offer) -> tuple[bool, bool, float, str, str, str]:
    unknown = offer.usd_hour is None
    return (offer.available == "no", unknown, offer.usd_hour or 0.0, offer.provider, offer.type, offer.place)
