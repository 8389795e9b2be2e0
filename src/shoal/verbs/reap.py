"""`shoal reap`: give back every machine that carries a cluster's mark, from wherever the keys are.

It needs neither the controller nor its ledger, so it is what is left when they are gone: providers are asked what they
have, machines are deleted, and that again until no list shows one. A list may lag behind an order, so an empty one is
believed only when the ledger knows of no recent order, or as much time has passed as that provider's lists may take.
A machine that the ledger has and no list ever showed is not gone for that: the key at hand may be another team's.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import ProviderError, ShoalError
from shoal.providers.rental import Account, Rented, Renter, Trouble
from shoal.providers.rented import renter
from shoal.roles.forgotten import Forgotten, forgotten_finding
from shoal.spec.finding import Finding
from shoal.spec.rented import accounts as accounts_of
from shoal.verbs.accounts import Accounts, Open, ask_all, open_accounts
from shoal.verbs.context import Context
from shoal.verbs.held_machines import Held, held, strike_off
from shoal.verbs.last_words import last_words

CLEAN_LOOKS = 2
"""A provider is clean when so many lists in a row show nothing."""
ROUNDS = 60
"""So many looks machines may take to go."""
AGAIN = 6
"""What is said to be going and stays is deleted again after so many looks."""
FAILURES = 3
"""So often in a row a provider may fail to answer."""
PATIENCE = 1200.0
"""Seconds for all of one account: its lists may lag for minutes, and machines may take as long to go."""


@dataclass(frozen=True)
class Pace:
    """How often providers are asked."""

    pause: float = 5.0
    """Seconds between two looks."""
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


PACE = Pace()


@dataclass(frozen=True)
class Holding:
    """A machine at a provider that carries the cluster's mark."""

    account: str
    machine: Rented


@dataclass(frozen=True)
class Look:
    """All that providers have for a cluster, and who could not be asked."""

    cluster: str
    found: tuple[Holding, ...]
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    unseen: tuple[Holding, ...] = ()
    """Machines that the ledger has and no list shows; asked for only where lists show none at all."""
    findings: tuple[Finding, ...] = ()
    """Machines of accounts that the file does not have; asked for only where lists show none at all."""


@dataclass(frozen=True)
class ReapResult:
    cluster: str
    gone: tuple[Holding, ...] = ()
    """Machines that no list shows any more."""
    remaining: tuple[Holding, ...] = ()
    """Machines that are there still, or may be: nobody could be asked again, or only the ledger has them."""
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """Why an account could not be asked, would not delete, or cannot be believed."""
    findings: tuple[Finding, ...] = ()
    """Machines of accounts that the file does not have, and what was struck off unproved."""

    @property
    def clean(self) -> bool:
        errors = any(finding.level == "error" for finding in self.findings)
        return not (self.remaining or self.failures or errors)


async def look(context: Context, opened: Open = renter, pace: Pace | None = None) -> Look:
    """What there is, without touching it. That there is nothing is said when the lists can be believed."""

    async def question(account: Account, one: Renter) -> list[Rented]:
        return _ours(context.cluster, await one.rented(context.cluster))

    answers, failures = await ask_all(open_accounts(context.spec), question, opened)
    found = _holdings((name, machines) for name, machines in answers.items())
    if found:
        return Look(context.cluster, found, failures)
    swept = await _swept(context, opened, pace, touch=False)
    failures = {**swept.failures, **swept.doubts()}
    return Look(context.cluster, swept.left(), failures, swept.unseen(), swept.strangers)


async def reap(context: Context, opened: Open = renter, pace: Pace | None = None, *, force: bool = False) -> ReapResult:
    """Delete all of it, and go on until every provider's list is clean; then note in the ledger what is proved gone.

    With `force` also what the ledger has and no list ever showed is struck off.
    """
    swept = await _swept(context, opened, pace, touch=True)
    await strike_off(context, swept.ended(force))
    unseen, findings = swept.unseen(), swept.strangers
    if force and unseen:
        named = ", ".join(f"{one.account} {one.machine.id}" for one in unseen)
        what = "removed from the ledger, although no list ever showed it"
        findings += (Finding("warning", what, named, "look in the provider's console"),)
    remaining = swept.left() if force else (*swept.left(), *unseen)
    failures = swept.failures if force else {**swept.failures, **swept.doubts()}
    return ReapResult(context.cluster, swept.gone(), remaining, failures, findings)


