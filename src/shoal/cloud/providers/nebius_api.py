"""Nebius's API: calls over gRPC by Nebius's own library, with requests and answers as JSON, and what errors mean.

The library is the extra `nebius`, and is imported with the first call. It retries by itself, up to three times, and for
fifteen minutes where a key is wrong: here it does neither.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from shoal.cloud.providers.api import FailureKind, ProviderLogin
from shoal.cloud.providers.http import (
    CREATE_TIMEOUT_S,
    FIRST_POLL_S,
    MAX_PAGES,
    MAX_POLL_S,
    REQUEST_TIMEOUT_S,
)
from shoal.cloud.providers.responses import ApiError, Body, Refusal, ambiguous_on_error, refusal_by_message
from shoal.errors import ProviderError
from shoal.registry import install_command

Json = Mapping[str, Any]
INSTANCES = "compute.v1.InstanceService"
OPERATIONS = "common.v1.OperationService"
PAGE = 50
"""An instance in a list has its user data of up to 32 KiB."""
MAX_ANSWER_MIB = 32
LOGIN_TIMEOUT_S = 5.0
"""For one exchange of the key for a token."""
NOTE_TOKEN_TIMEOUT_S = 1.0
RETRY_AFTER_S = 10.0
OK, NOT_FOUND, RESOURCE_EXHAUSTED = 0, 5, 8
"""Codes of gRPC that an operation ends with, too."""
CODES = {
    1: "CANCELLED",
    2: "UNKNOWN",
    3: "INVALID_ARGUMENT",
    4: "DEADLINE_EXCEEDED",
    NOT_FOUND: "NOT_FOUND",
    6: "ALREADY_EXISTS",
    7: "PERMISSION_DENIED",
    RESOURCE_EXHAUSTED: "RESOURCE_EXHAUSTED",
    9: "FAILED_PRECONDITION",
    10: "ABORTED",
    11: "OUT_OF_RANGE",
    12: "UNIMPLEMENTED",
    13: "INTERNAL",
    14: "UNAVAILABLE",
    15: "DATA_LOSS",
    16: "UNAUTHENTICATED",
}
_LOGIN = Refusal(FailureKind.AUTH, "provider", hint="check that the key is valid, and its service account an editor")
REFUSALS_BY_CODE = {
    "UNAUTHENTICATED": _LOGIN,
    "PERMISSION_DENIED": _LOGIN,
    "ALREADY_EXISTS": Refusal(FailureKind.CONFLICT),
    **{code: Refusal(FailureKind.INVALID) for code in ("INVALID_ARGUMENT", "FAILED_PRECONDITION", "OUT_OF_RANGE")},
    **{code: Refusal(FailureKind.INVALID) for code in ("NOT_FOUND", "UNIMPLEMENTED")},
}
"""All others leave open what happened."""
REFUSALS_BY_DETAIL = {
    "notEnoughResources": Refusal(FailureKind.CAPACITY),
    "quotaFailure": Refusal(FailureKind.QUOTA, hint="raise it in Nebius's console, under Quotas"),
    "tooManyRequests": Refusal(FailureKind.RATE, "provider"),
    "operationConflict": Refusal(FailureKind.TRANSIENT),  # such as a delete while its create is under way
}
"""A quota that is used up and hardware that is sold out have the same code, RESOURCE_EXHAUSTED."""
REFUSALS_BY_MESSAGE = {
    r"suspend|unpaid|payment|billing account": Refusal(
        FailureKind.BALANCE, "provider", hint="see Nebius's console about the account"
    ),
    r"quota": Refusal(FailureKind.QUOTA),
}


class NebiusApi:
    """The API of one provider account. Made once per process."""

    def __init__(self, account: ProviderLogin) -> None:
        if find_spec("nebius") is None:
            raise ProviderError(
                f"{account.name} needs the package nebius, which is not installed",
                hint=f"run `{install_command('nebius')}`",
            )
        self.account = account
        self._sdk: Any = None
        self._token = ""
        """What the key was exchanged for: no message may quote it."""

    async def call(
        self, service: str, method: str, request: Json | None = None, *, creates: bool = False, key: str = ""
    ) -> Body:
        """Call a method of a service and return its answer. Raises ApiError.

        `creates`: a lost answer may have made a machine; `key` makes it idempotent.
        """
        unknown = FailureKind.AMBIGUOUS if creates else FailureKind.TRANSIENT
        where = f"{self.account.name}: {service.rpartition('.')[2]}/{method}"
        seconds = float(self.account.settings.get("timeout", CREATE_TIMEOUT_S if creates else REQUEST_TIMEOUT_S))
        sdk = self._connected()
        from nebius.aio.constant_channel import Constant
        from nebius.aio.request import Request, RequestError
        from nebius.aio.route import Route
        from nebius.aio.token.options import OPTION_RENEW_REQUEST_TIMEOUT, OPTION_RENEW_SYNCHRONOUS
        from nebius.base.error import SDKError
        from nebius.base.protos.dynamic import REGISTRY

        def route(service: str, method: str) -> Route:
            options = REGISTRY.client_class(service)
            return Route(service, method, options.__api_service_name__, REGISTRY)

        name = f"nebius.{service}"
        types = REGISTRY.service_descriptor(name).methods_by_name[method]
        # The operations of a service are asked of the service's own address.
        channel = Constant(route(f"nebius.{INSTANCES}", "Create"), sdk) if service == OPERATIONS else sdk
        asked: Request[Any, Any] = Request(
            channel=channel,
            service=name,
            method=method,
            request=REGISTRY.message_class(types.input_type.full_name).from_json(json.dumps(request or {})),
            result_pb2_class=REGISTRY.message_class(types.output_type.full_name),
            metadata=[("x-idempotency-key", key)] if key else None,
            timeout=seconds,
            auth_timeout=seconds + LOGIN_TIMEOUT_S,
            auth_options={OPTION_RENEW_SYNCHRONOUS: "true", OPTION_RENEW_REQUEST_TIMEOUT: str(LOGIN_TIMEOUT_S)},
            retries=0,
            route=route(name, method),
        )
        asked.wait_for_ready = False  # an address that does not answer is an error at once
        try:
            async with asyncio.timeout(seconds + LOGIN_TIMEOUT_S):
                answer: Any = await asked
        except RequestError as error:
            await self._note_token(sdk)
            raise self._refusal_error(where, error, unknown) from None
        except TimeoutError:
            raise self._error(f"{where}: no complete answer within {seconds:g} s", Refusal(unknown)) from None
        except (SDKError, ValueError) as error:
            raise self._error(f"{where}: {_exception_text(error)}", Refusal(unknown)) from None
        return Body(json.loads(answer.to_json()), where, unknown)

    async def items(self, service: str, method: str = "List", **request: Any) -> AsyncIterator[Body]:
        """Every item of a list, from all pages."""
        seen = {""}
        token = ""
        for _ in range(MAX_PAGES):
            page = await self.call(service, method, {**request, "pageSize": PAGE, "pageToken": token})
            for item in page.rows_or_empty("items"):
                yield item
            token = page.text("nextPageToken", "")
            if not token:
                return
            if token in seen:
                raise page.error("the list repeats the same page")
            seen.add(token)
        raise page.error(f"the list has more than {MAX_PAGES} pages")

    async def follow(self, operation: Body, seconds: float) -> Refusal | None:
        """Poll an accepted order until its operation has ended or `seconds` have passed. Why it failed, if it did."""
        pause, ends = FIRST_POLL_S, time.monotonic() + seconds
        with ambiguous_on_error():
            while not operation.has("status") and time.monotonic() < ends:
                await asyncio.sleep(pause)
                pause = min(MAX_POLL_S, 2 * pause)
                operation = await self.call(OPERATIONS, "Get", {"id": operation.text("id")})
        status = operation.object_or_empty("status")
        code = int(status.number("code", OK))
        if code == OK:
            return None
        errors = [one.value for one in status.rows_or_empty("details") if isinstance(one.value, dict)]
        return read_refusal(CODES.get(code, "UNKNOWN"), status.text("message", ""), errors, FailureKind.TRANSIENT)

    async def close(self) -> None:
        if self._sdk is not None:
            await self._sdk.close()
            self._sdk = None

    def _connected(self) -> Any:
        """The library's channel, in this event loop."""
        if self._sdk is not None:
            return self._sdk
        from nebius.aio.channel import Channel
        from nebius.base.options import INSECURE
        from nebius.base.resolver import Constant

        options: list[tuple[str, Any]] = [("grpc.max_receive_message_length", MAX_ANSWER_MIB * 1024 * 1024)]
        more: dict[str, Any] = {}
        if self.account.url:  # one address for all services
            there = urlsplit(self.account.url)
            port = there.port or (443 if there.scheme == "https" else 80)
            more["resolver"] = Constant(f"{there.hostname}:{port}")
            options += [(INSECURE, True)] if there.scheme == "http" else []
        self._sdk = Channel(
            credentials=_credentials(self.account),
            options=options,
            event_loop=asyncio.get_running_loop(),
            user_agent_prefix="shoal",
            **more,
        )
        return self._sdk

    async def _note_token(self, sdk: Any) -> None:
        """Read the token of the last request from the library, which keeps it until it expires."""
        from nebius.base.error import SDKError

        with suppress(SDKError, TimeoutError):  # without a token none was sent
            self._token = (await sdk.get_token(NOTE_TOKEN_TIMEOUT_S)).token

    def _refusal_error(self, where: str, error: Any, unknown: FailureKind) -> ApiError:
        status = getattr(error, "status", None)
        code = getattr(getattr(status, "code", None), "name", "UNKNOWN")
        message = getattr(status, "message", "") or _exception_text(error)
        if code == "UNAVAILABLE" and "failed to connect" in message:
            message = f"{where}: cannot be reached: {message.partition(';')[0]}"
            return self._error(message, Refusal(FailureKind.TRANSIENT, "provider"))
        errors = [json.loads(one.to_json()) for one in getattr(status, "service_errors", ())]
        refusal = read_refusal(code, message, errors, unknown)
        made = self._error(f"{where}: {refusal.message}", refusal)
        made.status = 404 if code == "NOT_FOUND" else 0
        return made

    def _error(self, message: str, refusal: Refusal) -> ApiError:
        for secret in filter(None, (self.account.secret, self._token)):
            message = message.replace(secret, "***")
        failure = refusal.failure or FailureKind.TRANSIENT
        wait = RETRY_AFTER_S if failure is FailureKind.RATE else 0.0
        return ApiError(message, failure, hint=refusal.hint, scope=refusal.scope, retry_after=wait)


