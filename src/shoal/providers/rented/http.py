"""What all renters' HTTP calls have in common: one client, a pace, and failures that say what to do next.

    body = await api.ask("GET", "/instances")                        # raises ApiError, a ProviderError
    for one in body.rows("data"): one.text("id"), one.text("name", "")  # a missing field is named: data[3].id

    try:
        body = await api.ask("POST", "/launch", json=order, creates=True)
    except ApiError as error:
        return error.outcome()                                       # CAPACITY, RATE, AMBIGUOUS ...

A call with `creates=True` whose answer got lost, is an error of theirs or cannot be read is AMBIGUOUS. One that never
reached the provider is TRANSIENT: nothing was made. Nothing is ever asked twice here.
"""

from __future__ import annotations

import asyncio
import fcntl
import json as json_module
import os
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, overload
from urllib.parse import urlsplit

import httpx

from shoal.errors import ProviderError
from shoal.providers.rental import Account, Outcome, Scope, Trouble

TIMEOUT = 30.0
CREATE_TIMEOUT = 90.0
"""A create that is given up on is a machine to look for: better to wait."""
CONNECT_TIMEOUT = 10.0
EXCERPT = 200
"""So much of a body that nobody can make sense of is quoted."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


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
        data: Any = None,
    ) -> None:
        super().__init__(message, hint=hint)
        self.trouble, self.scope, self.retry_after = trouble, scope, retry_after
        self.status = status
        """Of HTTP; 0 where there was no answer."""
        self.data = data
        """The answer, as far as it was JSON."""

    def outcome(self, id: str = "") -> Outcome:
        return Outcome(id, self.trouble, self.scope, self.retry_after, self.message)


@dataclass(frozen=True)
class Refusal:
    """What an answer with an error status means."""

    trouble: Trouble
    scope: Scope = "offer"
    message: str = ""
    """The provider's own words."""
    hint: str = ""


Understand = Callable[[int, Any], Refusal | None]
"""A provider's own reading of a status and a body; None leaves it to the status alone."""


class Api:
    """One provider's API for one account. Made once for a process."""

    def __init__(
        self,
        account: Account,
        base: str,
        *,
        understand: Understand = lambda status, data: None,
        bearer: Callable[[], Awaitable[str]] | None = None,
        interval: float = 0.0,
        retry_after: float = 10.0,
    ) -> None:
        """`interval` seconds lie between any two calls; `retry_after` is for a 429 that does not say."""
        self.account = account
        self.base = _address(account.url, base)
        self._understand = understand
        self._bearer = bearer
        self._retry_after = retry_after
        self.pace = Pace.of(account, "request", interval)
        self._client = httpx.AsyncClient(
            headers={"User-Agent": "shoal", "Accept": "application/json"}, verify=_certificates()
        )

    async def ask(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str | int] | None = None,
        creates: bool = False,
    ) -> Body:
        """The answer's JSON. Raises ApiError. `creates` says that a lost answer may have made something."""
        where = f"{self.account.name}: {method} {path}"
        unknown = Trouble.AMBIGUOUS if creates else Trouble.TRANSIENT
        seconds = float(self.account.settings.get("timeout", CREATE_TIMEOUT if creates else TIMEOUT))
        await self.pace.wait()
        key = await self._bearer() if self._bearer else self.account.secret
        if not (key.isascii() and key.isprintable()):
            raise ApiError(f"{where}: the key has characters that no key has", Trouble.AUTH, scope="provider")
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        try:
            response = await self._client.request(
                method,
                self.base + path,
                json=json,
                params=dict(params) if params else None,
                headers=headers,
                timeout=httpx.Timeout(seconds, connect=min(seconds, CONNECT_TIMEOUT)),
            )
        except _NEVER_SENT as error:
            raise self._failed(f"{where}: cannot be reached: {_told(error)}", Trouble.TRANSIENT, "provider") from None
        except httpx.HTTPError as error:
            raise self._failed(f"{where}: no answer came: {_told(error)}", unknown) from None
        data, problem = _parsed(response)
        if response.is_success:
            if problem:
                raise self._failed(f"{where}: {problem}", unknown, status=response.status_code)
            return Body(data, where, unknown)
        raise self._refused(where, response, data, unknown)

    async def close(self) -> None:
        await self._client.aclose()

    def _refused(self, where: str, response: httpx.Response, data: Any, unknown: Trouble) -> ApiError:
        status = response.status_code
        found = self._understand(status, data) or _by_status(status, unknown)
        words = found.message or _excerpt(self._hidden(response.text)) or response.reason_phrase
        after = _seconds(response.headers.get("retry-after"), self._retry_after) if status == 429 else 0.0
        error = self._failed(f"{where}: {status}: {words}", found.trouble, found.scope, status, data)
        error.hint, error.retry_after = found.hint, after
        return error

    def _failed(
        self, message: str, trouble: Trouble, scope: Scope = "offer", status: int = 0, data: Any = None
    ) -> ApiError:
        return ApiError(self._hidden(message), trouble, scope=scope, status=status, data=data)

    def _hidden(self, text: str) -> str:
        """An API may quote what it was sent."""
        return text.replace(self.account.secret, "***") if self.account.secret else text


