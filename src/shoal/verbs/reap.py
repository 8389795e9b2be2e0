"""`shoal reap`: give back every machine that carries a cluster's mark, from wherever the keys are.

It needs neither the controller nor its ledger, so it is what is left when they are gone: providers are asked what they
have, machines are deleted, and that again until no list shows one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from shoal.errors import ProviderError, ShoalError
from shoal.providers.rental import Account, Rented, Renter, Trouble
from shoal.providers.rented import renter
from shoal.verbs.accounts import Open, ask_all, open_accounts
from shoal.verbs.context import Context

PAUSE = 5.0
"""Seconds between two looks."""
CLEAN_LOOKS = 2
"""A provider is clean when so many lists in a row show nothing: lists lag."""
ROUNDS = 60
"""So often it is looked at most."""
AGAIN = 6
"""What is said to be going and stays is deleted again after so many looks."""
FAILURES = 3
"""So often in a row a provider may fail to answer."""
PATIENCE = 900.0


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


async def look(context: Context, opened: Open = renter) -> Look:
    """What there is, without touching it."""

    async def question(account: Account, one: Renter) -> list[Rented]:
        return await one.rented(context.cluster)

    answers, failures = await ask_all(open_accounts(context.spec), question, opened)
    found = tuple(Holding(name, machine) for name, machines in answers.items() for machine in machines)
    return Look(context.cluster, found, failures)


async def reap(
    context: Context, opened: Open = renter, sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
) -> ReapResult:
    """Delete all of it, and go on until every provider's list is clean."""
    accounts = open_accounts(context.spec)
    sweeps = {account.name: _Sweep() for account in accounts.usable}
    with context.progress.phase("providers cleared", len(accounts.usable)) as phase:

        async def question(account: Account, one: Renter) -> None:
            await sweeps[account.name].clear(one, context.cluster, sleep)
            phase.done(account.name)

        _, failures = await ask_all(accounts, question, opened, PATIENCE)
    found = [(name, sweep, machine) for name, sweep in sweeps.items() for machine in sweep.seen.values()]
    return ReapResult(
        context.cluster,
        gone=tuple(Holding(name, machine) for name, sweep, machine in found if machine.id not in sweep.left),
        remaining=tuple(Holding(name, machine) for name, sweep, machine in found if machine.id in sweep.left),
        failures=failures,
    )


@dataclass
class _Sweep:
    """One provider's machines while they go. What it last listed counts when it cannot be asked any more."""

    seen: dict[str, Rented] = field(default_factory=dict)
    left: dict[str, Rented] = field(default_factory=dict)

    async def clear(self, at: Renter, cluster: str, sleep: Callable[[float], Awaitable[None]]) -> None:
        clean = failures = 0
        said = ""
        for number in range(ROUNDS):
            if number:
                await sleep(PAUSE)
            try:
                self.left = {machine.id: machine for machine in await at.rented(cluster)}
            except ProviderError:
                failures += 1
                if failures >= FAILURES:
                    raise
                continue
            failures = 0
            self.seen |= self.left
            clean = 0 if self.left else clean + 1
            if clean >= CLEAN_LOOKS:
                return
            due = [one for one in self.left.values() if one.state != "stopping" or number % AGAIN == AGAIN - 1]
            said = await self._delete(at, due) if due else said
        raise ProviderError(
            f"{len(self.left)} machines are still there after {ROUNDS} looks" + (f": {said}" if said else ""),
            hint="delete them in the provider's console",
        )

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
