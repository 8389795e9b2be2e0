"""The provider accounts of a spec with their keys, one question to all of them at once, and `shoal offers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import Offer, ProviderLogin, Query, RentalProvider
from shoal.cloud.providers.prices import prices, store_prices
from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.spec.finding import Finding
from shoal.spec.local_files import resolve_secret
from shoal.spec.members import provider_accounts as accounts_of
from shoal.spec.members import rented_sets
from shoal.spec.model import Spec
from shoal.spec.rental import account_settings
from shoal.verbs.context import Context
from shoal.verbs.rentals import read_public_report

PROVIDER_TIMEOUT_S = 90.0
"""For one question, however many pages the answer has."""

T = TypeVar("T")
Open = Callable[[ProviderLogin], RentalProvider]
"""Opens the client of a provider account."""


@dataclass(frozen=True)
class OpenAccounts:
    """The provider accounts of a cluster that can be used, and why others cannot."""

    usable: tuple[ProviderLogin, ...]
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """By provider account: why its key cannot be read."""


def open_accounts(spec: Spec, chosen: Iterable[str] = ()) -> OpenAccounts:
    """The provider accounts of a spec, or those chosen by name or kind. A missing key affects only its account."""
    accounts = accounts_of(spec)
    if not accounts:
        raise UsageError(
            f"cluster {spec.cluster} has no provider account",
            hint="add one to the file, as in `providers: {lambda: {key: env:LAMBDA_API_KEY}}`",
        )
    selection = tuple(chosen)
    for name in selection:
        if name not in accounts and name not in {account.kind for account in accounts.values()}:
            hint = f"use one of {', '.join(accounts)}"
            raise UsageError(f"cluster {spec.cluster} has no provider account {name}", hint=hint)
    logins: list[ProviderLogin] = []
    failures: dict[str, ShoalError] = {}
    for name, account in accounts.items():
        kind = account.kind or name
        if selection and name not in selection and kind not in selection:
            continue
        try:
            secret = resolve_secret(account.key, f"providers.{name}.key").decode() if account.key else ""
        except (ShoalError, UnicodeDecodeError) as error:
            key_error = UsageError(f"providers.{name}.key is not text", hint="put the key into it")
            failures[name] = error if isinstance(error, ShoalError) else key_error
            continue
        logins.append(ProviderLogin(name, kind, secret, account.url or "", account_settings(account)))
    return OpenAccounts(tuple(logins), failures)


async def ask_all(
    accounts: OpenAccounts,
    question: Callable[[ProviderLogin, RentalProvider], Awaitable[T]],
    opened: Open = rental_provider,
    timeout: float = PROVIDER_TIMEOUT_S,
) -> tuple[dict[str, T], dict[str, ShoalError]]:
    """The answers of all provider accounts, asked concurrently, and the errors of those that gave none."""

    async def ask(account: ProviderLogin) -> T | ShoalError:
        try:
            client = opened(account)
            try:
                return await asyncio.wait_for(question(account, client), timeout)
            finally:
                await client.close()
        except TimeoutError:
            return ProviderError(f"{account.name} does not answer within {timeout:.0f} s", hint="try again later")
        except ShoalError as error:
            return error
        except Exception as error:  # a bug in one client must not affect the others
            return ProviderError(f"{account.name}: its client failed: {type(error).__name__}", hint="report this bug")

    results = await asyncio.gather(*(ask(account) for account in accounts.usable))
    answers: dict[str, T] = {}
    failures = dict(accounts.failures)
    for account, answer in zip(accounts.usable, results, strict=True):
        if isinstance(answer, ShoalError):
            failures[account.name] = answer
        else:
            answers[account.name] = answer
    return answers, failures


async def release_findings(spec: Spec, opened: Open = rental_provider) -> list[Finding]:
    """What keeps this machine from releasing rented machines: a missing package, or a key that is none.

    The controller has its own packages, so it could rent what `shoal reap` and `shoal down` cannot release from here. A
    key that is not on this machine is reported where it is needed.
    """
    used = {account for nodeset in rented_sets(spec).values() for account in nodeset.accounts}
    findings = []
    for login in open_accounts(spec).usable if used else ():
        try:
            await opened(login).close()
        except ShoalError as error:
            what = f"machines of {login.name} could not be released from here: {error.message}"
            if login.name in used:
                findings.append(Finding("error", what, fix=error.hint, path=f"providers.{login.name}"))
    return findings


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
    if context.joined is not None:
        return await _read_as_user(context, query, tuple(providers))
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


async def _read_as_user(context: Context, query: Query, providers: tuple[str, ...]) -> OffersResult:
    """What the cluster can rent, as its rental service publishes it: the keys of providers are the operator's."""
    async with context.controller_host() as host:
        report = await read_public_report(context, host)
    names = sorted({offer.provider for offer in report.offers})
    unknown = [name for name in providers if name not in names]
    if unknown:
        raise UsageError(
            f"cluster {context.cluster} rents from no {', '.join(unknown)}", hint=f"use one of {', '.join(names)}"
        )
    offers = [
        offer for offer in report.offers if query.admits(offer) and (not providers or offer.provider in providers)
    ]
    return OffersResult(context.cluster, tuple(sorted(offers, key=_order)))


def _order(offer: Offer) -> tuple[bool, bool, float, str, str, str]:
    has_no_price = offer.usd_hour is None
    return (offer.available == "no", has_no_price, offer.usd_hour or 0.0, offer.provider, offer.type, offer.place)
