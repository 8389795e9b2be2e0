"""What all renters' HTTP calls have in common: one client, a pace, and failures that say what to do next.

    body = await api.ask("GET", "/instances")                        # raises ApiError, a ProviderError
    for one in body.rows("data"): one.text("id"), one.text("name", "")  # a missing field is named: data[3].id

    try:
        body = await api.ask("POST", "/launch", json=order, creates=True)
    except ApiError as error:
        return error.outcome()                                       # CAPACITY, RATE, AMBIGUOUS ...

    async for page in api.pages("/instances", "after", lambda page: page.text("next", "")): ...
    return await each(lambda id: api.remove(f"/instances/{id}", id), ids)   # one that is gone already is well

A call with `creates=True` whose answer got lost, is an error of theirs or cannot be read is AMBIGUOUS. One that never
reached the provider is TRANSIENT: nothing was made. Nothing is ever asked twice here.
"""

from __future__ import annotations

import asyncio
import json as json_module
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

import httpx

from shoal.providers.rental import Account, Outcome, Scope, Trouble
from shoal.providers.rented.body import ApiError, Body, order_taken
from shoal.providers.rented.refusals import Understand, by_status, understood

__all__ = ["Api", "ApiError", "ApiRenter", "each", "until_next_minute"]

T = TypeVar("T")
R = TypeVar("R")

TIMEOUT = 30.0
CREATE_TIMEOUT = 90.0
"""A create that is given up on is a machine to look for: better to wait."""
CONNECT_TIMEOUT = 10.0
FIRST_LOOK, LONGEST_LOOK = 0.1, 2.0
"""Seconds until an order that was taken is looked at, which double each time."""
AT_ONCE = 8
"""So many calls of `each` are under way at a time."""
EXCERPT = 200
"""So much of a body that nobody can make sense of is quoted."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


class Api:
    """One provider's API for one account. Made once for a process."""

    def __init__(
        self,
        account: Account,
        base: str,
        *,
        understand: Understand = lambda status, answer: None,
        bearer: Callable[[], Awaitable[str]] | None = None,
        interval: float = 0.0,
        retry_after: Callable[[], float] = lambda: 10.0,
    ) -> None:
        """`interval` seconds lie between any two calls; `retry_after` is for a refusal of haste that does not say."""
        self.account = account
        self.base = _address(account.url, base)
        self._understand = understand
        self._bearer = bearer
        self._retry_after = retry_after
        self._pace = Pace(float(account.settings.get("request_interval", interval)))
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
        await self._pace.wait()
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

    async def pages(
        self, path: str, cursor: str, following: Callable[[Body], str], **params: str | int
    ) -> AsyncIterator[Body]:
        """Every page of a list. `following` reads from a page what the next is asked for with, by the name `cursor`."""
        seen: set[str] = set()
        while True:
            page = await self.ask("GET", path, params=params)
            yield page
            coming = following(page)
            if not coming:
                return
            if coming in seen:
                raise page.wrong("the list comes back to the same page again and again")
            seen.add(coming)
            params[cursor] = coming

    async def followed(self, answer: Body, path: str, done: Callable[[Body], bool], seconds: float) -> Body:
        """What an order that was taken has come to: asked for until it is done, or so many seconds are over."""
        pause, ends = FIRST_LOOK, time.monotonic() + seconds
        with order_taken():
            while not done(answer) and time.monotonic() < ends:
                await asyncio.sleep(pause)
                pause = min(LONGEST_LOOK, 2 * pause)
                answer = await self.ask("GET", path)
        return answer

    async def remove(self, path: str, id: str = "") -> Outcome:
        """Delete something. It is well if it is gone already."""
        try:
            await self.ask("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                return error.outcome(id)
        return Outcome(id)

    async def close(self) -> None:
        await self._client.aclose()

    def _refused(self, where: str, response: httpx.Response, data: Any, unknown: Trouble) -> ApiError:
        status = response.status_code
        told = understood(self._understand, status, data)
        found = told if told.trouble else by_status(status, unknown)
        trouble = found.trouble or unknown
        words = told.message or _excerpt(self._hidden(response.text)) or response.reason_phrase
        error = self._failed(f"{where}: {status}: {words}", trouble, found.scope, status)
        error.hint = found.hint
        if trouble is Trouble.RATE:
            error.retry_after = _seconds(response.headers.get("retry-after")) or self._retry_after()
        return error

    def _failed(self, message: str, trouble: Trouble, scope: Scope = "offer", status: int = 0) -> ApiError:
        return ApiError(self._hidden(message), trouble, scope=scope, status=status)

    def _hidden(self, text: str) -> str:
        """An API may quote what it was sent."""
        return text.replace(self.account.secret, "***") if self.account.secret else text


class ApiRenter:
    """What a renter over HTTP has anyway. One whose provider must know keys beforehand has its own `ensure_key`."""

    def __init__(self, account: Account, api: Api) -> None:
        self._account, self._api = account, api

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        return ""  # it travels with each order

    async def close(self) -> None:
        await self._api.close()


async def each(work: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """What the work brings for each item, in their order; a few are done at a time. Raises what the first raised."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(item: T) -> R:
        async with room:
            return await work(item)

    done = await asyncio.gather(*(one(item) for item in items), return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]


def until_next_minute() -> float:
    """How long to wait where calls are counted by the minute."""
    return 60 - time.time() % 60


def _address(given: str, usual: str) -> str:
    """Where the API is. An address without a path has the API at its usual path."""
    parts = urlsplit(given or usual)
    path = parts.path.rstrip("/") or urlsplit(usual).path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


@cache
def _certificates() -> ssl.SSLContext:
    """Whom to believe; reading it takes a tenth of a second, so it is read once."""
    return httpx.create_ssl_context()


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
        return None, f"the answer is not JSON: {_excerpt(response.text)!r}"


def _excerpt(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= EXCERPT else words[:EXCERPT] + "…"


def _seconds(text: str | None) -> float:
    try:
        return max(0.0, float(text or ""))
    except ValueError:
        return 0.0


@dataclass
class Pace:
    """Keeps calls apart: each takes the next free moment and waits for it."""

    interval: float
    _next: float = field(default=0.0, repr=False)

    async def wait(self) -> None:
        now = time.monotonic()
        moment = max(now, self._next)
        self._next = moment + self.interval
        await asyncio.sleep(moment - now)
