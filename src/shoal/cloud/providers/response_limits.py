"""Limits on what a provider may answer: total time, bytes after decompression, values, nesting and size of numbers.

An API is another party's program. A body without end, one byte every two seconds, a gzip bomb or `NaN` for a price is
that party's error: it ends the request with a message, and takes neither this machine's memory nor the rental service.
"""

from __future__ import annotations

import asyncio
import json
import sys
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import httpx

if "sniffio" not in sys.modules and find_spec("sniffio") is None:
    # httpcore imports it several times for each request. Where it is not installed, Python would search its whole path.
    sys.modules["sniffio"] = None  # type: ignore[assignment]

MAX_ANSWER_MIB = 32
"""Decompressed. 500 machines on a page, each with its boot script, take about half of it."""
MAX_VALUES = 1_000_000
"""An empty list is two bytes of JSON and 64 of memory."""
MAX_NESTING = 64
MAX_DIGITS = 300
"""A longer number fits no float."""
ACCEPT_ENCODING = "gzip, deflate"
_WINDOW_BITS = {"gzip": 31, "x-gzip": 31, "deflate": 15}


class AnswerError(ValueError):
    """An answer beyond a limit, or one that is not what HTTP and JSON allow."""


@dataclass(frozen=True)
class Answer:
    """A whole answer, decompressed."""

    status: int
    reason: str
    headers: Mapping[str, str]
    content: bytes

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300

    @property
    def text(self) -> str:
        return self.content.decode("utf-8", "replace")


async def fetch(client: httpx.AsyncClient, request: httpx.Request, seconds: float) -> Answer:
    """Send a request and read its whole answer within `seconds`. Raises AnswerError, httpx.HTTPError, TimeoutError."""
    async with asyncio.timeout(seconds):
        response = await client.send(request, stream=True)
        try:
            content = await _read(response)
        finally:
            await response.aclose()
    return Answer(response.status_code, response.reason_phrase, response.headers, content)


async def _read(response: httpx.Response) -> bytes:
    """The body, decompressed here: httpx inflates each piece it receives to any size."""
    encoding = response.headers.get("content-encoding", "identity").strip().lower()
    if encoding != "identity" and encoding not in _WINDOW_BITS:
        raise AnswerError(f"the answer is compressed as {encoding[:40]!r}")
    inflate = zlib.decompressobj(_WINDOW_BITS[encoding]) if encoding in _WINDOW_BITS else None
    limit, content = MAX_ANSWER_MIB * 1024 * 1024, bytearray()
    async for piece in response.aiter_raw():
        try:
            content += inflate.decompress(piece, limit + 1 - len(content)) if inflate else piece
        except zlib.error:
            raise AnswerError(f"the answer is not valid {encoding}") from None
        if len(content) > limit:
            raise AnswerError(f"the answer is longer than {MAX_ANSWER_MIB} MiB")
    if inflate and not inflate.eof and response.num_bytes_downloaded:
        raise AnswerError(f"the answer is not valid {encoding}")
    return bytes(content)


def parse_json(content: bytes) -> Any:
    """The data of a JSON text. AnswerError beyond a limit, else ValueError where it is no JSON."""
    if sum(map(content.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise AnswerError(f"the answer has more than {MAX_VALUES} values")
    too_deep = AnswerError(f"the answer is nested more than {MAX_NESTING} deep")
    try:
        data = json.loads(content, parse_constant=_reject_constant, parse_int=_parse_int, parse_float=_parse_float)
    except RecursionError:
        raise too_deep from None
    level = _containers([data])
    for _ in range(MAX_NESTING):
        if not level:
            return data
        level = [inner for outer in level for inner in _containers(outer)]
    if level:
        raise too_deep
    return data


def _containers(values: Any) -> list[Any]:
    """The lists and objects in a list or object."""
    items = values.values() if isinstance(values, dict) else values
    return [item for item in items if isinstance(item, (dict, list))]


def _reject_constant(name: str) -> Any:
    raise AnswerError(f"the answer is not JSON: {name} is no number in JSON")


def _parse_int(text: str) -> int:
    if len(text) > MAX_DIGITS:
        raise AnswerError("the answer has a number that is too large")
    return int(text)


def _parse_float(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise AnswerError("the answer has a number that is too large")
    return number
