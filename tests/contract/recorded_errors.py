"""Errors with which providers reject an order, from their documentation and from public reports."""

import json
from typing import Any

from shoal.cloud.providers.api import FailureKind

Recorded = tuple[str, dict[str, Any] | str, FailureKind]
"""The status, the body, and what it means for the order."""


def _lambda(code: str, message: str, **more: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, **more}}


def _runpod(status: int, detail: str, **more: Any) -> dict[str, Any]:
    return {"title": "Problem", "status": status, "detail": detail, **more}


def _google(status: int, reason: str, message: str) -> dict[str, Any]:
    error = {"message": message, "domain": "usageLimits", "reason": reason}
    return {"error": {"code": status, "message": message, "errors": [error]}}


def _aws(code: str, message: str) -> str:
    error = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>"
    return f"<?xml version='1.0'?><Response><Errors>{error}</Errors><RequestID>1</RequestID></Response>"


RECORDED: dict[str, tuple[Recorded, ...]] = {
    "aws": (
        (
            "500 Internal Server Error",
            _aws("InsufficientInstanceCapacity", "We currently do not have sufficient g6.xlarge capacity in the zone."),
            FailureKind.CAPACITY,
        ),
        (
            "400 Bad Request",
            _aws("VcpuLimitExceeded", "... your current vCPU limit of 0 allows for the instance bucket ..."),
            FailureKind.QUOTA,
        ),
        ("400 Bad Request", _aws("MaxSpotInstanceCountExceeded", "Max spot count exceeded"), FailureKind.QUOTA),
        ("400 Bad Request", _aws("Unsupported", "not supported in your requested zone"), FailureKind.CAPACITY),
        ("503 Service Unavailable", _aws("RequestLimitExceeded", "Request limit exceeded."), FailureKind.RATE),
        ("503 Service Unavailable", _aws("Unavailable", "The service is unavailable."), FailureKind.AMBIGUOUS),
        ("403 Forbidden", _aws("UnauthorizedOperation", "You are not authorized."), FailureKind.AUTH),
        ("400 Bad Request", _aws("AuthFailure", "Not authorized for images: [ami-1]"), FailureKind.INVALID),
        ("400 Bad Request", _aws("PendingVerification", "Your request is being validated."), FailureKind.TRANSIENT),
        ("400 Bad Request", _aws("IdempotentParameterMismatch", "Arguments differ."), FailureKind.CONFLICT),
    ),
    "lambda": (
        (
            "400 Bad Request",
            _lambda(
                "instance-operations/launch/insufficient-capacity",
                "Not enough capacity to fulfill launch request.",
                suggestion="Choose an instance type with more availability, or try again later.",
            ),
            FailureKind.CAPACITY,
        ),
        ("400 Bad Request", _lambda("global/quota-exceeded", "Quota exceeded."), FailureKind.QUOTA),
        (
            "400 Bad Request",
            _lambda("global/invalid-parameters", "Requested too many instances."),
            FailureKind.INVALID,
        ),
        (
            "404 Not Found",
            _lambda("global/object-does-not-exist", "Specified SSH key does not exist."),
            FailureKind.INVALID,
        ),
        (
            "401 Unauthorized",
            _lambda("global/invalid-api-key", "API key was invalid, expired, or deleted."),
            FailureKind.AUTH,
        ),
        ("403 Forbidden", _lambda("global/account-inactive", "Your account is inactive."), FailureKind.BALANCE),
        ("403 Forbidden", _lambda("global/invalid-address", "Your billing address is invalid."), FailureKind.BALANCE),
        ("503 Unavailable", _lambda("provider/internal-unavailable", "Try again shortly."), FailureKind.AMBIGUOUS),
        ("409 Conflict", _lambda("global/internal-error", "An internal error occurred."), FailureKind.AMBIGUOUS),
        ("429 Too Many Requests", "Too many requests", FailureKind.RATE),
    ),
    "runpod": (
        (
            "400 Bad Request",
            _runpod(
                400,
                "There are no longer any instances available with the requested specifications."
                " Please refresh and try again.",
            ),
            FailureKind.CAPACITY,
        ),
        (
            "400 Bad Request",
            _runpod(400, "This machine does not have the resources to deploy your pod. Please try a different machine"),
            FailureKind.CAPACITY,
        ),
        ("402 Payment Required", _runpod(402, "Your account balance is too low to rent a pod"), FailureKind.BALANCE),
        ("401 Unauthorized", _runpod(401, "missing bearer token"), FailureKind.AUTH),
        (
            "422 Unprocessable Content",
            _runpod(422, "Request validation failed.", errors=["$: additional properties 'x' not allowed"]),
            FailureKind.INVALID,
        ),
        ("410 Gone", {"error": "this API has been retired"}, FailureKind.INVALID),
        ("500 Internal Server Error", {"error": "Something went wrong"}, FailureKind.AMBIGUOUS),
        ("429 Too Many Requests", _runpod(429, "rate limit exceeded"), FailureKind.RATE),
    ),
    "vast": (
        (
            "410 Gone",
            {"success": False, "error": "no_such_ask", "msg": "error 410: ask 17 is no longer available"},
            FailureKind.CAPACITY,
        ),
        ("404 Not Found", {"success": False, "error": "no_such_ask", "msg": "not found"}, FailureKind.CAPACITY),
        (
            "400 Bad Request",
            {"success": False, "error": "invalid_price", "msg": "bid too low", "new_contract": 5},
            FailureKind.AMBIGUOUS,
        ),
        ("400 Bad Request", {"success": False, "error": "invalid_args", "msg": "disk"}, FailureKind.INVALID),
        ("402 Payment Required", {"success": False, "msg": "You lack credit"}, FailureKind.BALANCE),
        ("429 Too Many Requests", "API requests too frequent: endpoint threshold=4.5", FailureKind.RATE),
        ("401 Unauthorized", {"success": False, "error": "auth_error", "msg": "Invalid user key"}, FailureKind.AUTH),
        ("502 Bad Gateway", "<html>bad gateway</html>", FailureKind.AMBIGUOUS),
    ),
    "digitalocean": (
        (
            "422 Unprocessable Entity",
            {"id": "unprocessable_entity", "message": "Size is not available in this region."},
            FailureKind.CAPACITY,
        ),
        (
            "422 Unprocessable Entity",
            {"id": "unprocessable_entity", "message": "creating this/these droplet(s) will exceed your droplet limit"},
            FailureKind.QUOTA,
        ),
        (
            "422 Unprocessable Entity",
            {"id": "unprocessable_entity", "message": "You specified an invalid image for Droplet creation."},
            FailureKind.INVALID,
        ),
        (
            "422 Unprocessable Entity",
            {"id": "unprocessable_entity", "message": "1 are invalid key identifiers for Droplet creation."},
            FailureKind.TRANSIENT,
        ),
        ("401 Unauthorized", {"id": "unauthorized", "message": "Unable to authenticate you"}, FailureKind.AUTH),
        ("429 Too Many", {"id": "too_many_requests", "message": "API rate limit exceeded."}, FailureKind.RATE),
        ("500 Oops", {"id": "server_error", "message": "Unexpected server-side error"}, FailureKind.AMBIGUOUS),
    ),
    "paperspace": (
        (
            "400 Bad Request",
            {
                "code": "BAD_REQUEST",
                "message": "We are currently out of capacity for the selected VM type. Try again in a few minutes.",
            },
            FailureKind.CAPACITY,
        ),
        ("401 Unauthorized", {"code": "UNAUTHORIZED", "message": "UNAUTHORIZED"}, FailureKind.AUTH),
        (
            "400 Bad Request",
            {"code": "BAD_REQUEST", "message": "Input validation failed", "issues": [{"message": "Required"}]},
            FailureKind.INVALID,
        ),
        ("429 Too Many Requests", {"code": "TOO_MANY_REQUESTS", "message": "TOO_MANY_REQUESTS"}, FailureKind.RATE),
        ("500 Oops", {"code": "INTERNAL_SERVER_ERROR", "message": "Internal server error"}, FailureKind.AMBIGUOUS),
        ("408 Timeout", {"code": "TIMEOUT", "message": "TIMEOUT"}, FailureKind.AMBIGUOUS),
    ),
    "gcp": (
        (
            "403 Forbidden",
            _google(403, "quotaExceeded", "Quota 'NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in region us-central1."),
            FailureKind.QUOTA,
        ),
        (
            "403 Forbidden",
            _google(
                403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute'"
            ),
            FailureKind.RATE,
        ),
        (
            "403 Forbidden",
            _google(403, "forbidden", "Required 'compute.instances.create' permission for 'projects/p'"),
            FailureKind.AUTH,
        ),
        (
            "403 Forbidden",
            _google(403, "accessNotConfigured", "Compute Engine API has not been used in project 1 before"),
            FailureKind.AUTH,
        ),
        (
            "409 Conflict",
            _google(409, "alreadyExists", "The resource 'instances/x' already exists"),
            FailureKind.CONFLICT,
        ),
        ("400 Bad Request", _google(400, "invalid", "Invalid value for field 'resource.name'"), FailureKind.INVALID),
        ("404 Not Found", _google(404, "notFound", "The resource 'zones/z' was not found"), FailureKind.INVALID),
        ("503 Service Unavailable", _google(503, "backendError", "Backend Error"), FailureKind.AMBIGUOUS),
    ),
}


def written(body: dict[str, Any] | str) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()
