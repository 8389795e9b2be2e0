"""What all providers' HTTP calls share: bodies that are read by key, reported failures, a rate limit."""

import asyncio
import time
from typing import Any

import pytest
from tests.contract.rental_providers import http, saying
from tests.support.cases import cases
from tests.unit.providers.clients import client_of, failure_of

from shoal.cloud.providers.api import FailureKind, ProviderLogin
from shoal.cloud.providers.http import MAX_RETRY_AFTER_S, ApiClient, map_concurrently
from shoal.cloud.providers.responses import ApiError, Body, Refusal, drop_none, refusal_by_code, refusal_by_message


async def failure(reply: bytes, *, creates: bool = False, **more: Any) -> ApiError:
    async with saying(reply) as url:
        return await failure_of(url, "POST", creates=creates, **more)


@cases(
    "status, read, create, scope",
    ("400 Bad Request", FailureKind.INVALID, FailureKind.INVALID, "offer"),
    ("401 Unauthorized", FailureKind.AUTH, FailureKind.AUTH, "provider"),
    ("402 Payment Required", FailureKind.BALANCE, FailureKind.BALANCE, "provider"),
    ("403 Forbidden", FailureKind.AUTH, FailureKind.AUTH, "provider"),
    ("404 Not Found", FailureKind.INVALID, FailureKind.INVALID, "offer"),
    ("408 Request Timeout", FailureKind.TRANSIENT, FailureKind.AMBIGUOUS, "offer"),
    ("409 Conflict", FailureKind.CONFLICT, FailureKind.CONFLICT, "offer"),
    ("422 Unprocessable", FailureKind.INVALID, FailureKind.INVALID, "offer"),
    ("429 Too Many Requests", FailureKind.RATE, FailureKind.RATE, "provider"),
    ("500 Internal Server Error", FailureKind.TRANSIENT, FailureKind.AMBIGUOUS, "offer"),
    ("503 Service Unavailable", FailureKind.TRANSIENT, FailureKind.AMBIGUOUS, "offer"),
)
async def test_status_decides_when_the_body_is_silent(
    status: str, read: FailureKind, create: FailureKind, scope: str
) -> None:
    for creates, expected in ((False, read), (True, create)):
        error = await failure(http(status, b"no luck", "text/plain"), creates=creates)
        assert (error.failure, error.scope, error.status) == (expected, scope, int(status[:3]))
        assert error.message == f"acme: POST /machines: {status[:3]}: no luck"
        assert error.outcome("m1").id == "m1"


async def test_retry_after_comes_from_the_answer_or_a_default_and_is_bounded() -> None:
    reply = http("429 Too Many Requests", b"slow").replace(b"\r\n\r\n", b"\r\nRetry-After: 17\r\n\r\n")
    assert (await failure(reply)).retry_after == 17
    for value in (b"inf", b"nan", b"1e9", b"999999999999"):
        assert 0 < (await failure(reply.replace(b"17", value))).retry_after <= MAX_RETRY_AFTER_S
    dated = reply.replace(b"17", b"Wed, 21 Oct 2026 07:28:00 GMT")
    assert (await failure(dated, retry_after=lambda: 12.0)).retry_after == 12


async def test_key_and_a_token_made_from_it_are_removed_from_messages() -> None:
    error = await failure(http("401 Unauthorized", b"unknown key sk-very-secret", "text/plain"))
    assert error.message == "acme: POST /machines: 401: unknown key ***"
    assert "sk-very-secret" not in repr(vars(error))

    async def bearer() -> str:
        return "ya29.exchanged"

    error = await failure(http("401 Unauthorized", b"expired: ya29.exchanged", "text/plain"), bearer=bearer)
    assert error.message == "acme: POST /machines: 401: expired: ***"
    quoting = http("403 Forbidden", b'{"why": "Bearer ya29.exchanged"}')
    error = await failure(quoting, bearer=bearer, read_error=lambda status, answer: Refusal(message=answer.text("why")))
    assert error.message == "acme: POST /machines: 403: Bearer ***"


@cases(
    "given, base",
    ("", "https://cloud.example/api/v1"),
    ("http://10.0.0.1:8080", "http://10.0.0.1:8080/api/v1"),
    ("http://10.0.0.1:8080/", "http://10.0.0.1:8080/api/v1"),
    ("http://10.0.0.1:8080/other/v2/", "http://10.0.0.1:8080/other/v2"),
)
async def test_url_without_a_path_gets_the_default_path(given: str, base: str) -> None:
    api = ApiClient(ProviderLogin("acme", "example", url=given), "https://cloud.example/api/v1")
    assert api.base == base
    await api.close()


def test_body_reads_fields_by_name_and_reports_missing_fields() -> None:
    body = Body({"items": [{"id": "a", "price": 3, "on": True, "in": {"x": None}}, {"id": 7}]}, "acme: GET /x")
    first, second = body.rows("items")
    assert (first.text("id"), first.number("price"), first.flag("on")) == ("a", 3.0, True)
    assert (first.text("name", "none"), first.number_or_none("size"), first.has("in")) == ("none", None, True)
    assert first.object("in").text("x", "y") == "y"
    assert [name for name, _ in first.object("in").items()] == ["x"]
    assert second.rows_or_empty("tags") == []
    assert (body.first("items").text("id"), second.first("tags").text("x", "none")) == ("a", "none")
    assert Body({"zone": "https://reef.test/zones/a-1"}).last_part("zone") == "a-1"
    wrong = {
        "the answer lacks items[1].name": lambda: second.text("name"),
        "items[1].id is not text": lambda: second.text("id"),
        "items[0].price is not an object": lambda: first.object("price"),
        "items[0].on is not a number": lambda: first.number("on"),
        "items[0].id is not a list": lambda: first.rows("id"),
        "the answer lacks items[0].in.x": lambda: first.object("in").text("x"),
        "the answer is not a list": lambda: body.rows(),
        "the answer is not an object": lambda: Body(5, "acme: GET /x").text("id"),
        "items[0].id is not an object": lambda: Body("a", "acme: GET /x", path="items[0].id").items(),
    }
    for told, read in wrong.items():
        with pytest.raises(ApiError) as caught:
            read()
        assert caught.value.message == f"acme: GET /x: {told}"


