"""`shoal reap`: give back every machine that carries a cluster's mark, from wherever the keys are.

It needs neither the controller nor its ledger, so it is what is left when they are gone: providers are asked what they
have, machines are deleted, and that again until no list shows one. A list may lag behind an order, so an empty one is
believed only when the ledger knows of no recent order, or as much time has passed as that provider's lists may take.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.errors import ProviderError, ShoalError
from shoal.providers.rental import Account, Rented, Renter, Trouble
from shoal.providers.rented import renter
from shoal.verbs.accounts import Accounts, Open, ask_all, open_accounts
from shoal.verbs.context import Context
from shoal.verbs.held import Held, held, strike_off

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


@dataclass(frozen=True)
class ReapResult:
    cluster: str
    gone: tuple[Holding, ...] = ()
    """Machines that no list shows any more."""
    remaining: tuple[Holding, ...] = ()
    """Machines that are there still, or may be: their provider could not be asked again."""
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """Why an account could not be asked, or would not delete."""

    @property
    def clean(self) -> bool:
        return not self.remaining and not self.failures


async def look(context: Context, opened: Open = renter, pace: Pace | None = None) -> Look:
    """What there is, without touching it. That there is nothing is said when the lists can be believed."""

    async def question(account: Account, one: Renter) -> list[Rented]:
        return await one.rented(context.cluster)

    answers, failures = await ask_all(open_accounts(context.spec), question, opened)
    found = _holdings((name, machines) for name, machines in answers.items())
    if found:
        return Look(context.cluster, found, failures)
    sweeps, failures = await _swept(context, opened, pace, touch=False)
    return Look(context.cluster, _holdings((name, sweep.left.values()) for name, sweep in sweeps.items()), failures)


async def reap(context: Context, opened: Open = renter, pace: Pace | None = None) -> ReapResult:
    """Delete all of it, and go on until every provider's list is clean."""
    sweeps, failures = await _swept(context, opened, pace, touch=True)
    gone = {name: [one for one in sweep.seen.values() if one.id not in sweep.left] for name, sweep in sweeps.items()}
    remaining = _holdings((name, sweep.left.values()) for name, sweep in sweeps.items())
    return ReapResult(context.cluster, _holdings(gone.items()), remaining, failures)


async def _swept(
    context: Context, opened: Open, pace: Pace | None, *, touch: bool
) -> tuple[dict[str, _Sweep], dict[str, ShoalError]]:
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
    failures = await _sweep_all(context, accounts, sweeps, opened, title)
    clean = [sweep for name, sweep in sweeps.items() if name not in failures and not sweep.left]
    await strike_off(context, {one: sweep.since(one.token) for sweep in clean for one in sweep.known or ()})
    return sweeps, failures


async def _sweep_all(
    context: Context, accounts: Accounts, sweeps: Mapping[str, _Sweep], opened: Open, title: str
) -> dict[str, ShoalError]:
    with context.progress.phase(title, len(sweeps)) as phase:

        async def question(account: Account, one: Renter) -> None:
            await sweeps[account.name].run(one, lambda text: phase.say(account.name, text))
            phase.done(account.name)

        _, failures = await ask_all(accounts, question, opened, PATIENCE)
    return failures


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
                self._see(await at.rented(self.cluster))
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
