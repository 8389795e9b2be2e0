"""Google's operations, which end seconds after the answer to a request, and what errors mean."""

from __future__ import annotations

from collections.abc import Sequence

from shoal.cloud.providers import responses
from shoal.cloud.providers.api import FailureKind, RequestOutcome
from shoal.cloud.providers.http import ApiClient
from shoal.cloud.providers.responses import ApiError, Body, CodedError, Refusal

FOLLOW_TIMEOUT_S = 90.0
"""How long an operation is polled. Google reports missing stock within half a minute."""
REFUSALS_BY_CODE = {
    "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT": Refusal(FailureKind.CAPACITY),
    "RESOURCE_NOT_FOUND insufficientCapacity": Refusal(FailureKind.CAPACITY),
    "UNSUPPORTED_OPERATION": Refusal(FailureKind.CAPACITY),  # taken away during creation
    "QUOTA_EXCEEDED quotaExceeded limitExceeded": Refusal(FailureKind.QUOTA, "region"),
    "RESOURCE_ALREADY_EXISTS alreadyExists": Refusal(FailureKind.CONFLICT),
    "RESOURCE_OPERATION_RATE_EXCEEDED rateLimitExceeded userRateLimitExceeded": Refusal(FailureKind.RATE, "provider"),
    "RESOURCE_NOT_READY resourceNotReady": Refusal(FailureKind.TRANSIENT),
    "BILLING_DISABLED accountDisabled": Refusal(FailureKind.BALANCE, "provider"),
    "PERMISSIONS_ERROR authError forbidden insufficientPermissions": Refusal(FailureKind.AUTH, "provider"),
    "accessNotConfigured": Refusal(FailureKind.AUTH, "provider", hint="enable the Compute Engine API for the project"),
    "INVALID_USAGE INVALID_FIELD_VALUE required invalid notFound badRequest": Refusal(FailureKind.INVALID),
    "VM_MIN_COUNT_NOT_REACHED": Refusal(FailureKind.CAPACITY),  # only a summary: other errors come first
}
"""The codes of failed operations, and the reasons in error answers."""
GLOBAL_QUOTAS = {"GPUS_ALL_REGIONS": Refusal(FailureKind.QUOTA, "provider")}
"""A quota of all regions, which only the message shows."""


async def poll(api: ApiClient, operation: Body, place: str) -> Body:
    """An operation once it is done, or after a while. Its place is `/projects/P/zones/Z`, or a region, or `global`."""
    path = f"{place}/operations/{operation.text('name')}"
    return await api.poll(operation, path, lambda it: it.text("status") == "DONE", FOLLOW_TIMEOUT_S)


async def finish(api: ApiClient, operation: Body, place: str) -> None:
    """Wait for an operation. Raises ApiError if it fails."""
    if errors := errors_of(await poll(api, operation, place)):
        outcome = outcome_of(errors)
        raise ApiError(f"{api.account.name}: {outcome.message}", outcome.failure or FailureKind.TRANSIENT)


def errors_of(operation: Body) -> list[CodedError]:
    """The errors of an ended operation."""
    errors = operation.object_or_empty("error").rows_or_empty("errors")
    return [(error.text("code", ""), error.text("message", "")) for error in errors]


def outcome_of(errors: Sequence[CodedError]) -> RequestOutcome:
    """The outcome of an order that made nothing. An unknown code leaves open whether it did."""
    text = "; ".join(f"{code}: {words}" for code, words in errors)
    text = text or "the order is still running, or ended without an error"
    refusal = responses.refusal_by_message(GLOBAL_QUOTAS, text) or responses.refusal_by_code(REFUSALS_BY_CODE, errors)
    return (refusal or Refusal(FailureKind.AMBIGUOUS, message=text)).outcome()


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means; a 403 of Google has four meanings."""
    error = answer.object("error")
    message = error.text("message", "")
    parts = [part for name in ("details", "errors") for part in error.rows_or_empty(name)]
    errors = [(part.text("reason", ""), message) for part in parts]
    return responses.refusal_by_message(GLOBAL_QUOTAS, message) or responses.refusal_by_code(REFUSALS_BY_CODE, errors)