def count_of(body: Body, name: str) -> int:
    """A whole number; those of 64 bits are text in the JSON of gRPC."""
    value = body.value.get(name, 0)
    try:
        return int(value)
    except (TypeError, ValueError):
        raise body.error(f"{name} is not a number") from None


def read_refusal(code: str, message: str, errors: list[dict[str, Any]], unknown: FailureKind) -> Refusal:
    """What an error means: by its details, then by its message and code."""
    texts = [message, *(str(found["message"]) for one in errors for found in _violations(one) if "message" in found)]
    words = f"{code}: {'; '.join(dict.fromkeys(text for text in texts if text))}"
    for detail, refusal in REFUSALS_BY_DETAIL.items():
        if any(detail in one for one in errors):
            return Refusal(refusal.failure, refusal.scope, words, refusal.hint)
    if code in ("RESOURCE_EXHAUSTED", "FAILED_PRECONDITION", "PERMISSION_DENIED") and (
        known := refusal_by_message(REFUSALS_BY_MESSAGE, words)
    ):
        return known
    fallback = Refusal(FailureKind.CAPACITY) if code == "RESOURCE_EXHAUSTED" else Refusal(unknown)
    refusal = REFUSALS_BY_CODE.get(code, fallback)
    return Refusal(refusal.failure, refusal.scope, words, refusal.hint)


def _violations(error: dict[str, Any]) -> list[dict[str, Any]]:
    details = [detail for detail in error.values() if isinstance(detail, dict)]
    return [violation for detail in details for violation in detail.get("violations", [])]


def _credentials(account: ProviderLogin) -> Any:
    """The account's key for the library: a token, or the JSON of a service account's key."""
    from nebius.base.service_account.credentials_file import ServiceAccountCredentials
    from nebius.base.service_account.service_account import ServiceAccount
    from nebius.base.service_account.static import Reader

    secret = account.secret.strip()
    try:
        if secret.startswith("{"):
            subject = ServiceAccountCredentials.from_json(json.loads(secret)).subject_credentials
            return Reader(ServiceAccount(subject.parse_private_key(), subject.kid, subject.sub))
        if not secret or not (secret.isascii() and secret.isprintable()):
            raise ValueError
    except (ValueError, KeyError, TypeError):
        raise ProviderError(
            f"the key of {account.name} is neither a token nor the JSON of a service account's key",
            hint="run `nebius iam auth-public-key generate`, and set the path of the file that it writes: "
            "key: file:~/.nebius/credentials.json",
        ) from None
    return secret


def _exception_text(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
