"""The sandbox as a cloud: a small API of Shoal's own, for what no provider's API has all of.

Orders are idempotent by token, many machines are ordered in one call, spot machines are told before they go, and the
cloud itself ends a machine at its lifetime.

    GET  /v1/types                        what there is, where, for how much
    POST /v1/machines                     {"machines": [{token, name, type, zone, ...}]} -> one id or error for each
    GET  /v1/machines?after=ID            500 at a time; `next` is where to go on
    POST /v1/machines/delete              {"ids": [...]} -> {"deleted": [...], "unknown": [...]}
    GET  http://169.254.169.254/notice    for a machine: {"seconds": 30} once it is to go, else 404
"""

from __future__ import annotations

import uuid
from itertools import islice
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.providers.rental import Billing
from shoal.simulators.machines import Machine, MachineType, Profile, Wanted
from shoal.simulators.market import Market, Refused
from shoal.simulators.server import Cloud, Limit, read_json

REGION = "sandbox"
ZONES = {"sandbox-a": 200, "sandbox-b": 200}
AT_ONCE = 100
PAGE = 500
ERRORS = {
    "stockout": (503, "capacity", "there is none of these left in that zone"),
    "quota": (403, "quota", "your account may not have more of these"),
    "balance": (402, "balance", "your account has no money left"),
    "auth": (401, "auth", "that key is not known here"),
    "rate": (429, "rate", "slow down"),
    "error-before-create": (500, "internal", "something broke"),
    "error-after-create": (500, "internal", "something broke"),
    "list-fails": (500, "internal", "something broke"),
    "duplicate-name": (409, "conflict", "there is a machine of that name"),
    "invalid": (422, "invalid", "that order makes no sense"),
    "not-found": (404, "not-found", "there is no such machine"),
}
SINGLE = ("stockout", "quota", "duplicate-name", "invalid")
"""What concerns one machine of an order; anything else ends the call."""
STATES = {"pending": "booting", "up": "running", "error": "failed", "stopping": "stopping", "gone": "gone"}


class ElasticSandbox(Cloud):
    """That API in front of a Market."""

    kind = "sandbox"
    base = "/v1"
    profile = Profile(
        user="root",
        boot_seconds=5.0,
        stop_seconds=1.0,
        notice_seconds=30.0,
        unique_names=True,
        billing=Billing(step=1),
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
        self._tokens: dict[str, Machine] = {}

    def limits(self) -> list[Limit]:
        return [Limit(0.05, slack=2.0)]

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v1/types", self.offered),
            Route("/v1/machines", self.machines),
            Route("/v1/machines", self.create, methods=["POST"]),
            Route("/v1/machines/delete", self.delete, methods=["POST"]),
        ]

    def authorised(self, request: Request, key: str) -> bool:
        return not key or super().authorised(request, key)  # it is yours: a key is asked for if you gave one

    def refuse(self, why: str, detail: str = "") -> Response:
        status, code, message = ERRORS[why]
        headers = {"Retry-After": "1"} if why == "rate" else {}
        return JSONResponse({"error": {"code": code, "message": detail or message}}, status, headers)

    def metadata(self, request: Request, machine: Machine) -> Response | None:
        if request.url.path != "/notice" or machine.takes_away is None:
            return None
        return JSONResponse({"seconds": max(0, round(machine.takes_away - self.market.clock()))})

    async def offered(self, request: Request) -> Response:
        shown = [
            {
                "name": one.name,
                "gpu": one.gpu,
                "gpus": one.gpus,
                "gpu_memory_gb": one.gpu_memory_gb,
                "cpus": one.cpus,
                "memory_gb": one.memory_gb,
                "usd_hour": {"on-demand": one.usd_hour, "spot": one.spot_usd_hour},
                "zones": [{"name": zone, "free": self.market.room(one.name, zone)} for zone in one.places],
            }
            for one in self.market.types.values()
        ]
        return JSONResponse({"region": REGION, "types": shown})

    async def machines(self, request: Request) -> Response:
        found, after = self.market.listed(), request.query_params.get("after", "")
        ids = [one.id for one in found]
        begin = ids.index(after) + 1 if after in ids else 0
        page = found[begin : begin + PAGE]
        more = page[-1].id if page and begin + PAGE < len(found) else None
        return JSONResponse({"machines": [self.shown(one) for one in page], "next": more})

    async def create(self, request: Request) -> Response:
        orders = (await read_json(request)).get("machines")
        if not isinstance(orders, list) or not 0 < len(orders) <= AT_ONCE:
            raise Refused("invalid", f"machines: a list of 1 to {AT_ONCE}")
        return JSONResponse({"machines": [self._ordered(order) for order in orders]})

    async def delete(self, request: Request) -> Response:
        answer: dict[str, list[str]] = {"deleted": [], "unknown": []}
        for id in (await read_json(request)).get("ids", []):
            try:
                answer["deleted"].append(self.market.delete(id).id)
            except Refused:
                answer["unknown"].append(id)
        return JSONResponse(answer)

    def _ordered(self, order: Any) -> dict[str, Any]:
        """One machine: its id, or why there is none. The same token again is the same machine."""
        token = order.get("token", "") if isinstance(order, dict) else ""
        before = self._of_token(token)
        try:
            machine = before or self.market.order(_wanted(order, token), f"m-{uuid.uuid4().hex[:12]}")
        except Refused as error:
            if error.why not in SINGLE:
                raise
            _, code, message = ERRORS[error.why]
            return {"token": token, "error": {"code": code, "message": error.detail or message}}
        return {"token": token, "id": machine.id, "usd_hour": machine.usd_hour}

    def _of_token(self, token: str) -> Machine | None:
        for machine in islice(self.market.machines.values(), len(self._tokens), None):
            self._tokens[machine.wanted.marks["token"]] = machine
        return self._tokens.get(token)

    def shown(self, machine: Machine) -> dict[str, Any]:
        wanted = machine.wanted
        ends = [wanted.lifetime and machine.ordered + wanted.lifetime, machine.takes_away]
        return {
            "id": machine.id,
            "name": wanted.name,
            "token": wanted.marks["token"],
            "labels": wanted.marks["labels"],
            "type": wanted.type,
            "zone": wanted.zone,
            "market": wanted.market,
            "state": STATES[machine.phase],
            "address": machine.host or None,
            "port": machine.port,
            "user": self.market.profile.user,
            "usd_hour": machine.usd_hour,
            "created": machine.ordered,
            "ends": min((end for end in ends if end), default=None),
            "preempted": machine.preempted,
        }


def _wanted(order: Any, token: str) -> Wanted:
    """An order as the market takes it. Raises Refused with `invalid`."""
    try:
        wanted = Wanted(
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
        raise Refused("invalid", f"not an order: {error}") from None
    if not token or wanted.zone not in ZONES or wanted.market not in ("on-demand", "spot"):
        raise Refused("invalid", "an order has a token, a zone of those in /v1/types, and a market")
    return wanted
