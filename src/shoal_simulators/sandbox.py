"""The sandbox as a cloud: a small API of Shoal's own, with features that no provider has all of.

GET  /v1/types                        types, zones and prices
POST /v1/machines                     {"machines": [{token, name, type, zone, ...}]} -> one id or error for each
GET  /v1/machines?after=ID            500 at a time; `next` is the next `after`
POST /v1/machines/delete              {"ids": [...]} -> {"deleted": [...], "unknown": [...]}
GET  http://169.254.169.254/notice    for a machine: {"seconds": 30} before a preemption, else 404
"""

from __future__ import annotations

import uuid
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance
from shoal_simulators.market import SERVER_ERRORS, ApiRejection, Market
from shoal_simulators.server import RateLimit, Simulator, read_json

REGION = "sandbox"
ZONES = {"sandbox-a": 200, "sandbox-b": 200}
MAX_ORDERS = 100
PAGE_SIZE = 500
ERRORS = {
    "stockout": (503, "capacity", "there is none of these left in that zone"),
    "quota": (403, "quota", "your account may not have more of these"),
    "balance": (402, "balance", "your account has no money left"),
    "auth": (401, "auth", "that key is not known here"),
    "rate": (429, "rate", "slow down"),
    **dict.fromkeys(SERVER_ERRORS, (500, "internal", "something broke")),
    "duplicate-name": (409, "conflict", "there is a machine of that name"),
    "invalid": (422, "invalid", "that order makes no sense"),
    "not-found": (404, "not-found", "there is no such machine"),
}
SINGLE = ("stockout", "quota", "duplicate-name", "invalid")
"""Errors of one machine of an order; any other rejects the request."""
TYPE_FIELDS = ("name", "gpu", "gpus", "gpu_memory_gb", "cpus", "memory_gb")
STATES = {"pending": "booting", "up": "running", "error": "failed", "stopping": "stopping", "gone": "gone"}


class SandboxSimulator(Simulator):
    """That API in front of a Market."""

    kind = "sandbox"
    base = "/v1"
    profile = Profile(
        boot_s=5.0,
        stop_s=1.0,
        notice_s=30.0,
        unique_names=True,
    )
    types = (
        MachineType("cpu", cpus=1, memory_gb=1, usd_hour=0.06, spot_usd_hour=0.02, places=ZONES),
        MachineType("gpu", "Simulated GPU", 1, 16, 1, 2, 0.60, 0.20, places=ZONES),
        MachineType("gpu-2", "Simulated GPU", 2, 16, 1, 2, 1.20, 0.40, places=ZONES),
        MachineType("gpu-8", "Simulated H100", 8, 16, 2, 4, 4.80, 1.60, places=ZONES),
    )
    creating = r"POST /v1/machines"
    listing = r"GET /v1/machines"

    def __init__(self, market: Market) -> None:
        super().__init__(market)
        self._tokens: dict[str, SimulatedInstance] = {}

    def limits(self) -> list[RateLimit]:
        return [RateLimit(0.05, slack=2.0)]

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/types", self.offered),
            Route("/v1/machines", self.machines),
            Route("/v1/machines", self.create, methods=["POST"]),
            Route("/v1/machines/delete", self.delete, methods=["POST"]),
        ]

    def authorised(self, request: Request, key: str) -> bool:
        return not key or super().authorised(request, key)  # a key is optional here

    def error_response(self, reason: str, detail: str = "") -> Response:
        status, code, message = ERRORS[reason]
        headers = {"Retry-After": "1"} if reason == "rate" else {}
        return JSONResponse({"error": {"code": code, "message": detail or message}}, status, headers)

    def metadata(self, request: Request, machine: SimulatedInstance) -> Response | None:
        if request.url.path != "/notice" or machine.takes_away is None:
            return None
        return JSONResponse({"seconds": max(0, round(machine.takes_away - self.market.clock()))})

    async def offered(self, request: Request) -> Response:
        shown = [
            {
                **{name: getattr(type, name) for name in TYPE_FIELDS},
                "usd_hour": {"on-demand": type.usd_hour, "spot": type.spot_usd_hour},
                "zones": [{"name": zone, "free": self.market.free(type.name, zone)} for zone in type.places],
            }
            for type in self.market.types.values()
        ]
        return JSONResponse({"region": REGION, "types": shown})

    async def machines(self, request: Request) -> Response:
        machines, after = self.market.list_instances(), request.query_params.get("after", "")
        ids = [machine.id for machine in machines]
        begin = ids.index(after) + 1 if after in ids else 0
        page = machines[begin : begin + PAGE_SIZE]
        more = page[-1].id if page and begin + PAGE_SIZE < len(machines) else None
        return JSONResponse({"machines": [self.shown(machine) for machine in page], "next": more})

    async def create(self, request: Request) -> Response:
        orders = (await read_json(request)).get("machines")
        if not isinstance(orders, list) or not 0 < len(orders) <= MAX_ORDERS:
            raise ApiRejection("invalid", f"machines: a list of 1 to {MAX_ORDERS}")
        return JSONResponse({"machines": [self._order(order) for order in orders]})

    async def delete(self, request: Request) -> Response:
        answer: dict[str, list[str]] = {"deleted": [], "unknown": []}
        for id in (await read_json(request)).get("ids", []):
            try:
                answer["deleted"].append(self.market.delete(id).id)
            except ApiRejection:
                answer["unknown"].append(id)
        return JSONResponse(answer)

    def _order(self, order: Any) -> dict[str, Any]:
        """One machine: its id or its error. The same token gives the same machine."""
        token = order.get("token", "") if isinstance(order, dict) else ""
        before = self._by_token(token)
        try:
            machine = before or self.market.order(_read_order(order, token), f"m-{uuid.uuid4().hex[:12]}")
        except ApiRejection as error:
            if error.reason not in SINGLE:
                raise
            _, code, message = ERRORS[error.reason]
            return {"token": token, "error": {"code": code, "message": error.detail or message}}
        return {"token": token, "id": machine.id, "usd_hour": machine.usd_hour}

    def _by_token(self, token: str) -> SimulatedInstance | None:
        for machine in islice(self.market.instances.values(), len(self._tokens), None):
            self._tokens[machine.order.marks["token"]] = machine
        return self._tokens.get(token)

    def shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        order = machine.order
        ends = [order.lifetime and machine.ordered + order.lifetime, machine.takes_away]
        return {
            **{name: getattr(machine, name) for name in ("id", "port", "usd_hour", "preempted")},
            **{name: getattr(order, name) for name in ("name", "type", "zone", "market")},
            **order.marks,
            "state": STATES[machine.phase],
            "address": machine.host or None,
            "user": self.market.profile.user,
            "created": machine.ordered,
            "ends": min((end for end in ends if end), default=None),
        }


def _read_order(order: Any, token: str) -> InstanceOrder:
    """An order as the market takes it. Raises ApiRejection with `invalid`."""
    try:
        instance = InstanceOrder(
            name=order["name"],
            type=order["type"],
            region=REGION,
            zone=order.get("zone") or next(iter(ZONES)),
            market=order.get("market", "on-demand"),
            public_keys=(order["public_key"],),
            user_data=order.get("user_data", ""),
            marks={"token": token, "labels": order.get("labels", {})},
            lifetime=float(order.get("lifetime", 0)),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ApiRejection("invalid", f"not an order: {error}") from None
    if not token or instance.zone not in ZONES or instance.market not in ("on-demand", "spot"):
        raise ApiRejection("invalid", "an order has a token, a zone of those in /v1/types, and a market")
    return instance
