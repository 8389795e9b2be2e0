"""Rules of the VPCs of the simulated Google Compute Engine. A change happens when its operation ends, or does not."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shoal_simulators.gcp_requests import NAME
from shoal_simulators.market import ApiRejection, Market
from shoal_simulators.server import read_json

Firewalls = dict[str, dict[str, Any]]
RIGHTS = {"GET": "get", "POST": "create", "PATCH": "update", "DELETE": "delete"}
"""Method -> the right that it needs."""
FIXED = ("name", "network", "direction")
"""What no patch changes."""
ACTIONS = {"allowed", "denied"}
FIELDS = {
    *("name", "network", "direction", "description", "priority", "disabled", "targetTags", "sourceTags"),
    *("sourceRanges", "destinationRanges", "sourceServiceAccounts", "targetServiceAccounts", "logConfig", *ACTIONS),
}
SOURCES = {"sourceRanges", "sourceTags", "sourceServiceAccounts"}
WWW = "https://www.googleapis.com/compute/v1"


def forbidden(right: str) -> Response:
    message = f"Required 'compute.firewalls.{right}' permission."
    error = {"message": message, "domain": "global", "reason": "forbidden"}
    return JSONResponse({"error": {"code": 403, "message": message, "errors": [error]}}, 403)


def find(request: Request, firewalls: Firewalls) -> dict[str, Any]:
    project, name = request.path_params["project"], request.path_params["name"]
    if f"{project}/{name}" not in firewalls:
        raise ApiRejection("not-found", f"projects/{project}/global/firewalls/{name}")
    return firewalls[f"{project}/{name}"]


async def read_change(request: Request, firewalls: Firewalls, market: Market) -> Callable[[], None]:
    """What a request does once its operation ends. Raises ApiRejection for one that is wrong at once."""
    project = request.path_params["project"]
    body = {} if request.method == "DELETE" else await read_json(request)
    if request.method == "POST":
        rule = _new(body)
        if f"{project}/{rule.get('name')}" in firewalls:
            raise ApiRejection("duplicate-name", f"projects/{project}/global/firewalls/{rule['name']}")
    else:
        rule = _patched(find(request, firewalls), body)
    _check(rule, project)

    def change() -> None:
        firewalls[f"{project}/{rule['name']}"] = rule
        if request.method == "DELETE":
            del firewalls[f"{project}/{rule['name']}"]
        market.save()

    return change


def _new(body: dict[str, Any]) -> dict[str, Any]:
    defaults = {"kind": "compute#firewall", "direction": "INGRESS", "priority": 1000, "disabled": False}
    network = {"network": body.get("network") or "global/networks/default"}
    anywhere = {} if SOURCES & {*body} else {"sourceRanges": ["0.0.0.0/0"]}
    return {**defaults, **anywhere, **body, **network}


def _patched(rule: dict[str, Any], body: dict[str, Any]) -> dict[str, Any]:
    """As a JSON merge patch says: null takes a field away."""
    for name in FIXED:
        if name in body and str(body[name]).rpartition("/")[2] != str(rule[name]).rpartition("/")[2]:
            raise ApiRejection("invalid", f"Invalid value for field 'resource.{name}': it cannot be changed.")
    if {*body} & ACTIONS - {*rule}:
        raise ApiRejection("invalid", "Invalid value for field 'resource': a rule either allows or denies.")
    merged = {**rule, **{name: value for name, value in body.items() if name not in FIXED}}
    return {name: value for name, value in merged.items() if value is not None}


def _check(rule: dict[str, Any], project: str) -> None:
    if unknown := sorted({*rule} - FIELDS - {"kind"}):
        raise ApiRejection("invalid", f"Invalid JSON payload received. Unknown name {unknown[0]!r}.")
    if not re.fullmatch(NAME, str(rule.get("name", ""))):
        raise ApiRejection("invalid", f"Invalid value for field 'resource.name': '{rule.get('name')}'.")
    network = re.fullmatch(rf"(?:{WWW}/)?(?:projects/([^/]+)/)?global/networks/(?P<name>{NAME})", rule["network"])
    if network is None or network[1] not in (None, project):
        raise ApiRejection("invalid", f"Invalid value for field 'resource.network': '{rule['network']}'.")
    rule["network"] = f"{WWW}/projects/{project}/global/networks/{network['name']}"
    for place, text in enumerate(rule.get("sourceRanges", [])):
        try:
            ipaddress.ip_network(text)
        except ValueError:
            wrong = f"Invalid value for field 'resource.sourceRanges[{place}]': '{text}'. Must be a valid CIDR."
            raise ApiRejection("invalid", wrong) from None
    ports = [port for entry in rule.get("allowed", []) for port in entry.get("ports", [])]
    if not ACTIONS & {*rule} or not all(re.fullmatch(r"\d{1,5}(-\d{1,5})?", port) for port in ports):
        raise ApiRejection("invalid", "Invalid value for field 'resource.allowed'.")