async def _swept(context: Context, opened: Open, pace: Pace | None, *, touch: bool) -> _Swept:
    """Every account looked at until it is known what is there, and cleared on the way if it is to be touched."""
    accounts = open_accounts(context.spec)
    known = await held(context)
    sweeps = {
        account.name: _Sweep(
            context.cluster,
            pace or PACE,
            touch,
            None if known is None else [one for one in known if one.account == account.name],
        )
        for account in accounts.usable
    }
    title = "providers cleared" if touch else "providers asked"
    with last_words(lambda: _not_proved(sweeps)):
        failures = await _sweep_all(context, accounts, sweeps, opened, title)
    return _Swept(context.cluster, sweeps, failures, _strangers(context, known or ()))


def _not_proved(sweeps: Mapping[str, _Sweep]) -> str:
    """What is still to go, as far as it is known, for who leaves in the middle."""
    found = _holdings((name, sweep.left.values()) for name, sweep in sweeps.items())
    named = [f"{one.machine.node} ({one.account} {one.machine.id})" for one in found]
    known = {one.id for sweep in sweeps.values() for one in sweep.seen.values()}
    more = [
        f"{one.node} ({one.account} {one.id or 'on order'})"
        for sweep in sweeps.values()
        for one in sweep.known or ()
        if one.live and one.id not in known
    ]
    left = ", ".join([*named, *more]) or "no list showed a machine so far"
    return f"not proved gone: {left}; `shoal reap` goes on until all are"


def _strangers(context: Context, known: Iterable[Held]) -> tuple[Finding, ...]:
    """Machines of accounts that the file does not have: nobody asks for them here."""
    named = accounts_of(context.spec)
    machines = [
        Forgotten(one.token, one.node, one.account, one.id, one.state)
        for one in known
        if one.live and one.account not in named
    ]
    return (forgotten_finding(context.spec, machines, context.controller.name),) if machines else ()


async def _sweep_all(
    context: Context, accounts: Accounts, sweeps: Mapping[str, _Sweep], opened: Open, title: str
) -> dict[str, ShoalError]:
    with context.progress.phase(title, len(sweeps)) as phase:

        async def question(account: Account, one: Renter) -> None:
            await sweeps[account.name].run(one, lambda text: phase.say(account.name, text))
            phase.done(account.name)

        _, failures = await ask_all(accounts, question, opened, PATIENCE)
    return failures


@dataclass(frozen=True)
class _Swept:
    """What has come of looking at every account."""

    cluster: str
    sweeps: Mapping[str, _Sweep]
    failures: Mapping[str, ShoalError]
    strangers: tuple[Finding, ...]

    def left(self) -> tuple[Holding, ...]:
        return _holdings((name, sweep.left.values()) for name, sweep in self.sweeps.items())

    def gone(self) -> tuple[Holding, ...]:
        return _holdings(
            (name, [one for one in sweep.seen.values() if one.id not in sweep.left])
            for name, sweep in self.sweeps.items()
        )

    def unseen(self) -> tuple[Holding, ...]:
        """What the ledger has at accounts whose lists are clean, and which they never showed."""
        return _holdings(
            (name, [Rented(one.id, self.cluster, one.node, one.token, "error", "not listed") for one in sweep.unseen])
            for name, sweep in self._clean().items()
        )

    def doubts(self) -> dict[str, ShoalError]:
        """Why the clean list of such an account is not believed."""
        found: dict[str, ShoalError] = {}
        for name, sweep in self._clean().items():
            if sweep.unseen:
                ids = ", ".join(one.id for one in sweep.unseen)
                it = "it" if len(sweep.unseen) == 1 else "them"
                found[name] = ProviderError(
                    f"the ledger has {name} {ids}, this key's list does not show {it}: is it the right key or project?",
                    hint=f"use the key and project that rented {it}; a service that runs on the controller removes "
                    f"what is gone; or see that nothing is left, and use `shoal reap --force`",
                )
        return found

    def ended(self, force: bool) -> dict[Held, float]:
        """What is proved gone, each with the seconds since. An order without a machine is, where the list is ours."""
        return {
            one: sweep.since(one.token)
            for sweep in self._clean().values()
            for one in sweep.known or ()
            if force or not sweep.unseen or sweep.shown(one)
        }

    def _clean(self) -> dict[str, _Sweep]:
        return {name: one for name, one in self.sweeps.items() if name not in self.failures and not one.left}


