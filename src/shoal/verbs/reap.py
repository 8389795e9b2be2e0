"""`shoal reap`: delete every instance that carries the cluster's mark, from any machine that has the provider keys.

It needs neither the controller nor its ledger. A list may lag behind an order, so an empty one counts only when the
ledger has no recent order, or after the time that this provider's lists may lag. An instance that is in the ledger and
was never listed does not count as gone: the key at hand may be another team's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import FailureKind, ProviderLogin, RentalProvider, RentedInstance
from shoal.errors import ProviderError, ShoalError
from shoal.roles.orphaned_rentals import orphan_finding
from shoal.spec.finding import Finding
from shoal.spec.members import provider_accounts as accounts_of
from shoal.verbs.context import Context, note_at_exit
from shoal.verbs.provider_accounts import Open, ask_all, open_accounts
from shoal.verbs.rentals import LedgerRental, ledger_rentals, record_ended

CLEAN_LISTS = 2
"""A provider is clean after this many empty lists in a row."""
MAX_LISTS = 60
"""An instance must be gone after this many lists."""
DELETE_AGAIN_LISTS = 6
"""An instance that is stopping and stays is deleted again after this many lists."""
MAX_FAILURES = 3
"""A provider may fail to answer this often in a row."""
SWEEP_TIMEOUT_S = 1200.0
"""For one provider account: its lists may lag for minutes, and instances may take as long to go."""


@dataclass(frozen=True)
class Polling:
    """How often providers are asked for their list."""

    interval_s: float = 5.0
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


POLLING = Polling()


@dataclass(frozen=True)
class ReapPreview:
    """What providers have of a cluster, and which of them did not answer."""

    cluster: str
    found: tuple[RentedInstance, ...]
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    unlisted: tuple[RentedInstance, ...] = ()
    """Instances in the ledger that no list shows; set only where all lists are empty."""
    findings: tuple[Finding, ...] = ()
    """Instances of provider accounts that the file lacks; set only where all lists are empty."""
    hosts: tuple[RentedInstance, ...] = ()
    """Rented hosts, which `reap` leaves alone: `shoal down` releases them."""


@dataclass(frozen=True)
class ReapResult:
    cluster: str
    gone: tuple[RentedInstance, ...] = ()
    remaining: tuple[RentedInstance, ...] = ()
    """Instances that exist, or may: the provider did not answer again, or only the ledger has them."""
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """By provider account: why it could not be asked, did not delete, or cannot be trusted."""
    findings: tuple[Finding, ...] = ()
    """Instances of provider accounts that the file lacks, and those removed from the ledger without proof."""
    hosts: tuple[RentedInstance, ...] = ()
    """Rented hosts, as before."""

    @property
    def clean(self) -> bool:
        errors = any(finding.level == "error" for finding in self.findings)
        return not (self.remaining or self.failures or errors)


async def preview(context: Context, opened: Open = rental_provider, polling: Polling | None = None) -> ReapPreview:
    """What `reap` would delete. Reports "nothing" only once the lists can be trusted."""
    answers, failures = await ask_all(open_accounts(context.spec), partial(_all_instances, context.cluster), opened)
    instances = [instance for account in answers.values() for instance in account]
    hosts = tuple(instance for instance in instances if instance.permanent)
    if instances_found := tuple(instance for instance in instances if not instance.permanent):
        return ReapPreview(context.cluster, instances_found, failures, hosts=hosts)
    results = await _sweep(context, opened, polling, delete=False)
    problems = {**results.failures, **results.doubts()}
    return ReapPreview(context.cluster, results.left(), problems, results.unlisted(), results.orphans, hosts)


async def reap(
    context: Context, opened: Open = rental_provider, polling: Polling | None = None, *, force: bool = False
) -> ReapResult:
    """Delete instances until every provider's list is clean, then record in the ledger what is proved gone.

    With `force`, also remove from the ledger what no list ever showed.
    """
    results = await _sweep(context, opened, polling, delete=True)
    await record_ended(context, results.ended(force).items())
    unlisted, findings = results.unlisted(), results.orphans
    if force and unlisted:
        what = "removed from the ledger, although no list ever showed it"
        findings += (Finding("warning", what, ", ".join(map(str, unlisted)), "look in the provider's console"),)
    remaining = results.left() if force else (*results.left(), *unlisted)
    failures = results.failures if force else {**results.failures, **results.doubts()}
    return ReapResult(context.cluster, results.gone(), remaining, failures, findings, results.hosts())


async def _sweep(context: Context, opened: Open, polling: Polling | None, *, delete: bool) -> _SweepResults:
    """List every provider account until the result can be trusted, and delete on the way if asked to."""
    accounts = open_accounts(context.spec)
    rentals = await ledger_rentals(context)
    sweeps = {
        account.name: _AccountSweep(
            context.cluster,
            account,
            polling or POLLING,
            delete,
            None if rentals is None else [rental for rental in rentals if rental.account == account.name],
        )
        for account in accounts.usable
    }
    title = "providers cleared" if delete else "providers asked"
    with (
        note_at_exit(lambda: _possibly_remaining_text(sweeps)),
        context.progress.phase(title, len(sweeps)) as phase,
    ):

        async def run(account: ProviderLogin, provider: RentalProvider) -> None:
            await sweeps[account.name].run(provider, lambda text: phase.update(account.name, text))
            phase.done(account.name)

        _, failures = await ask_all(accounts, run, opened, SWEEP_TIMEOUT_S)
    return _SweepResults(context.cluster, sweeps, failures, _orphans(context, rentals or ()))


def _possibly_remaining_text(sweeps: Mapping[str, _AccountSweep]) -> str:
    """What may still exist, for an operator who interrupts."""
    names = [f"{instance.node} ({instance})" for sweep in sweeps.values() for instance in sweep.left.values()]
    ids = {id for sweep in sweeps.values() for id in sweep.seen}
    rentals = [rental for sweep in sweeps.values() for rental in sweep.rentals or ()]
    names += [str(rental) for rental in rentals if rental.live and rental.id not in ids]
    instances_text = ", ".join(names) or "no list has shown an instance so far"
    return f"not proved gone: {instances_text}; run `shoal reap` again until all are"


def _orphans(context: Context, rentals: Iterable[LedgerRental]) -> tuple[Finding, ...]:
    """Rentals of provider accounts that the file lacks: no provider is asked about them here."""
    accounts = accounts_of(context.spec)
    orphans = [rental for rental in rentals if rental.live and rental.account not in accounts]
    return (orphan_finding(context.spec, orphans, context.controller.name),) if orphans else ()


@dataclass(frozen=True)
class _SweepResults:
    """The sweeps of all provider accounts, ended."""

    cluster: str
    sweeps: Mapping[str, _AccountSweep]
    failures: Mapping[str, ShoalError]
    orphans: tuple[Finding, ...]

    def left(self) -> tuple[RentedInstance, ...]:
        return tuple(instance for sweep in self.sweeps.values() for instance in sweep.left.values())

    def hosts(self) -> tuple[RentedInstance, ...]:
        return tuple(instance for sweep in self.sweeps.values() for instance in sweep.hosts)

    def gone(self) -> tuple[RentedInstance, ...]:
        listed_instances = [(sweep, instance) for sweep in self.sweeps.values() for instance in sweep.seen.values()]
        return tuple(instance for sweep, instance in listed_instances if instance.id not in sweep.left)

    def unlisted(self) -> tuple[RentedInstance, ...]:
        """Instances in the ledger that a clean provider account never listed."""
        return tuple(
            RentedInstance(rental.id, self.cluster, rental.node, rental.token, "error", "not listed", account=name)
            for name, sweep in self._clean_sweeps().items()
            for rental in sweep.unlisted
        )

    def doubts(self) -> dict[str, ShoalError]:
        """Why the clean list of such a provider account is not trusted."""
        errors: dict[str, ShoalError] = {}
        for name, sweep in self._clean_sweeps().items():
            if sweep.unlisted:
                ids = ", ".join(rental.id for rental in sweep.unlisted)
                pronoun = "it" if len(sweep.unlisted) == 1 else "them"
                errors[name] = ProviderError(
                    f"the ledger has {name} {ids}, this key's list does not show {pronoun}: "
                    "is it the right key or project?",
                    hint=f"use the key and project that rented {pronoun}; a service that runs on the controller "
                    f"removes what is gone; or make sure that nothing is left, and use `shoal reap --force`",
                )
        return errors

    def ended(self, force: bool) -> dict[LedgerRental, float]:
        """Rentals that are proved gone, with the seconds since. An order without an instance is, where we may list."""
        return {
            rental: sweep.seconds_since_gone(rental.token)
            for sweep in self._clean_sweeps().values()
            for rental in sweep.rentals or ()
            if force or not sweep.unlisted or sweep.was_listed(rental)
        }

    def _clean_sweeps(self) -> dict[str, _AccountSweep]:
        return {name: sweep for name, sweep in self.sweeps.items() if name not in self.failures and not sweep.left}


async def _all_instances(cluster: str, login: ProviderLogin, provider: RentalProvider) -> list[RentedInstance]:
    """The cluster's nodes and rented hosts. A client may list more, which are another cluster's."""
    listed = await provider.instances(cluster)
    return [replace(instance, account=login.name) for instance in listed if instance.cluster == cluster]


@dataclass
class _AccountSweep:
    """The instances of one provider account while they go. Its last list counts when it stops answering."""

    cluster: str
    login: ProviderLogin
    polling: Polling
    delete: bool
    """Whether to delete what is listed; else the first instance ends the sweep."""
    rentals: Sequence[LedgerRental] | None
    """What the ledger has of this account; None where it cannot be read."""
    seen: dict[str, RentedInstance] = field(default_factory=dict)
    left: dict[str, RentedInstance] = field(default_factory=dict)
    hosts: list[RentedInstance] = field(default_factory=list)
    """Rented hosts: they are `down`'s."""
    _gone_at: dict[str, float] = field(default_factory=dict)
    """When an instance was first missing in a list, by token."""

    async def run(self, provider: RentalProvider, say: Callable[[str], None]) -> None:
        clean_lists = failures = dirty_lists = 0
        waited_s = 0.0  # without the time that the lists themselves take
        error_text = ""
        while True:
            try:
                self._note(await _all_instances(self.cluster, self.login, provider))
            except ProviderError as error:
                failures += 1
                if failures >= MAX_FAILURES:
                    raise
                say(error.message)
            else:
                failures = 0
                clean_lists = 0 if self.left else clean_lists + 1
                dirty_lists += bool(self.left)
                lag_s = self._list_lag(provider.abilities.grace_s) - waited_s
                if (clean_lists >= CLEAN_LISTS and lag_s <= 0) or (self.left and not self.delete):
                    return
                if dirty_lists >= MAX_LISTS:
                    raise self._make_error(error_text)
                instances = [
                    instance
                    for instance in self.left.values()
                    if instance.state != "stopping" or dirty_lists % DELETE_AGAIN_LISTS == 0
                ]
                error_text = await self._delete(provider, instances) if instances else error_text
                say(self._progress(lag_s))
            await self.polling.sleep(self.polling.interval_s)
            waited_s += self.polling.interval_s

    @property
    def unlisted(self) -> list[LedgerRental]:
        """Rentals in the ledger whose instance no list showed."""
        return [rental for rental in self.rentals or () if rental.confirmed and not self.was_listed(rental)]

    def was_listed(self, rental: LedgerRental) -> bool:
        return rental.id in self.seen or any(rental.token == instance.token for instance in self.seen.values())

    def seconds_since_gone(self, token: str) -> float:
        return time.monotonic() - self._gone_at[token] if token in self._gone_at else 0.0

    def _note(self, instances: Sequence[RentedInstance]) -> None:
        earlier = self.left
        self.hosts = [instance for instance in instances if instance.permanent]
        self.left = {instance.id: instance for instance in instances if not instance.permanent}
        self.seen |= self.left
        for id, instance in earlier.items():
            if id not in self.left:
                self._gone_at[instance.token] = time.monotonic()

    def _list_lag(self, grace_s: float) -> float:
        """Seconds from the start until an empty list can be trusted."""
        if self.rentals is None:
            return grace_s
        tokens = {instance.token for instance in self.seen.values()}
        return max((grace_s - rental.age for rental in self.rentals if rental.token not in tokens), default=0.0)

    def _progress(self, lag_s: float) -> str:
        if self.left:
            return f"{len(self.left)} to go"
        return f"lists none; one may still appear for {lag_s:.0f} s" if lag_s > 0 else "lists none"

    def _make_error(self, error_text: str) -> ProviderError:
        text = f"{len(self.left)} machines are still there after {MAX_LISTS} lists"
        text += f": {error_text}" if error_text else ""
        return ProviderError(text, hint="delete them in the provider's console")

    async def _delete(self, provider: RentalProvider, instances: list[RentedInstance]) -> str:
        """Delete instances. Returns the error of one of them, if any failed."""
        try:
            outcomes = await provider.delete(instances)
        except ProviderError as error:
            return error.message
        failed_outcome = next((outcome for outcome in outcomes if not outcome.ok), None)
        if failed_outcome is not None and failed_outcome.failure is FailureKind.AUTH:
            raise ProviderError(failed_outcome.message, hint="check that the key is valid and may delete")
        return failed_outcome.message if failed_outcome else ""
