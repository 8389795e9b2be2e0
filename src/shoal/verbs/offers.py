"""`shoal offers`: which machines the providers of the spec offer now, where, and at what price."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import Offer, ProviderLogin, Query, RentalProvider
from shoal.cloud.providers.prices import prices, store_prices
from shoal.errors import ShoalError
from shoal.verbs.context import Context
from shoal.verbs.provider_accounts import Open, ask_all, open_accounts


@dataclass(frozen=True)
class OffersResult:
    cluster: str
    offers: tuple[Offer, ...]
    """Cheapest first, then those without a price, last those not available now."""
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """The provider accounts that did not answer."""


async def offers(
    context: Context, query: Query, providers: Iterable[str] = (), opened: Open = rental_provider
) -> OffersResult:
    """Ask all provider accounts, or those named. Prices that an API lacks come from our table, with their date."""
    accounts = open_accounts(context.spec, providers)
    with context.progress.phase("providers asked", len(accounts.usable)) as phase:

        async def question(account: ProviderLogin, client: RentalProvider) -> list[Offer]:
            account_offers = await client.offers(query)
            phase.done(account.name)
            return account_offers

        answers, failures = await ask_all(accounts, question, opened)
    today = time.strftime("%Y-%m-%d", time.gmtime())
    matching_offers: list[Offer] = []
    for account in accounts.usable:
        account_offers = answers.get(account.name, [])
        if not account.url:  # a simulator's prices must not enter the table
            store_prices(account.kind, account_offers, today)
        # For some providers only our table has the contents of a machine, so the query applies after it.
        matching_offers += (offer for offer in prices().fill(account.kind, account_offers) if query.admits(offer))
    return OffersResult(context.cluster, tuple(sorted(matching_offers, key=_order)), failures)


def _order(offer: Offer) -> tuple[bool, bool, float, str, str, str]:
    has_no_price = offer.usd_hour is None
    return (offer.available == "no", has_no_price, offer.usd_hour or 0.0, offer.provider, offer.type, offer.place)