def _ours(cluster: str, listed: Iterable[Rented]) -> list[Rented]:
    """What carries the cluster's mark: a client that lists more must not cost somebody else a machine."""
    return [machine for machine in listed if machine.cluster == cluster]


def _holdings(found: Iterable[tuple[str, Iterable[Rented]]]) -> tuple[Holding, ...]:
    return tuple(Holding(name, machine) for name, machines in found for machine in machines)


@dataclass
class _Sweep:
    """One provider's machines while they go. What it last listed counts when it cannot be asked any more."""

    cluster: str
    pace: Pace
    touch: bool
    """Whether to delete what is found; else the first machine ends the sweep."""
    known: Sequence[Held] | None
    """What the ledger holds there; None where nobody can say."""
    seen: dict[str, Rented] = field(default_factory=dict)
    left: dict[str, Rented] = field(default_factory=dict)
    _ended: dict[str, float] = field(default_factory=dict)
    """When machines were first not listed any more, by token."""

    async def run(self, at: Renter, say: Callable[[str], None]) -> None:
        clean = failures = dirty = 0
        waited = 0.0  # what looks themselves take comes on top
        said = ""
        while True:
            try:
                self._see(_ours(self.cluster, await at.rented(self.cluster)))
            except ProviderError as error:
                failures += 1
                if failures >= FAILURES:
                    raise
                say(error.message)
            else:
                failures = 0
                clean = 0 if self.left else clean + 1
                dirty += bool(self.left)
                rest = self._lag(at.abilities.grace_seconds) - waited
                if (clean >= CLEAN_LOOKS and rest <= 0) or (self.left and not self.touch):
                    return
                if dirty >= ROUNDS:
                    raise self._stay(said)
                due = [one for one in self.left.values() if one.state != "stopping" or dirty % AGAIN == 0]
                said = await self._delete(at, due) if due else said
                say(self._doing(rest))
            await self.pace.sleep(self.pace.pause)
            waited += self.pace.pause

    @property
    def unseen(self) -> list[Held]:
        """What the ledger has here, and no list ever showed."""
        return [one for one in self.known or () if one.stands and not self.shown(one)]

    def shown(self, one: Held) -> bool:
        return one.id in self.seen or any(one.token == machine.token for machine in self.seen.values())

    def since(self, token: str) -> float:
        """For how many seconds a machine is known to be gone."""
        return time.monotonic() - self._ended[token] if token in self._ended else 0.0

    def _see(self, listed: Iterable[Rented]) -> None:
        before = self.left
        self.left = {machine.id: machine for machine in listed}
        self.seen |= self.left
        for id, machine in before.items():
            if id not in self.left:
                self._ended[machine.token] = time.monotonic()

    def _lag(self, grace: float) -> float:
        """Seconds from the beginning until an empty list can be believed."""
        if self.known is None:
            return grace
        shown = {machine.token for machine in self.seen.values()}
        return max((grace - one.age for one in self.known if one.token not in shown), default=0.0)

    def _doing(self, rest: float) -> str:
        if self.left:
            return f"{len(self.left)} to go"
        return f"lists none; one may turn up for {rest:.0f} s yet" if rest > 0 else "lists none"

    def _stay(self, said: str) -> ProviderError:
        text = f"{len(self.left)} machines are still there after {ROUNDS} looks" + (f": {said}" if said else "")
        return ProviderError(text, hint="delete them in the provider's console")

    async def _delete(self, at: Renter, due: list[Rented]) -> str:
        """Delete them; what went wrong with one of them, if anything did."""
        try:
            outcomes = await at.delete(due)
        except ProviderError as error:
            return error.message
        refused = next((outcome for outcome in outcomes if not outcome.ok), None)
        if refused is not None and refused.trouble is Trouble.AUTH:
            raise ProviderError(refused.message, hint="see that the key is right and may delete")
        return refused.message if refused else ""