async def test_request_interval_of_the_account_overrides_the_provider() -> None:
    api = ApiClient(
        ProviderLogin("acme", "example", settings={"request_interval": "0.05"}), "http://127.0.0.1:9", interval=60.0
    )
    begun = time.monotonic()
    for _ in range(3):
        with pytest.raises(ApiError, match="cannot be reached"):
            await api.request("GET", "/x")
    assert time.monotonic() - begun >= 0.1
    await api.close()


async def test_every_page_is_read_and_a_repeated_page_is_an_error() -> None:
    read = 0
    async with saying(http("200 OK", b'{"rows": [1], "next": "b"}')) as url, client_of(url) as api:
        with pytest.raises(ApiError) as caught:
            async for page in api.pages("/machines", "after", lambda page: page.text("next", ""), limit=1):
                read += len(page.rows("rows"))
    assert read == 2
    assert caught.value.message == "acme: GET /machines: the list repeats the same page"


@cases(
    "status, expected",
    ("200 OK", None),
    ("404 Not Found", None),
    ("429 Too Many", FailureKind.RATE),
    ("500 Oops", FailureKind.TRANSIENT),
)
async def test_removal_of_a_missing_machine_succeeds(status: str, expected: FailureKind | None) -> None:
    async with saying(http(status, b"{}")) as url, client_of(url) as api:
        outcome = await api.remove("/machines/m1", "m1")
    assert (outcome.id, outcome.failure) == ("m1", expected)
    assert outcome.retry_after == (10.0 if expected is FailureKind.RATE else 0.0)


@cases("reply", http("500 Oops", b"{}"), http("200 OK", b"{}"), http("429 Too Many", b"{}"))
async def test_unreadable_order_status_is_ambiguous(reply: bytes) -> None:
    async with saying(reply) as url, client_of(url) as api:
        with pytest.raises(ApiError) as caught:
            await api.poll(Body({"state": "new"}), "/orders/1", lambda it: it.text("state") == "done", 60.0)
    assert caught.value.failure is FailureKind.AMBIGUOUS
    assert caught.value.message.startswith("acme: GET /orders/1: ")


async def test_order_is_polled_until_done_or_timeout() -> None:
    async with saying(http("200 OK", b'{"state": "done"}')) as url, client_of(url) as api:
        done = await api.poll(Body({"state": "new"}), "/orders/1", lambda it: it.text("state") == "done", 60.0)
        still = await api.poll(Body({"state": "new"}), "/orders/1", lambda it: it.text("state") == "never", 0.3)
    assert (done.text("state"), still.text("state")) == ("done", "done")


@cases("key", "sk-one\nsk-two", "sk-one\rx", "schlüssel")
async def test_key_with_invalid_characters_is_rejected_without_its_value(key: str) -> None:
    error = await failure_of("http://127.0.0.1:9/v1", "POST", creates=True, key=key)
    assert str(error) == "acme: POST /machines: the key has invalid characters"
    assert error.failure is FailureKind.AUTH


def test_first_matching_code_of_the_table_counts() -> None:
    table = {
        "sold-out none-left": Refusal(FailureKind.CAPACITY),
        "no": Refusal(FailureKind.INVALID, hint="ask for another"),
    }
    assert refusal_by_code(table, [("no", "not so"), ("none-left", "all gone")]) == Refusal(
        FailureKind.CAPACITY, message="none-left: all gone"
    )
    assert refusal_by_code(table, [("no", "not so")]) == Refusal(
        FailureKind.INVALID, message="no: not so", hint="ask for another"
    )
    assert refusal_by_code(table, [("none", "a part of a code is none"), ("", "")]) is None


def test_message_patterns_ignore_case() -> None:
    table = {r"sold out|none left": Refusal(FailureKind.CAPACITY), r"limit": Refusal(FailureKind.QUOTA, "provider")}
    found = refusal_by_message(table, "Your Limit is reached")
    assert found == Refusal(FailureKind.QUOTA, "provider", "Your Limit is reached")
    assert found.outcome().message == "Your Limit is reached"
    assert refusal_by_message(table, "something else") is None


def test_drop_none_removes_unset_fields() -> None:
    wanted = {"name": "n1", "network": None, "disks": [{"size": 0, "image": None}], "env": {"A": ""}}
    assert drop_none(wanted) == {"name": "n1", "disks": [{"size": 0}], "env": {"A": ""}}


async def test_concurrent_calls_return_results_in_order() -> None:
    under_way, most = 0, 0

    async def work(number: int) -> int:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.01 * (3 - number % 3))
        under_way -= 1
        if number == 98:
            raise ApiError("98 is broken", FailureKind.TRANSIENT)
        return number

    assert await map_concurrently(work, range(20)) == list(range(20))
    assert 1 < most <= 8
    with pytest.raises(ApiError, match="98 is broken"):
        await map_concurrently(work, [0, 98, 3])  # the first to end
    assert under_way == 0
