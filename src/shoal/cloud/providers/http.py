"""The HTTP client that all rental providers share: rate limit, bounds, and failures that say what to do next.

A call with `creates=True` whose answer is lost, a server error or unreadable fails as AMBIGUOUS. One that never reached
the provider fails as TRANSIENT: nothing was made. Nothing is retried here.
"""

from __future__ import annotations

import asyncio
import math
import ssl
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, TypeVar

import httpx

from shoal.cloud.providers import responses
from shoal.cloud.providers.api import FailureKind, ProviderLogin, RentalOrder, RequestOutcome, Scope, api_address
from shoal.cloud.providers.response_limits import ACCEPT_ENCODING, Answer, AnswerError, fetch, parse_json
from shoal.cloud.providers.responses import ApiError, Body, ReadError, ambiguous_on_error

__all__ = [
    "ApiClient",
    "ApiError",
    "HttpProvider",
    "excerpt",
    "gather_all",
    "map_concurrently",
    "seconds_to_next_minute",
]

T = TypeVar("T")
R = TypeVar("R")

REQUEST_TIMEOUT_S = 30.0
"""From the first byte sent to the last one received."""
CREATE_TIMEOUT_S = 90.0
"""A create that times out leaves a machine to look for: better to wait longer."""
CONNECT_TIMEOUT_S = 10.0
FIRST_POLL_S, MAX_POLL_S = 0.1, 2.0
"""Seconds between two polls of an accepted order; they double each time."""
MAX_CONCURRENT_CALLS = 8
"""So many calls of `map_concurrently` are under way at a time."""
EXCERPT_LENGTH = 200
"""How much of an unreadable body is quoted, in characters."""
MAX_PAGES = 200
"""The most pages that one list may have."""
MAX_LIST_MIB = 128
"""All pages of one list together."""
MAX_SENT_KEYS = 4
"""Tokens that are remembered: one is renewed while requests with the one before are under way."""
MAX_RETRY_AFTER_S = 3600.0
"""A provider that asks for a longer pause is asked again after this one."""
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout, httpx.UnsupportedProtocol, httpx.InvalidURL)


ParsedAnswer = tuple[Any, str]
"""The data of an answer, and what is wrong with it."""
ParseAnswer = Callable[[Answer], ParsedAnswer]


