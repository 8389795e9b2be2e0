"""Errors with which providers reject an order, from their documentation and from public reports."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from shoal.cloud.providers.api import FailureKind, Scope


@dataclass(frozen=True)
class Recorded:
    """An answer, and what it means for the order."""

    status: int
    body: Any
    failure: FailureKind
    scope: Scope = "offer"
    words: str = ""
    """What is told of the answer."""

    @property
    def line(self) -> str:
        return f"{self.status} {HTTPStatus(self.status).phrase}"

    @property
    def data(self) -> bytes:
        return (self.body if isinstance(self.body, str) else json.dumps(self.body)).encode()


def rows(body: Callable[..., Any], *recorded: tuple[int, FailureKind, Scope, *tuple[str, ...]]) -> tuple[Recorded, ...]:
    """One for each status, meaning, scope, and the words of which a body is made; the last are told."""
    return tuple(Recorded(status, body(*words), kind, scope, words[-1]) for status, kind, scope, *words in recorded)


def aws(code: str, message: str) -> str:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f"<?xml version='1.0'?><Response><Errors>{error}</Errors><RequestID>1</RequestID></Response>"


def google(reason: str, message: str, **more: Any) -> dict[str, Any]:
    error = {"message": message, "domain": "usageLimits", "reason": reason}
    return {"error": {"code": 403, "message": message, "errors": [error], **more}}


def runpod(*words: str) -> dict[str, Any]:
    """The detail, and before it the errors of single fields."""
    return {"title": "Problem", "status": 0, "detail": words[-1], "errors": [*words[:-1]]}


CAPACITY, QUOTA, BALANCE, AUTH = FailureKind.CAPACITY, FailureKind.QUOTA, FailureKind.BALANCE, FailureKind.AUTH
RATE, INVALID, CONFLICT = FailureKind.RATE, FailureKind.INVALID, FailureKind.CONFLICT
AMBIGUOUS, TRANSIENT = FailureKind.AMBIGUOUS, FailureKind.TRANSIENT

RECORDED: dict[str, tuple[Recorded, ...]] = {
    "aws": rows(
        aws,
        (500, CAPACITY, "zone", "InsufficientInstanceCapacity", "We currently do not have sufficient g6.xlarge."),
        (400, QUOTA, "region", "VcpuLimitExceeded", "... your current vCPU limit of 0 allows for the bucket ..."),
        (400, QUOTA, "region", "MaxSpotInstanceCountExceeded", "Max spot count exceeded"),
        (400, CAPACITY, "zone", "Unsupported", "not supported in your requested zone"),
        (503, RATE, "provider", "RequestLimitExceeded", "Request limit exceeded."),
        (503, AMBIGUOUS, "offer", "Unavailable", "Unavailable: The service is unavailable."),
        (500, AMBIGUOUS, "offer", "InternalError", "An internal error has occurred."),
        (403, AUTH, "provider", "UnauthorizedOperation", "You are not authorized."),
        (401, AUTH, "provider", "AuthFailure", "AWS was not able to validate the provided access credentials"),
        (400, INVALID, "offer", "AuthFailure", "Not authorized for images: [ami-1]"),
        (400, TRANSIENT, "region", "PendingVerification", "Your request is being validated."),
        (400, CONFLICT, "offer", "IdempotentParameterMismatch", "Arguments differ."),
    ),
    "lambda": (
        *rows(
            lambda code, message: {"error": {"code": code, "message": message, "suggestion": "Try again later."}},
            (400, CAPACITY, "offer", "instance-operations/launch/insufficient-capacity", "Not enough capacity."),
            (400, QUOTA, "offer", "global/quota-exceeded", "Quota exceeded."),
            (400, INVALID, "offer", "global/invalid-parameters", "Requested too many instances."),
            (400, INVALID, "offer", "something/new", "Nobody knows."),
            (400, INVALID, "offer", "global/object-does-not-exist", "Specified SSH key does not exist."),
            (404, INVALID, "offer", "global/object-does-not-exist", "Specified SSH key does not exist."),
            (401, AUTH, "provider", "global/invalid-api-key", "API key was invalid, expired, or deleted."),
            (403, BALANCE, "provider", "global/account-inactive", "Your account is inactive."),
            (403, BALANCE, "provider", "global/invalid-address", "Your billing address is invalid."),
            (400, TRANSIENT, "offer", "provider/internal-unavailable", "Try again shortly."),
            (503, AMBIGUOUS, "offer", "provider/internal-unavailable", "Try again shortly."),
            (409, AMBIGUOUS, "offer", "global/internal-error", "An internal error occurred."),
        ),
        Recorded(429, "Too many requests", RATE, "provider"),
    ),
    "runpod": (
        *rows(
            runpod,
            (400, CAPACITY, "offer", "There are no longer any instances available with the requested specifications."),
            (400, CAPACITY, "offer", "This machine does not have the resources to deploy your pod."),
            (400, QUOTA, "provider", "You have reached your spend limit. Contact support to raise it."),
            (400, INVALID, "offer", "request could not be processed"),
            (402, BALANCE, "provider", "Your account balance is too low to rent a pod"),
            (401, AUTH, "provider", "missing bearer token"),
            (403, AUTH, "provider", "access denied"),
            (403, QUOTA, "offer", "pool AMPERE_80 is not allowed"),
            (404, INVALID, "offer", "resource not found"),
            (422, INVALID, "offer", "$: additional properties 'x' not allowed", "Request validation failed."),
            (500, AMBIGUOUS, "offer", "Something went wrong"),
            (429, RATE, "provider", "rate limit exceeded"),
        ),
        Recorded(410, {"error": "this API has been retired"}, INVALID, "provider"),
        Recorded(400, {"error": "v1"}, INVALID),
    ),
    "vast": (
        *rows(
            lambda error, message: {"success": False, "error": error, "msg": message},
            (410, CAPACITY, "offer", "no_such_ask", "error 410: ask 17 is no longer available"),
            (404, CAPACITY, "offer", "no_such_ask", "not found"),
            (400, INVALID, "offer", "invalid_args", "disk"),
            (401, AUTH, "provider", "auth_error", "Invalid user key"),
        ),
        Recorded(400, {"success": False, "error": "invalid_price", "msg": "bid too low", "new_contract": 5}, AMBIGUOUS),
        Recorded(402, {"success": False, "msg": "You lack credit"}, BALANCE, "provider"),
        Recorded(429, "API requests too frequent: endpoint threshold=4.5", RATE, "provider"),
        Recorded(502, "<html>bad gateway</html>", AMBIGUOUS),
    ),
    "digitalocean": rows(
        lambda id, message: {"id": id, "message": message},
        (422, CAPACITY, "offer", "unprocessable_entity", "Size is not available in this region."),
        (422, QUOTA, "provider", "unprocessable_entity", "creating this droplet will exceed your droplet limit"),
        (422, INVALID, "offer", "unprocessable_entity", "You specified an invalid image for Droplet creation."),
        (422, TRANSIENT, "offer", "unprocessable_entity", "1 are invalid key identifiers for Droplet creation."),
        (401, AUTH, "provider", "unauthorized", "Unable to authenticate you"),
        (429, RATE, "provider", "too_many_requests", "API rate limit exceeded."),
        (500, AMBIGUOUS, "offer", "server_error", "Unexpected server-side error"),
    ),
    "paperspace": rows(
        lambda code, message: {"code": code, "message": message, "issues": [{"message": "Required"}]},
        (400, CAPACITY, "offer", "BAD_REQUEST", "We are currently Out Of Capacity for the selected VM type."),
        (403, QUOTA, "provider", "FORBIDDEN", "Your team has hit its limit"),
        (403, AUTH, "provider", "FORBIDDEN", "Not for you"),
        (412, BALANCE, "provider", "PRECONDITION_FAILED", "Add a payment method"),
        (401, AUTH, "provider", "UNAUTHORIZED", "UNAUTHORIZED"),
        (400, INVALID, "offer", "BAD_REQUEST", "Input validation failed"),
        (409, CONFLICT, "offer", "CONFLICT", "taken"),
        (429, RATE, "provider", "TOO_MANY_REQUESTS", "Rate limit reached"),
        (500, AMBIGUOUS, "offer", "INTERNAL_SERVER_ERROR", "Internal server error"),
        (500, AMBIGUOUS, "offer", "TIMEOUT", "out of capacity"),
        (408, AMBIGUOUS, "offer", "TIMEOUT", "TIMEOUT"),
    ),
    "gcp": (
        *rows(
            google,
            (403, QUOTA, "region", "quotaExceeded", "Quota 'NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in us-central1."),
            (403, QUOTA, "provider", "quotaExceeded", "Quota 'GPUS_ALL_REGIONS' exceeded"),
            (403, RATE, "provider", "rateLimitExceeded", "Quota exceeded for quota metric 'Queries per minute'"),
            (403, AUTH, "provider", "forbidden", "Required 'compute.instances.create' permission for 'projects/p'"),
            (403, AUTH, "provider", "accessNotConfigured", "Compute Engine API has not been used in project 1 before"),
            (409, CONFLICT, "offer", "alreadyExists", "The resource 'instances/x' already exists"),
            (400, INVALID, "offer", "invalid", "Invalid value for field 'resource.name'"),
            (404, INVALID, "offer", "notFound", "The resource 'zones/z' was not found"),
            (503, AMBIGUOUS, "offer", "backendError", "Backend Error"),
        ),
        Recorded(403, google("forbidden", "billing", details=[{"reason": "BILLING_DISABLED"}]), BALANCE, "provider"),
    ),
}
UNREADABLE = tuple(
    Recorded(500, body, AMBIGUOUS)
    for body in ("<html>", None, [], {}, {"error": "text"}, {"error": {"errors": [None]}}, {"message": 7})
)
"""Errors in nobody's format: the status decides."""
