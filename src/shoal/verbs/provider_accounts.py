"""The provider accounts of a spec with their keys, one question to all of them at once, and `shoal offers`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TypeVar

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import FailureKind, Offer, ProviderLogin, Query, RentalProvider, RentedInstance
from shoal.cloud.providers.capabilities import HasFirewall, HasQuotas, KeepsMachines
from shoal.cloud.providers.prices import prices, store_prices
from shoal.cloud.providers.responses import ApiError
from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.roles.rented import rented_ports
from shoal.spec.finding import Finding, Level
from shoal.spec.local_files import resolve_secret
from shoal.spec.members import members, rented_sets
from shoal.spec.members import provider_accounts as accounts_of
from shoal.spec.model import Spec
from shoal.spec.rental import OfferChoice, account_settings
from shoal.verbs.context import Context
from shoal.verbs.rentals import read_public_report

PROVIDER_TIMEOUT_S = 90.0
"""For one question, however many pages the answer has."""

MAX_REGIONS = 12
"""So many regions are asked for their quotas where the file names none."""
ERROR: Level = "error"
WARNING: Level = "warning"
UNCERTAIN = (FailureKind.TRANSIENT, FailureKind.AMBIGUOUS, FailureKind.RATE, FailureKind.CAPACITY)
"""Failures that say nothing about an account."""

T = TypeVar("T")


class UnansweredError(ProviderError):
    """A provider did not answer in time."""


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
            return UnansweredError(f"{account.name} does not answer within {timeout:.0f} s", hint="try again later")
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
    used |= {member.provider for member in members(spec) if member.machine and member.provider}
    findings = []
    for login in open_accounts(spec).usable if used else ():
        try:
            await opened(login).close()
        except ShoalError as error:
            what = f"machines of {login.name} could not be released from here: {error.message}"
            if login.name in used:
                findings.append(Finding("error", what, fix=error.hint, path=f"providers.{login.name}"))
    return findings


async def account_findings(spec: Spec, opened: Open = rental_provider) -> list[Finding]:
    """What provider accounts answer before anything is rented: to the key, the types and places named, and quotas."""
    choices: dict[str, list[_Choice]] = {}
    for choice in _choices(spec):
        choices.setdefault(choice.offer.provider, []).append(choice)
    if not accounts_of(spec):
        return []
    accounts = open_accounts(spec)
    used = OpenAccounts(accounts.usable)

    async def question(login: ProviderLogin, client: RentalProvider) -> list[Finding]:
        if login.name not in choices:
            return _forgotten_hosts(spec, login.name, await client.instances(spec.cluster))
        listed = await client.instances(spec.cluster) if isinstance(client, KeepsMachines) else []
        hosts = {one.node for one in listed if one.cluster == spec.cluster and one.permanent}
        wanted = [choice.without(hosts) for choice in choices[login.name]]
        answers = [await _ask(client, choice) for choice in wanted if choice.max]
        answers.append(_forgotten_hosts(spec, login.name, listed))
        if not isinstance(client, HasQuotas):
            what = "no quota in this provider's API, so it is not checked"
            answers.append([Finding("info", what, path=f"providers.{login.name}")])
        if isinstance(client, HasFirewall):
            what = "the first rental makes or corrects its firewall, if the key may; otherwise run these commands"
            if fixes := await client.firewall_fixes(spec.cluster, rented_ports(spec)):
                reasons, commands = "; ".join(fix.reason for fix in fixes), "\n".join(fix.command for fix in fixes)
                answers.append([Finding("info", what, reasons, commands, path=f"providers.{login.name}")])
        return [finding for findings in answers for finding in findings]

    answers, failures = await ask_all(used, question, opened)
    findings = [finding for account in answers.values() for finding in account]
    for name in (name for name in choices if name in accounts.failures):
        what = "its key is not on this machine, so it was not asked"
        findings.append(Finding("info", what, accounts.failures[name].message, path=f"providers.{name}"))
    for name, error in failures.items():
        if isinstance(error, ApiError) and error.failure not in UNCERTAIN and name not in choices:
            level, what = WARNING, "it rejects our question; the file rents nothing from it"
        elif isinstance(error, ApiError) and error.failure not in UNCERTAIN:
            level, what = ERROR, "it rejects our question, and would reject every order"
        elif isinstance(error, ApiError | UnansweredError):
            level, what = WARNING, "it does not answer, so its key, types and quotas are not checked"
        else:
            continue  # its client cannot be made, which `release_findings` reports
        findings.append(Finding(level, what, error.message, error.hint, path=f"providers.{name}"))
    return findings


def _forgotten_hosts(spec: Spec, account: str, listed: Iterable[RentedInstance]) -> list[Finding]:
    """Rented hosts of the cluster that the file does not rent from this account any more."""
    named = {member.name: member for member in members(spec)}

    def is_named(one: RentedInstance) -> bool:
        """Whether the file rents it, or it is in its place there: `place_hosts` gives rented hosts an address."""
        member = named.get(one.node)
        return member is not None and (bool(member.machine) or not one.host or member.address == one.host)

    forgotten = [one for one in listed if one.cluster == spec.cluster and one.permanent and not is_named(one)]
    fix = "`shoal up` on the machine that rented it releases it; or delete it in the provider's console"
    return [
        Finding(
            "warning",
            f"a rented host of this cluster is there, which the file does not name: {one.node}",
            f"{one.id}, {one.type} in {one.zone or one.region}, {one.raw_state}; it is paid for",
            fix,
            path=f"providers.{account}",
        )
        for one in forgotten
    ]


@dataclass(frozen=True)
class _Choice:
    """What the file rents from one account."""

    path: str
    max: int
    most: str
    """The words for `max`, in a finding."""
    offer: OfferChoice
    hosts: frozenset[str] = frozenset()
    """The hosts that it is for, where they stay."""

    @property
    def stays(self) -> bool:
        return bool(self.hosts)

    def without(self, present: Container[str]) -> _Choice:
        """The same without the hosts that are rented already."""
        missing = sum(host not in present for host in self.hosts)
        return replace(self, max=missing, most=f"the file wants {missing} more") if self.hosts else self


def _choices(spec: Spec) -> Iterator[_Choice]:
    for nodeset in rented_sets(spec).values():
        for offer in nodeset.offers:
            yield _Choice(f"nodesets.{nodeset.name}", nodeset.max, f"`max` is {nodeset.max}", offer)
    for path in ("controller", "login"):
        hosts = [member for member in members(spec) if member.nodeset == path and member.machine and member.provider]
        for member in hosts[:1]:
            machine = member.machine
            assert machine is not None
            fields = {"provider": member.provider, "type": machine.type, "region": machine.region, "zone": machine.zone}
            offer = OfferChoice.model_validate({key: value for key, value in fields.items() if value})
            yield _Choice(path, len(hosts), "", offer, frozenset(host.name for host in hosts))


async def _ask(client: RentalProvider, chosen: _Choice) -> list[Finding]:
    """What a provider answers to one choice of the file."""
    choice, path = chosen.offer, chosen.path
    account = choice.provider
    if chosen.stays and not isinstance(client, KeepsMachines):
        what = f"{account} rents out no host that stays"
        return [Finding("error", what, fix="rent it elsewhere, such as from gcp or aws", path=path)]
    query = Query(
        types=(choice.type,) if choice.type else (),
        regions=(choice.region,) if choice.region else (),
        zones=(choice.zone,) if choice.zone else (),
        market=choice.market,
    )
    offers = await client.offers(query)
    market = "" if choice.market == "on-demand" else choice.market
    name = " ".join(filter(None, (choice.type, choice.zone or choice.region, market)))
    if not offers:
        what = f"{account} lists no {name}: there is no such type or place, or it is sold out everywhere"
        return [Finding("warning", what, fix=f"`shoal offers --provider {account}` lists them", path=path)]
    if all(offer.note for offer in offers):
        return [Finding("error", offers[0].note, path=path)]
    if all(offer.available == "no" for offer in offers):
        waits = "`shoal up` fails" if chosen.stays else "jobs for it wait"
        return [Finding("info", f"{account} has no {name} now; {waits}", path=path)]
    if not isinstance(client, HasQuotas):
        return []
    by_region = {offer.region: offer for offer in offers}
    try:
        quotas = [await client.quotas(offer) for offer in list(by_region.values())[:MAX_REGIONS]]
    except ApiError as error:  # it listed its offers, so the key is good
        what = f"{account} does not tell its quotas, so they are not checked"
        return [Finding("info", what, error.message, error.hint, path=path)]
    most = max(quotas, key=lambda some: min((quota.machines for quota in some), default=chosen.max))
    fix = "ask the provider for a higher quota, or name another type or place"
    return [
        Finding(
            "warning" if quota.machines else "error",
            f"the quota {quota.name} of {account} allows {quota.machines} more {choice.type}",
            f"limit {quota.limit:g}, in use {quota.usage:g}; one needs {quota.need:g}, and {chosen.most}",
            fix,
            path=path,
        )
        for quota in most
        if quota.machines < chosen.max
    ]


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
