"""Answers that a broken or hostile API may send, over real sockets: endless, slow, compressed to nothing, nested."""

import asyncio
import gzip
import json
import resource
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager

import pytest
from tests.contract.rental_providers import answering, http, saying
from tests.support.cases import cases
from tests.unit.providers.clients import client_of, failure_of

from shoal.cloud.providers import response_limits
from shoal.cloud.providers.api import FailureKind, ProviderLogin
from shoal.cloud.providers.http import MAX_PAGES
from shoal.cloud.providers.lambda_cloud import LambdaProvider
from shoal.cloud.providers.responses import ApiError, Body

MiB = 1024 * 1024
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nConnection: close\r\n"

Chunks = Callable[[], AsyncIterator[bytes]]


def sending(chunks: Chunks) -> AbstractAsyncContextManager[str]:
    """A server that answers every request with these chunks, until the client hangs up."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        async for chunk in chunks():
            writer.write(chunk)
            await writer.drain()

    return answering(answer)


def peak_memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@cases("status", "200 OK", "500 Internal Server Error")
async def test_endless_body_ends_at_the_limit(status: str) -> None:
    sent = 0

    async def endless() -> AsyncIterator[bytes]:
        nonlocal sent
        yield HEAD.replace(b"200 OK", status.encode()) + b'\r\n{"data": "'
        while sent < 2500 * MiB:
            sent += MiB
            yield b"x" * MiB

    before = peak_memory()
    async with sending(endless) as url:
        error = await failure_of(url, creates=True)
    assert error.message == "acme: GET /machines: the answer is longer than 32 MiB"
    assert error.failure is FailureKind.AMBIGUOUS, "a machine may have been made"
    assert sent < 200 * MiB, "the client hangs up"
    assert peak_memory() - before < 300 * MiB


@cases("kind", "gzip", "x-gzip", "deflate")
async def test_gzip_bomb_ends_at_the_limit(kind: str) -> None:
    packer = zlib.compressobj(1, wbits=15 if kind == "deflate" else 31)
    bomb = b"".join(packer.compress(b" " * MiB) for _ in range(400)) + packer.flush()
    assert len(bomb) < 4 * MiB

    async def packed() -> AsyncIterator[bytes]:
        yield HEAD + f"Content-Encoding: {kind}\r\nContent-Length: {len(bomb)}\r\n\r\n".encode() + bomb

    before = peak_memory()
    async with sending(packed) as url:
        error = await failure_of(url)
    assert error.message == "acme: GET /machines: the answer is longer than 32 MiB"
    assert error.failure is FailureKind.TRANSIENT
    assert peak_memory() - before < 300 * MiB


@cases(
    "encoding, body, told",
    ("br", b"\x0b\x02\x80{}\x03", "the answer is compressed as 'br'"),
    ("gzip, gzip", gzip.compress(gzip.compress(b"{}")), "the answer is compressed as 'gzip, gzip'"),
    ("gzip", b"no gzip", "the answer is not valid gzip"),
    ("gzip", gzip.compress(b'{"a": 1}')[:-9], "the answer is not valid gzip"),
    ids=["brotli", "twice", "not gzip", "truncated"],
)
async def test_unknown_compression_is_the_providers_error(encoding: str, body: bytes, told: str) -> None:
    reply = http("200 OK", body).replace(b"\r\n\r\n", f"\r\nContent-Encoding: {encoding}\r\n\r\n".encode(), 1)
    async with saying(reply) as url:
        assert (await failure_of(url)).message == f"acme: GET /machines: {told}"


async def test_compressed_answer_is_read() -> None:
    packed = gzip.compress(b'{"id": "m1"}')
    reply = http("200 OK", packed).replace(b"\r\n\r\n", b"\r\nContent-Encoding: gzip\r\n\r\n", 1)
    async with saying(reply) as url, client_of(url) as api:
        assert (await api.request("GET", "/machines")).text("id") == "m1"


@cases("where", "head", "body")
@cases("creates, kind", (False, FailureKind.TRANSIENT), (True, FailureKind.AMBIGUOUS))
async def test_a_byte_now_and_then_ends_at_the_time_limit(where: str, creates: bool, kind: FailureKind) -> None:
    async def slow() -> AsyncIterator[bytes]:
        whole = HEAD + b"Content-Length: 42\r\n\r\n" + b'{"id": "m1"}'.ljust(42)
        begin = len(whole) - 40 if where == "body" else 5
        yield whole[:begin]
        for place in range(begin, len(whole)):
            await asyncio.sleep(0.05)
            yield whole[place : place + 1]

    async with sending(slow) as url:
        error = await failure_of(url, creates=creates, timeout="0.5")
    assert (error.failure, error.message) == (kind, "acme: GET /machines: no complete answer within 0.5 s")


@cases(
    "body, told",
    (b'{"price": NaN}', "the answer is not JSON: NaN is no number in JSON"),
    (b'{"price": -Infinity}', "the answer is not JSON: -Infinity is no number in JSON"),
    (b'{"price": 1e999}', "the answer has a number that is too large"),
    (b'{"price": ' + b"9" * 5000 + b"}", "the answer has a number that is too large"),
    (b'{"price": ' + b"9" * 400 + b"}", "the answer has a number that is too large"),
    (b"[" * 100_000 + b"]" * 100_000, "the answer is nested more than 64 deep"),
    (b'{"a":' * 100 + b"1" + b"}" * 100, "the answer is nested more than 64 deep"),
    (b"[" + b"[]," * 5_000_000 + b"1]", "the answer has more than 1000000 values"),
    (b'{"a": "\xff"}', "the answer is broken JSON, 10 bytes long"),
    ids=["nan", "infinity", "overflow", "5000 digits", "400 digits", "100000 deep", "100 deep", "values", "not utf-8"],
)
async def test_broken_json_is_the_providers_error(body: bytes, told: str) -> None:
    async with saying(http("200 OK", body)) as url:
        error = await failure_of(url)
    assert (error.message, error.failure) == (f"acme: GET /machines: {told}", FailureKind.TRANSIENT)
    async with saying(http("400 Bad Request", body)) as url:
        error = await failure_of(url)
    assert (error.status, error.failure) == (400, FailureKind.INVALID), "an error answer keeps its meaning"


async def test_escapes_do_not_hide_nesting_and_text_does_not_count() -> None:
    assert response_limits.parse_json(b'{"a": "' + b"[" * 100 + b'\\"[["}') == {"a": "[" * 100 + '"[['}
    deep = b"[" * 63 + b'"\\u005b"' + b"]" * 63
    assert response_limits.parse_json(deep)


@cases(
    "more, told, count",
    ('"rows": [1]', f"the list has more than {MAX_PAGES} pages", MAX_PAGES),
    (f'"x": "{"x" * 30 * MiB}"', "the list is longer than 128 MiB", 5),
    ids=["pages", "bytes"],
)
async def test_list_without_end_is_the_providers_error(more: str, told: str, count: int) -> None:
    page = 0

    async def following() -> AsyncIterator[bytes]:
        nonlocal page
        page += 1
        yield http("200 OK", f'{{"next": "{page}", {more}}}'.encode())

    async with sending(following) as url, client_of(url) as api:
        with pytest.raises(ApiError) as caught:
            async for _ in api.pages("/machines", "after", lambda page: page.text("next", "")):
                pass
    assert (caught.value.message, page) == (f"acme: GET /machines: {told}", count)


def test_numbers_of_an_answer_that_fit_nowhere() -> None:
    body = Body({"big": 10**400, "port": 70000, "ok": 22, "part": 1.5, "when": "0001-01-01T00:00:00"}, "acme: GET /x")
    assert (body.port("ok"), body.port("absent", 22)) == (22, 22)
    assert body.time("when") is None
    for told, read in {
        "big is too large": lambda: body.number("big"),
        "port is not a port": lambda: body.port("port"),
        "part is not a port": lambda: body.port("part"),
    }.items():
        with pytest.raises(ApiError) as caught:
            read()
        assert caught.value.message == f"acme: GET /x: {told}"


@cases("epoch", "\u00b2", "9" * 400, "1e9", "-5", ids=["superscript", "400 digits", "exponent", "sign"])
async def test_invalid_time_of_a_machine_is_unknown(epoch: str) -> None:
    tags = {"shoal-cluster": "reef", "shoal-node": "n1", "shoal-token": "t1", "shoal-epoch": epoch}
    one = {"id": "m1", "status": "active", "tags": [{"key": key, "value": value} for key, value in tags.items()]}
    async with saying(http("200 OK", json.dumps({"data": [one]}).encode())) as url:
        provider = LambdaProvider(ProviderLogin("lambda", "lambda", "k", url))
        machines = await provider.instances("reef")
        await provider.close()
    assert [machine.created for machine in machines] == [None]