class ApiClient:
    """The API of one provider account. Made once per process."""

    def __init__(
        self,
        account: ProviderLogin,
        base: str,
        *,
        read_error: ReadError = lambda status, answer: None,
        bearer: Callable[[], Awaitable[str]] | None = None,
        interval: float = 0.0,
        retry_after: Callable[[], float] = lambda: 10.0,
    ) -> None:
        """`interval` is the seconds between two calls; `retry_after` applies to a 429 without a Retry-After header."""
        self.account = account
        self.base = api_address(account.url, base)
        self._read_error = read_error
        self._bearer = bearer
        self._sent_keys: deque[str] = deque(maxlen=MAX_SENT_KEYS)
        """The keys of the last requests, newest last: no message may quote one."""
        self._retry_after = retry_after
        self._interval = float(account.settings.get("request_interval", interval))
        self._next_slot = 0.0
        self._client = httpx.AsyncClient(
            headers={"User-Agent": "shoal", "Accept": "application/json", "Accept-Encoding": ACCEPT_ENCODING},
            verify=_certificates(),
        )

    async def request(
        self,
        method: str,
        path: str,
        *,
        json: Any = None,
        params: Mapping[str, str | int] | None = None,
        creates: bool = False,
    ) -> Body:
        """Send a request and return its JSON. Raises ApiError. `creates`: a lost answer may have made a machine."""
        await self._wait_for_slot()
        key = await self._bearer() if self._bearer else self.account.secret
        where = f"{self.account.name}: {method} {path}"
        if not (key.isascii() and key.isprintable()):
            raise ApiError(f"{where}: the key has invalid characters", FailureKind.AUTH, scope="provider")
        if key and key not in self._sent_keys:
            self._sent_keys.append(key)
        request = self._client.build_request(
            method,
            self.base + path,
            json=json,
            params=dict(params) if params else None,
            headers={"Authorization": f"Bearer {key}"} if key else {},
        )
        return await self._send(request, where, creates=creates)

    async def _send(
        self,
        request: httpx.Request,
        where: str,
        *,
        creates: bool,
        parse: ParseAnswer | None = None,
    ) -> Body:
        """Send a request and read its answer: as JSON, or as `parse` does."""
        unknown = FailureKind.AMBIGUOUS if creates else FailureKind.TRANSIENT
        seconds = float(self.account.settings.get("timeout", CREATE_TIMEOUT_S if creates else REQUEST_TIMEOUT_S))
        # The time of the whole request is bounded by `fetch`; only what fails before it is sent has its own.
        timeout = httpx.Timeout(None, connect=min(seconds / 2, CONNECT_TIMEOUT_S))
        request.extensions["timeout"] = timeout.as_dict()
        try:
            answer = await fetch(self._client, request, seconds)
        except _NEVER_SENT as error:
            raise self._error(
                f"{where}: cannot be reached: {_exception_text(error)}", FailureKind.TRANSIENT, "provider"
            ) from None
        except TimeoutError:
            raise self._error(f"{where}: no complete answer within {seconds:g} s", unknown) from None
        except AnswerError as error:
            raise self._error(f"{where}: {error}", unknown) from None
        except httpx.HTTPError as error:
            raise self._error(f"{where}: no answer: {_exception_text(error)}", unknown) from None
        data, problem = (parse or _parse)(answer)
        if answer.is_success:
            if problem:
                raise self._error(f"{where}: {problem}", unknown, status=answer.status)
            return Body(data, where, unknown, length=len(answer.content))
        raise self._refusal_error(where, answer, data, unknown)

    async def pages(
        self, path: str, cursor: str, following: Callable[[Body], str], **params: str | int
    ) -> AsyncIterator[Body]:
        """Every page of a list. `following` reads the value of the parameter `cursor` for the next page."""
        seen: set[str] = set()
        length = 0
        for _ in range(MAX_PAGES):
            page = await self.request("GET", path, params=params)
            length += page.length
            if length > MAX_LIST_MIB * 1024 * 1024:
                raise page.error(f"the list is longer than {MAX_LIST_MIB} MiB")
            yield page
            value = following(page)
            if not value:
                return
            if value in seen:
                raise page.error("the list repeats the same page")
            seen.add(value)
            params[cursor] = value
        raise page.error(f"the list has more than {MAX_PAGES} pages")

    async def poll(self, answer: Body, path: str, done: Callable[[Body], bool], seconds: float) -> Body:
        """Poll an accepted order until it is done or `seconds` have passed. Returns the last answer."""
        pause, ends = FIRST_POLL_S, time.monotonic() + seconds
        with ambiguous_on_error():
            while not done(answer) and time.monotonic() < ends:
                await asyncio.sleep(pause)
                pause = min(MAX_POLL_S, 2 * pause)
                answer = await self.request("GET", path)
        return answer

    async def remove(self, path: str, id: str = "") -> RequestOutcome:
        """Delete something. A 404 counts as deleted."""
        try:
            await self.request("DELETE", path)
        except ApiError as error:
            if error.status != 404:
                return error.outcome(id)
        return RequestOutcome(id)

    async def close(self) -> None:
        await self._client.aclose()

    async def _wait_for_slot(self) -> None:
        """Space calls: each takes the next free slot and waits for it."""
        now = time.monotonic()
        slot = max(now, self._next_slot)
        self._next_slot = slot + self._interval
        await asyncio.sleep(slot - now)

    def _refusal_error(self, where: str, answer: Answer, data: Any, unknown: FailureKind) -> ApiError:
        status = answer.status
        own = responses.read_refusal(self._read_error, status, data)
        refusal = own if own.failure else responses.refusal_by_status(status, unknown)
        failure = refusal.failure or unknown
        message = own.message or excerpt(self._redact(answer.text)) or answer.reason
        error = self._error(f"{where}: {status}: {message}", failure, refusal.scope, status)
        error.hint = refusal.hint
        if failure is FailureKind.RATE:
            error.retry_after = _seconds(answer.headers.get("retry-after")) or self._retry_after()
        return error

    def _error(self, message: str, failure: FailureKind, scope: Scope = "offer", status: int = 0) -> ApiError:
        return ApiError(self._redact(message), failure, scope=scope, status=status)

    def _redact(self, text: str) -> str:
        """Replace the secret, and tokens made from it: an API may quote what it was sent."""
        for secret in filter(None, (self.account.secret, *self._sent_keys)):
            text = text.replace(secret, "***")
        return text


