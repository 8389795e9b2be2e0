"""Answers of a provider's API, read by the names of their fields, and the error that says what one lacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from typing import Any, overload

from shoal.errors import ProviderError
from shoal.providers.rental import Outcome, Scope, Trouble


class ApiError(ProviderError):
    """A call that did not bring what it should; `outcome` is what it means for an order."""

    def __init__(
        self,
        message: str,
        trouble: Trouble,
        *,
        hint: str = "",
        scope: Scope = "offer",
        retry_after: float = 0.0,
        status: int = 0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.trouble, self.scope, self.retry_after = trouble, scope, retry_after
        self.status = status
        """Of HTTP; 0 where there was no answer."""

    def outcome(self, id: str = "") -> Outcome:
        return Outcome(id, self.trouble, self.scope, self.retry_after, self.message)


@contextmanager
def order_taken() -> Iterator[None]:
    """The course of an order that was taken: whatever goes wrong in it leaves open whether there is a machine."""
    try:
        yield
    except ApiError as error:
        raise ApiError(error.message, Trouble.AMBIGUOUS, retry_after=error.retry_after) from error


def without_none(fields: Any) -> Any:
    """What an order says: the same without fields that are None, at any depth."""
    if isinstance(fields, list):
        return [without_none(one) for one in fields]
    if isinstance(fields, dict):
        return {name: without_none(value) for name, value in fields.items() if value is not None}
    return fields


_REQUIRED: Any = object()


@dataclass(frozen=True)
class Body:
    """A piece of an answer that knows where it stood. Fields that nobody asks for are not looked at."""

    value: Any
    where: str = ""
    trouble: Trouble = Trouble.TRANSIENT
    """What it means if a field is missing: AMBIGUOUS in the answer to a create."""
    path: str = ""

    def wrong(self, problem: str, hint: str = "the provider's API may have changed") -> ApiError:
        return ApiError(f"{self.where}: {problem}", self.trouble, hint=hint)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, otherwise: str) -> str: ...
    def text(self, name: str, otherwise: Any = _REQUIRED) -> str:
        return str(self._field(name, (str,), "text", otherwise))

    def last_part(self, name: str) -> str:
        """Of a field that is an address: `us-east1-b` of `https://…/zones/us-east1-b`."""
        return self.text(name).rpartition("/")[2]

    def number(self, name: str, otherwise: float = _REQUIRED) -> float:
        return float(self._field(name, (int, float), "a number", otherwise))

    def maybe_number(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def time(self, name: str) -> float | None:
        """A date and time in seconds since 1970; None where there is none, or none that can be read."""
        try:
            return datetime.fromisoformat(self.text(name, "")).timestamp()
        except ValueError:
            return None

    def flag(self, name: str, otherwise: bool = _REQUIRED) -> bool:
        return bool(self._field(name, (bool,), "true or false", otherwise))

    def piece(self, name: str) -> Body:
        """An object inside the object."""
        return self._at(name, self._field(name, (dict,), "an object", _REQUIRED))

    def piece_or_empty(self, name: str) -> Body:
        return self.piece(name) if self.has(name) else self._at(name, {})

    def rows(self, name: str = "") -> list[Body]:
        """The items of a list: of a field, or of the answer itself."""
        found = self._field(name, (list,), "a list", _REQUIRED) if name else self.value
        if not isinstance(found, list):
            raise self.wrong(f"{self.path or 'the answer'} is not a list")
        path = self._named(name) if name else self.path
        return [Body(one, self.where, self.trouble, f"{path}[{count}]") for count, one in enumerate(found)]

    def rows_or_none(self, name: str) -> list[Body]:
        return self.rows(name) if self.has(name) else []

    def first(self, name: str) -> Body:
        """The first item of a list; an empty object where there is none."""
        return next(iter(self.rows_or_none(name)), self._at(name, {}))

    def items(self) -> list[tuple[str, Body]]:
        """The fields of an object whose names are data."""
        if not isinstance(self.value, dict):
            raise self.wrong(f"{self.path or 'the answer'} is not an object")
        return [(name, self._at(name, value)) for name, value in self.value.items()]

    def _field(self, name: str, kinds: tuple[type, ...], told: str, otherwise: Any) -> Any:
        if not isinstance(self.value, dict):
            raise self.wrong(f"{self.path or 'the answer'} is not an object")
        found = self.value.get(name)
        if found is None:
            if otherwise is _REQUIRED:
                raise self.wrong(f"the answer lacks {self._named(name)}")
            return otherwise
        if not isinstance(found, kinds) or (isinstance(found, bool) and bool not in kinds):
            raise self.wrong(f"{self._named(name)} is not {told}")
        return found

    def _at(self, name: str, value: Any) -> Body:
        return Body(value, self.where, self.trouble, self._named(name))

    def _named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name
