"""What rented hosts cost, asked before they are rented; and whether what was rented is what the file says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from shoal.cloud.providers import abilities
from shoal.errors import UsageError
from shoal.hosts.provider import HostQuote, Instance, Request
from shoal.roles.rented_images import machine_system
from shoal.slurm.versions import Version, packaged_version
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import provider_accounts
from shoal.spec.model import Spec
from shoal.spec.rental import account_settings
from shoal.verbs.context import Context, cannot_make
from shoal.verbs.rented_hosts import RentedHosts


async def quote_hosts(context: Context, new: Sequence[tuple[str, Request]]) -> tuple[HostQuote, ...]:
    """The cost of hosts that are to be rented, each with its provider account. Raises where one cannot be."""
    quotes: list[HostQuote] = []
    for name in dict.fromkeys(account for account, request in new if request.machine):
        provider = context.provider(name)
        requests = [request for account, request in new if account == name]
        problems = [finding for finding in provider.check(requests) if finding.level == "error"]
        if problems:
            raise cannot_make(name, problems)
        assert isinstance(provider, RentedHosts)
        quotes += await provider.quote(requests)
    return tuple(quotes)


def quotes_text(quotes: Iterable[HostQuote]) -> str:
    """`rents controller (e2-standard-2 in us-central1-b ...: $0.067 an hour)`, with the sum of several."""
    quotes = list(quotes)
    each = "; ".join(f"{quote.name} from {quote.provider} ({quote})" for quote in quotes)
    priced = [quote.usd_hour for quote in quotes if quote.usd_hour is not None]
    total = f"; together ${sum(priced):.4g} an hour" if len(quotes) > 1 and len(priced) == len(quotes) else ""
    return f"rents {each}{total}; disks, addresses and traffic are billed too"


def price_findings(quotes: Sequence[HostQuote]) -> list[Finding]:
    """What the plan says about money."""
    return [Finding("info", f"`shoal up` {quotes_text(quotes)}")] if quotes else []


def require_consent(spec: Spec, quotes: Sequence[HostQuote], given: bool) -> None:
    """Raise UsageError before anything is rented that nobody has agreed to, or that the budget does not allow."""
    if quotes and spec.budget is not None:
        unpriced = next((quote for quote in quotes if quote.usd_hour is None), None)
        if unpriced is not None:
            place = "controller" if unpriced.name == "controller" else "login"
            raise UsageError(
                f"the price of {unpriced.type} in {unpriced.place} is unknown, and the file has a budget",
                hint=f"give its price in US dollars an hour: `{place}: {{usd_hour: ...}}`",
            )
        total, most = sum(quote.usd_hour or 0.0 for quote in quotes), spec.budget.per_hour
        if most is not None and total > most:
            raise UsageError(
                f"these hosts cost ${total:.4g} an hour, and `budget.per_hour` is {most:.10g}",
                hint="rent smaller ones, or raise the budget",
            )
    if quotes and not given:
        raise UsageError(f"this {quotes_text(quotes)}", hint="use --yes")


def change_findings(members: Iterable[Member], instances: Mapping[str, Instance]) -> list[Finding]:
    """Rented hosts that are of another type, or elsewhere, than the file says."""
    findings = []
    for member in members:
        machine, instance = member.machine, instances.get(member.name)
        if machine is None or instance is None:
            continue
        pairs = (("as", instance.type, machine.type), ("in", instance.place, machine.zone))
        for word, there, wanted in pairs:
            if there and wanted and there != wanted:
                what, fix = (
                    f"was rented {word} {there}; the file now says {wanted}",
                    "`shoal down` and `shoal up` rent it anew",
                )
                findings.append(Finding("warning", what, fix=fix, host=member.name))
    return findings


def rented_versions(spec: Spec, members: Iterable[Member]) -> dict[str, Version]:
    """The Slurm that packages install on rented hosts, as far as their images tell."""
    accounts, versions = provider_accounts(spec), {}
    for member in members:
        if member.machine is None or member.provider not in accounts:
            continue
        account = accounts[member.provider]
        able = abilities(account.kind or member.provider)
        system = machine_system(able, account_settings(account), member.machine.image)
        version = packaged_version(system.id, system.version) if system else None
        if version is not None:
            versions[member.name] = version
    return versions
