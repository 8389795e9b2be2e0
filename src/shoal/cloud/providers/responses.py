"""JSON answers of a provider's API, read by field name, and what its error answers mean.

An error is classified by the provider's own codes or messages, else by the HTTP status.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from shoal.cloud.providers.api import FailureKind, RequestOutcome, Scope
from shoal.errors import ProviderError


class ApiError(ProviderError):
    """An API call that failed; `outcome` is the result of the order that it belongs to."""

    def __init__(
        self,
        message: str,
        failure: FailureKind,
        *,
        hint: str = "",
        scope: Scope = "offer",
        retry_after: float = 0.0,
        status: int = 0,
    ) -> None:
        super().__init__(message, hint=hint)
        self.failure, self.scope, self.retry_after = failure, scope, retry_after
        self.status = status
        """The HTTP status; 0 without an answer."""

    def outcome(self, id: str = "") -> RequestOutcome:
        return RequestOutcome(id, self.failure, self.scope, self.retry_after, self.message)


@contextmanager
def ambiguous_on_error() -> Iterator[None]:
    """Turn errors into AMBIGUOUS: after an order was accepted, an error leaves open whether there is a machine."""
    try:
        yield
    except ApiError as error:
        raise ApiError(error.message, FailureKind.AMBIGUOUS, retry_after=error.retry_after) from error


def known_price(number: float | None) -> float | None:
    """The same price, or None where it is 0: no provider rents for nothing, and a budget must not count it as free."""
    return number if number is not None and number > 0 else None


def parse_epoch(text: str) -> float | None:
    """Seconds since 1970 that we once wrote into a mark of a machine; None where it is none."""
    return float(text) if re.fullmatch("[0-9]{1,12}", text) else None


def drop_none(fields: Any) -> Any:
    """The same data without fields that are None, at any depth."""
    if isinstance(fields, list):
        return [drop_none(one) for one in fields]
    if isinstance(fields, dict):
        return {name: drop_none(value) for name, value in fields.items() if value is not None}
    return fields


_REQUIRED: Any = object()


@dataclass(frozen=True)
class Body:
    """A part of an answer that knows its path. Fields that are not read are not checked."""

    value: Any
    where: str = ""
    failure: FailureKind = FailureKind.TRANSIENT
    """The failure if a field is missing: AMBIGUOUS in the answer to a create."""
    path: str = ""
    length: int = 0
    """Bytes of the whole answer; 0 for a part of it."""

    def error(self, problem: str, hint: str = "the provider's API may have changed") -> ApiError:
        return ApiError(f"{self.where}: {problem}", self.failure, hint=hint)

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    def text(self, name: str, otherwise: str = _REQUIRED) -> str:
        return str(self._field(name, (str,), "text", otherwise))

    def last_part(self, name: str) -> str:
        """The last part of a URL: `us-east1-b` of `https://…/zones/us-east1-b`."""
        return self.text(name).rpartition("/")[2]

    def number(self, name: str, otherwise: float = _REQUIRED) -> float:
        try:
            return float(self._field(name, (int, float), "a number", otherwise))
        except OverflowError:
            raise self.error(f"{self._named(name)} is too large") from None

    def number_or_none(self, name: str) -> float | None:
        return self.number(name) if self.has(name) else None

    def price(self, name: str) -> float | None:
        """A price in the provider's unit; None for 0, which is no price but an unknown one."""
        return known_price(self.number(name))

    def price_or_none(self, name: str) -> float | None:
        return known_price(self.number_or_none(name))

    def port(self, name: str, otherwise: int = _REQUIRED) -> int:
        number = self.number(name, otherwise)
        if number not in range(1, 65536):
            raise self.error(f"{self._named(name)} is not a port")
        return int(number)

    def time(self, name: str) -> float | None:
        """A date and time in seconds since 1970; None where it is missing or unreadable."""
        try:
            return datetime.fromisoformat(self.text(name, "")).timestamp()
        except (ValueError, OverflowError):
            return None

    def flag(self, name: str, otherwise: bool = _REQUIRED) -> bool:
        return bool(self._field(name, (bool,), "true or false", otherwise))

    def object(self, name: str) -> Body:
        """An object inside the object."""
        return self._at(name, self._field(name, (dict,), "an object", _REQUIRED))

    def object_or_empty(self, name: str) -> Body:
        return self.object(name) if self.has(name) else self._at(name, {})

    def rows(self, name: str = "") -> list[Body]:
        """The items of a list: of a field, or of the answer itself."""
        values = self._field(name, (list,), "a list", _REQUIRED) if name else self.value
        if not isinstance(values, list):
            raise self.error(f"{self.path or 'the answer'} is not a list")
        path = self._named(name) if name else self.path
        return [Body(value, self.where, self.failure, f"{path}[{count}]") for count, value in enumerate(values)]

    def rows_or_empty(self, name: str) -> list[Body]:
        return self.rows(name) if self.has(name) else []

    def first(self, name: str) -> Body:
        """The first item of a list; an empty object where there is none."""
        return next(iter(self.rows_or_empty(name)), self._at(name, {}))

    def items(self) -> list[tuple[str, Body]]:
        """The fields of an object whose names are data."""
        return [(name, self._at(name, value)) for name, value in self._fields().items()]

    def _field(self, name: str, kinds: tuple[type, ...], type_name: str, otherwise: Any) -> Any:
        value = self._fields().get(name)
        if value is None:
            if otherwise is _REQUIRED:
                raise self.error(f"the answer lacks {self._named(name)}")
            return otherwise
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise self.error(f"{self._named(name)} is not {type_name}")
        return value

    def _fields(self) -> dict[str, Any]:
        if not isinstance(self.value, dict):
            raise self.error(f"{self.path or 'the answer'} is not an object")
        return self.value

    def _at(self, name: str, value: Any) -> Body:
        return Body(value, self.where, self.failure, self._named(name))

    def _named(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


@dataclass(frozen=True)
class Refusal:
    """What an error answer of a provider means."""

    failure: FailureKind | None = None
    """None: the HTTP status decides."""
    scope: Scope = "offer"
    message: str = ""
    """The provider's own message."""
    hint: str = ""

    def outcome(self) -> RequestOutcome:
        return RequestOutcome(failure=self.failure, scope=self.scope, message=self.message)


ReadError = Callable[[int, Body], Refusal | None]
"""Reads a provider's error from status and body; None for an unknown error. It may raise ApiError."""

CodedError = tuple[str, str]
"""A provider's error code, and its message."""


def refusal_by_code(table: Mapping[str, Refusal], errors: Sequence[CodedError]) -> Refusal | None:
    """Look error codes up in a provider's table, whose keys hold one or several codes.

    Of several errors, the one that comes first in the table counts.
    """
    for codes, refusal in table.items():
        for code, message in errors:
            if code in codes.split():
                return replace(refusal, message=f"{code}: {message}")
    return None


def refusal_by_message(table: Mapping[str, Refusal], message: str) -> Refusal | None:
    """Look a message without a code up in a table of regular expressions; the first match counts."""
    for pattern, refusal in table.items():
        if re.search(pattern, message, re.IGNORECASE):
            return replace(refusal, message=message)
    return None


def read_refusal(read_error: ReadError, status: int, data: Any) -> Refusal:
    """The provider's reading of an answer; empty where it has none, or the body is not in its format."""
    try:
        return read_error(status, Body(data)) or Refusal()
    except ApiError:
        return Refusal()


REFUSALS_BY_STATUS = {
    **dict.fromkeys(
        (401, 403), Refusal(FailureKind.AUTH, "provider", hint="check that the key is valid and may do this")
    ),
    402: Refusal(FailureKind.BALANCE, "provider"),
    409: Refusal(FailureKind.CONFLICT),
    429: Refusal(FailureKind.RATE, "provider"),
}


def refusal_by_status(status: int, unknown: FailureKind) -> Refusal:
    """What the HTTP status means, where the body is not understood."""
    return REFUSALS_BY_STATUS.get(status, Refusal(unknown if status == 408 or status >= 500 else FailureKind.INVALID))