def _address(given: str, usual: str) -> str:
    """Where the API is. An address without a path has the API at its usual path."""
    parts = urlsplit(given or usual)
    path = parts.path.rstrip("/") or urlsplit(usual).path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


@cache
def _certificates() -> ssl.SSLContext:
    """Whom to believe; reading it takes a tenth of a second, so it is read once."""
    return httpx.create_ssl_context()


def _by_status(status: int, unknown: Trouble) -> Refusal:
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


def _told(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parsed(response: httpx.Response) -> tuple[Any, str]:
    """The body, and what is wrong with it. An empty body is right where the status says that there is none."""
    if not response.content:
        return None, "" if response.status_code == 204 else f"an answer without a body ({response.status_code})"
    try:
        return json_module.loads(response.content), ""
    except ValueError:
        if response.text.lstrip()[:1] in ("{", "["):  # what was cut off may be anything, passwords included
            return None, f"the answer is broken JSON, {len(response.content)} bytes long"
        return None, f"the answer is no JSON: {_excerpt(response.text)!r}"


def _excerpt(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= EXCERPT else words[:EXCERPT] + "…"


def _seconds(text: str | None, otherwise: float) -> float:
    try:
        return max(0.0, float(text or ""))
    except ValueError:
        return otherwise


_REQUIRED: Any = object()


@dataclass(frozen=True)
class Body:
    """A piece of an answer that knows where it stood. Fields that nobody asks for are not looked at."""

    value: Any
    where: str = ""
    trouble: Trouble = Trouble.TRANSIENT
    """What it means if a field is missing: AMBIGUOUS in the answer to a create."""
    path: str = ""

    def wrong(self, problem: str) -> ApiError:
        return ApiError(f"{self.where}: {problem}", self.trouble, hint="the provider's API may have changed")

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return isinstance(self.value, dict) and self.value.get(name) is not None

    @overload
    def text(self, name: str) -> str: ...
    @overload
    def text(self, name: str, otherwise: str) -> str: ...
    def text(self, name: str, otherwise: Any = _REQUIRED) -> str:
        return str(self._field(name, (str,), "text", otherwise))

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


@dataclass
class Pace:
    """Keeps calls apart: of one process, or of all on this machine that name the same file.

    Each call takes the next free moment and waits for it, so that nobody holds a lock while waiting.
    """

    interval: float
    file: Path | None = None
    _next: float = field(default=0.0, repr=False)

    @classmethod
    def of(cls, account: Account, what: str, interval: float) -> Pace:
        """The pace of one kind of call. The account's settings may say `pace_dir`, and `request_interval` etc."""
        chosen = float(account.settings.get(f"{what}_interval", interval))
        directory = account.settings.get("pace_dir")
        return cls(chosen, Path(directory, f"{account.name}.{what}") if directory else None)

    async def wait(self) -> None:
        if self.interval > 0:
            now = time.monotonic()  # Linux has one such clock for all processes
            moment = self._take(now) if self.file is None else await asyncio.to_thread(self._take_shared, now)
            await asyncio.sleep(max(0.0, moment - now))

    def _take(self, now: float) -> float:
        moment = max(now, self._next)
        self._next = moment + self.interval
        return moment

    def _take_shared(self, now: float) -> float:
        assert self.file is not None
        self.file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(self.file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with os.fdopen(handle, "r+") as stamp:
            fcntl.flock(handle, fcntl.LOCK_EX)
            self._next = _seconds(stamp.read(), 0.0)
            if self._next > now + 1000 * self.interval:
                self._next = 0.0  # written before the machine was last started
            moment = self._take(now)
            stamp.seek(0)
            stamp.truncate()
            stamp.write(f"{self._next:.3f}")
        return moment