class HttpProvider:
    """The base of a rental provider over HTTP: orders one machine at a time, and registers no keys."""

    def __init__(self, account: ProviderLogin, api: ApiClient) -> None:
        self._account, self._api = account, api

    async def create(self, orders: Sequence[RentalOrder]) -> list[RequestOutcome]:
        outcomes: list[RequestOutcome] = []
        for order in orders:
            try:
                outcomes.append(await self._create(order))
            except ApiError as error:
                outcomes.append(error.outcome())
        return outcomes

    async def _create(self, order: RentalOrder) -> RequestOutcome:
        """Order one machine. It may raise ApiError."""
        raise NotImplementedError

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        return ""  # each order carries it

    async def close(self) -> None:
        await self._api.close()


async def map_concurrently(work: Callable[[T], Awaitable[R]], items: Iterable[T]) -> list[R]:
    """Apply `work` to each item, a few at a time; results in the same sequence. Raises the first error."""
    room = asyncio.Semaphore(MAX_CONCURRENT_CALLS)

    async def one(item: T) -> R:
        async with room:
            return await work(item)

    return await gather_all(one(item) for item in items)


async def gather_all(work: Iterable[Coroutine[Any, Any, R]]) -> list[R]:
    """Await all and return their results. Raises the first error, after all have ended."""
    done = await asyncio.gather(*work, return_exceptions=True)
    for result in done:
        if isinstance(result, BaseException):
            raise result
    return [result for result in done if not isinstance(result, BaseException)]


def seconds_to_next_minute() -> float:
    """How long to wait where calls are counted per minute."""
    return 60 - time.time() % 60


@cache
def _certificates() -> ssl.SSLContext:
    """The trusted certificates. Reading them takes 0.1 s, so they are read once."""
    return httpx.create_ssl_context()


def _exception_text(error: Exception) -> str:
    return str(error) or type(error).__name__


def _parse(answer: Answer) -> ParsedAnswer:
    """The body as data, and what is wrong with it. An empty body is right only with status 204."""
    if not answer.content:
        return None, "" if answer.status == 204 else f"the answer has no body ({answer.status})"
    try:
        return parse_json(answer.content), ""
    except AnswerError as error:
        return None, str(error)
    except ValueError:
        if answer.text.lstrip()[:1] in ("{", "["):  # a truncated body may contain anything, passwords included
            return None, f"the answer is broken JSON, {len(answer.content)} bytes long"
        return None, f"the answer is not JSON: {excerpt(answer.text)!r}"


def excerpt(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text.split())
    return line if len(line) <= EXCERPT_LENGTH else line[:EXCERPT_LENGTH] + "…"


def _seconds(text: str | None) -> float:
    try:
        seconds = float(text or "")
    except ValueError:
        return 0.0
    return 0.0 if math.isnan(seconds) else min(max(0.0, seconds), MAX_RETRY_AFTER_S)
