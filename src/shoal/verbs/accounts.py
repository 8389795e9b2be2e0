"""The accounts that a spec names at providers, with their keys looked up, and a question put to all of them at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from shoal.errors import ProviderError, ShoalError, UsageError
from shoal.providers.rental import Account, Renter
from shoal.providers.rented import renter
from shoal.spec.model import Spec
from shoal.spec.rented import account_settings
from shoal.spec.rented import accounts as accounts_of
from shoal.spec.secret import resolve_secret

PATIENCE = 90.0
"""Seconds for a provider to answer one question, however many pages it takes."""

T = TypeVar("T")
Open = Callable[[Account], Renter]
"""Makes a renter of an account."""


@dataclass(frozen=True)
class Accounts:
    """The accounts of a cluster that can be used, and why others cannot."""

    usable: tuple[Account, ...]
    failures: Mapping[str, ShoalError] = field(default_factory=dict)
    """By the account's name: a key that is not where the spec says."""


def open_accounts(spec: Spec, chosen: Iterable[str] = ()) -> Accounts:
    """The accounts of a spec, or those that are chosen, by name or by kind. One without a key hides no other."""
    named = accounts_of(spec)
    if not named:
        raise UsageError(
            f"cluster {spec.cluster} has no account at a provider",
            hint="write one into the file, as in `providers: {lambda: {key: env:LAMBDA_API_KEY}}`",
        )
    wanted = tuple(chosen)
    for one in wanted:
        if one not in named and one not in {account.kind for account in named.values()}:
            raise UsageError(f"cluster {spec.cluster} has no account {one}", hint=f"use one of {', '.join(named)}")
    usable: list[Account] = []
    failures: dict[str, ShoalError] = {}
    for name, account in named.items():
        kind = account.kind or name
        if wanted and name not in wanted and kind not in wanted:
            continue
        try:
            secret = resolve_secret(account.key, f"providers.{name}.key").decode() if account.key else ""
        except (ShoalError, UnicodeDecodeError) as error:
            unreadable = UsageError(f"providers.{name}.key is not text", hint="write the key into it")
            failures[name] = error if isinstance(error, ShoalError) else unreadable
            continue
        usable.append(Account(name, kind, secret, account.url or "", account_settings(account)))
    return Accounts(tuple(usable), failures)


async def ask_all(
    accounts: Accounts,
    question: Callable[[Account, Renter], Awaitable[T]],
    opened: Open = renter,
    patience: float = PATIENCE,
) -> tuple[dict[str, T], dict[str, ShoalError]]:
    """Every account's answer, side by side, and why others gave none. A provider that is down holds up nobody."""

    async def ask(account: Account) -> T | ShoalError:
        try:
            one = opened(account)
            try:
                return await asyncio.wait_for(question(account, one), patience)
            finally:
                await one.close()
        except TimeoutError:
            return ProviderError(f"{account.name} does not answer within {patience:.0f} s", hint="try again later")
        except ShoalError as error:
            return error
        except Exception as error:  # a bug in somebody's client is that account's alone
            return ProviderError(f"{account.name}: its client failed: {type(error).__name__}", hint="report this bug")

    said = await asyncio.gather(*(ask(account) for account in accounts.usable))
    answers: dict[str, T] = {}
    failures = dict(accounts.failures)
    for account, answer in zip(accounts.usable, said, strict=True):
        if isinstance(answer, ShoalError):
            failures[account.name] = answer
        else:
            answers[account.name] = answer
    return answers, failures
