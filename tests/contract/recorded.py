"""Refusals of an order as the documentation of the providers, and what others report of them, has them."""

from __future__ import annotations

import json
from typing import Any

from shoal.providers.rental import Trouble

Recorded = tuple[str, dict[str, Any] | str, Trouble]
"""The status, the body, and what it means for the order."""


def _lambda(code: str, message: str, **more: str) -> dict[str, Any]:
    return {"error": {"code": code, "message": message, **more}}


def _runpod(status: int, detail: str, **more: Any) -> dict[str, Any]:
    return {"title": "Problem", "status": status, "detail": detail, **more}


def _google(status: int, reason: str, message: str) -> dict[str, Any]:
    error = {"message": message, "domain": "usageLimits", "reason": reason}
    return {"error": {"code": status, "message": message, "errors": [error]}}


RECORDED: dict[str, tuple[Recorded, ...]] = {
    "lambda": (
        (
            "400 Bad Request",
            _lambda(
                "instance-operations/launch/insufficient-capacity",
                "Not enough capacity to fulfill launch request.",
                suggestion="Choose an instance type with more availability, or try again later.",
            ),
            Trouble.CAPACITY,
        ),
        ("400 Bad Request", _lambda("global/quota-exceeded", "Quota exceeded."), Trouble.QUOTA),
        (
            "400 Bad Request",
            _lambda("global/invalid-parameters", "Requested too many instances."),
            Trouble.INVALID,
        ),
        (
            "404 Not Found",
            _lambda("global/object-does-not-exist", "Specified SSH key does not exist."),
            Trouble.INVALID,
        ),
        (
            "401 Unauthorized",
            _lambda("global/invalid-api-key", "API key was invalid, expired, or deleted."),
            Trouble.AUTH,
        ),
        ("403 Forbidden", _lambda("global/account-inactive", "Your account is inactive."), Trouble.BALANCE),
        ("403 Forbidden", _lambda("global/invalid-address", "Your billing address is invalid."), Trouble.BALANCE),
        ("503 Unavailable", _lambda("provider/internal-unavailable", "Try again shortly."), Trouble.AMBIGUOUS),
        ("409 Conflict", _lambda("global/internal-error", "An internal error occurred."), Trouble.AMBIGUOUS),
        ("429 Too Many Requests", "Too many requests", Trouble.RATE),
    ),
    "runpod": (
        (
            "400 Bad Request",
            _runpod(
                400,
                "There are no longer any instances available with the requested specifications."
                " Please refresh and try again.",
            ),
            Trouble.CAPACITY,
        ),
        (
            "400 Bad Request",
            _runpod(400, "This machine does not have the resources to deploy your pod. Please try a different machine"),
            Trouble.CAPACITY,
        ),
        ("402 Payment Required", _runpod(402, "Your account balance is too low to rent a pod"), Trouble.BALANCE),
        ("401 Unauthorized", _runpod(401, "missing bearer token"), Trouble.AUTH),
        (
            "422 Unprocessable Content",
            _runpod(422, "Request validation failed.", errors=["$: additional properties 'x' not allowed"]),
            Trouble.INVALID,
        ),
        ("410 Gone", {"error": "this API has been retired"}, Trouble.INVALID),
        ("500 Internal Server Error", {"error": "Something went wrong"}, Trouble.AMBIGUOUS),
        ("429 Too Many Requests", _runpod(429, "rate limit exceeded"), Trouble.RATE),
    ),
    "paperspace": (
        (
            "400 Bad Request",
            {
                "code": "BAD_REQUEST",
                "message": "We are currently out of capacity for the selected VM type. Try again in a few minutes.",
            },
            Trouble.CAPACITY,
        ),
        ("401 Unauthorized", {"code": "UNAUTHORIZED", "message": "UNAUTHORIZED"}, Trouble.AUTH),
        (
            "400 Bad Request",
            {"code": "BAD_REQUEST", "message": "Input validation failed", "issues": [{"message": "Required"}]},
            Trouble.INVALID,
        ),
        ("429 Too Many Requests", {"code": "TOO_MANY_REQUESTS", "message": "TOO_MANY_REQUESTS"}, Trouble.RATE),
        ("500 Oops", {"code": "INTERNAL_SERVER_ERROR", "message": "Internal server error"}, Trouble.AMBIGUOUS),
        ("408 Timeout", {"code": "TIMEOUT", "message": "TIMEOUT"}, Trouble.AMBIGUOUS),
    ),
    "gcp": (
        (
            "403 Forbidden",
            _google(403, "quotaExceeded", "Quota 'NVIDIA_H100_GPUS' exceeded.  Limit: 0.0 in region us-central1."),
            Trouble.QUOTA,
        ),
        (
            "403 Forbidden",
            _google(
                403, "rateLimitExceeded", "Quota exceeded for quota metric 'Queries' and limit 'Queries per minute'"
            ),
            Trouble.RATE,
        ),
        (
            "403 Forbidden",
            _google(403, "forbidden", "Required 'compute.instances.create' permission for 'projects/p'"),
            Trouble.AUTH,
        ),
        (
            "403 Forbidden",
            _google(403, "accessNotConfigured", "Compute Engine API has not been used in project 1 before"),
            Trouble.AUTH,
        ),
        ("409 Conflict", _google(409, "alreadyExists", "The resource 'instances/x' already exists"), Trouble.CONFLICT),
        ("400 Bad Request", _google(400, "invalid", "Invalid value for field 'resource.name'"), Trouble.INVALID),
        ("404 Not Found", _google(404, "notFound", "The resource 'zones/z' was not found"), Trouble.INVALID),
        ("503 Service Unavailable", _google(503, "backendError", "Backend Error"), Trouble.AMBIGUOUS),
    ),
}


def written(body: dict[str, Any] | str) -> bytes:
    return body.encode() if isinstance(body, str) else json.dumps(body).encode()
