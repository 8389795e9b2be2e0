"""What an answer with an error status means: by the provider's own codes or words, and else by the status."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shoal.providers.rental import Outcome, Scope, Trouble
from shoal.providers.rented.body import ApiError, Body


@dataclass(frozen=True)
class Refusal:
    """Why the provider does not do what it was asked for."""

    trouble: Trouble | None = None
    """None leaves it to the status."""
    scope: Scope = "offer"
    message: str = ""
    """The provider's own words."""
    hint: str = ""

    def outcome(self) -> Outcome:
        return Outcome(trouble=self.trouble, scope=self.scope, message=self.message)


Understand = Callable[[int, Body], Refusal | None]
"""A provider's own reading of a status and a body: None where they say nothing that it knows. It may raise ApiError."""

Said = tuple[str, str]
"""A code of the provider's, and its words."""


def by_code(table: Mapping[str, Refusal], said: Sequence[Said]) -> Refusal | None:
    """The meaning of codes by a provider's table, each line of which names one or several.

    Of all that was said, that counts which stands first in the table.
    """
    for codes, meaning in table.items():
        for code, words in said:
            if code in codes.split():
                return replace(meaning, message=f"{code}: {words}")
    return None


def by_words(table: Mapping[str, Refusal], message: str) -> Refusal | None:
    """The meaning of a message without a code: of the regular expressions in the table, the first that is found."""
    for pattern, meaning in table.items():
        if re.search(pattern, message, re.IGNORECASE):
            return replace(meaning, message=message)
    return None


def understood(understand: Understand, status: int, data: Any) -> Refusal:
    """The provider's reading of an answer; no meaning where it has none, or the body is not one of theirs."""
    try:
        return understand(status, Body(data)) or Refusal()
    except ApiError:
        return Refusal()


def by_status(status: int, unknown: Trouble) -> Refusal:
    """What a status says where the body says nothing that we know."""
    if status in (401, 403):
        return Refusal(Trouble.AUTH, "provider", hint="see that the key is right and may do this")
    if status == 402:
        return Refusal(Trouble.BALANCE, "provider")
    if status == 409:
        return Refusal(Trouble.CONFLICT)
    if status == 429:
        return Refusal(Trouble.RATE, "provider")
    if status == 408 or status >= 500:
        return Refusal(unknown)
    return Refusal(Trouble.INVALID)
