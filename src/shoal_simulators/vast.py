"""A simulated Vast.ai: offers that are pieces of machines, containers behind mapped ports, bids that lose.

Eight offers of one GPU are on one machine. An offer's id is gone once it is rented. A status is null at first, ports
come after `running`, lists have pages of 25, and too many requests are answered with plain text. An outbid machine is
shown as stopped until it is deleted.
"""

from __future__ import annotations

import math
import operator
import secrets
import uuid
from collections.abc import Callable, Iterator
from typing import Any
from zlib import crc32

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance, numeric_id
from shoal_simulators.market import SERVER_ERRORS, ApiRejection, Market
from shoal_simulators.server import RateLimit, Simulator, read_json

GPUS = (
    ("RTX 4090", 24, 0.40, 8, 32),
    ("L40S", 48, 0.80, 16, 64),
    ("H100 SXM", 80, 2.10, 20, 180),
)
"""Name, memory in GB, dollars an hour, CPUs and GB of memory for each."""
PLACES = {"US": "Texas, US", "DE": "Germany, DE", "FI": "Finland, FI"}
ROOM = {1: 64, 8: 4}
GPUS_OF_A_MACHINE = 8
BID_SHARE = 0.5
STORAGE_USD_GB_MONTH = 0.15
HOURS_A_MONTH = 730
PAGE = 25
MAX_SCRIPT, MAX_LABEL = 4096, 256
ERRORS = {
    "stockout": (410, "no_such_ask", "error 410: the requested ask is no longer available"),
    "quota": (403, "instance_limit", "instance limit reached"),
    "balance": (402, "insufficient_credit", "Your account lacks credit; see the billing page."),
    "auth": (401, "auth_error", "Invalid user key"),
    **dict.fromkeys(SERVER_ERRORS, (500, "server_error", "internal error")),
    "invalid": (400, "invalid_args", "{}"),
    "not-found": (404, "no_such_instance", "instance {} not found"),
}
"""Reason -> status, code, message. That of `quota` is assumed: none is documented."""


def _types() -> Iterator[MachineType]:
    for gpu, memory, price, cpus, gb in GPUS:
        for count, room in ROOM.items():
            shape = (gpu, count, memory, cpus * count, gb * count)
            name = gpu if count == 1 else f"{count}x {gpu}"
            usd = round(price * count, 4)
            yield MachineType(name, *shape, usd, round(usd * BID_SHARE, 4), places=dict.fromkeys(PLACES, room))


class VastSimulator(Simulator):
    """Vast's API in front of a Market."""

    kind = "vast"
    profile = Profile(boot_s=60.0, address_s=20.0, stop_s=2.0, container=True)
    types = tuple(_types())
    creating = r"PUT /api/v0/asks/\d+/"
    listing = r"GET /api/v1/instances/"

    def __init__(self, market: Market) -> None:
        super().__init__(market)
        self._asks: dict[int, tuple[MachineType, str, int]] = {}
        """Offers by id: the type, the place and the machine."""
        self._sold_out: set[tuple[str, str]] = set()
        """Until the next search: another renter has taken them all."""

    def limits(self) -> list[RateLimit]:
        return [
            RateLimit(4.5, self.creating, slack=4.5),
            RateLimit(3.0, r"DELETE .*", slack=3.0),
            RateLimit(1.0, self.listing, slack=2.0),
            RateLimit(6.0, r"POST /api/v0/bundles/", slack=54.0),
        ]

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/api/v0/bundles/", self.search, methods=["POST"]),
            Route("/api/v0/asks/{ask:int}/", self.create, methods=["PUT"]),
            Route("/api/v1/instances/", self.instances),
            Route("/api/v0/instances/{id:int}/", self.delete, methods=["DELETE"]),
        ]

    def error_response(self, reason: str, detail: str = "") -> Response:
        if reason == "rate":
            return PlainTextResponse("API requests too frequent: endpoint threshold=4.5", 429)
        status, code, text = ERRORS[reason]
        return JSONResponse({"success": False, "error": code, "msg": text.format(detail)}, status)

    async def search(self, request: Request) -> Response:
        asked = await read_json(request)
        spot, disk = asked.get("type") == "bid", float(asked.get("allocated_storage", 8))
        self._sold_out.clear()
        rows = []
        for type in self.types:
            for place in PLACES:
                for number in range(min(self.market.free(type.name, place), ROOM[type.gpus])):
                    rows.append(self._row(type, place, number, spot, disk))
        rows = [row for row in rows if all(_admits(row.get(name), test) for name, test in _tests(asked))]
        rows.sort(key=lambda row: float(row["dph_total"]))
        return JSONResponse({"offers": rows[: int(asked.get("limit", 64))]})

    def _row(self, type: MachineType, place: str, number: int, spot: bool, disk: float) -> dict[str, Any]:
        """An offer; every eighth has too small a share of its machine's CPUs."""
        id = 1_000_000 + secrets.randbelow(1_000_000_000)
        machine = crc32(f"{type.name} {place} {number * type.gpus // GPUS_OF_A_MACHINE}".encode()) % 1_000_000
        self._asks[id] = (type, place, machine)
        share = type.cpus if number % 8 != 7 else None
        price = (type.spot_usd_hour if spot else type.usd_hour) or 0.0
        return {
            "id": id,
            "machine_id": machine,
            "gpu_name": type.gpu,
            "num_gpus": type.gpus,
            "gpu_ram": type.gpu_memory_gb * 1024,
            "cpu_cores": type.cpus * 2,
            "cpu_cores_effective": share,
            "cpu_ram": type.memory_gb * 2 * 1024,
            "dph_base": price,
            "dph_total": round(price + STORAGE_USD_GB_MONTH * disk / HOURS_A_MONTH, 6),
            "min_bid": price,
            "storage_cost": STORAGE_USD_GB_MONTH,
            "geolocation": PLACES[place],
            "verified": True,
            "rentable": True,
            "rented": False,
            "external": False,
            "direct_port_count": 20,
            "inet_down": 800.0,
            "cuda_max_good": 13.0,
            "reliability2": 0.995,
        }

    async def create(self, request: Request) -> Response:
        asked, id = await read_json(request), request.path_params["ask"]
        script = "".join([asked.get("onstart", ""), *asked.get("args", [])])
        if not isinstance(asked.get("image"), str) or asked.get("runtype") != "args":
            raise ApiRejection("invalid", "image, runtype")
        if len(script) > MAX_SCRIPT or len(asked.get("label", "")) > MAX_LABEL or asked.get("disk", 0) < 8:
            raise ApiRejection("invalid", "args, label or disk out of range")
        type, place, machine_id = self._asks.get(id, (None, "", 0))
        if type is None or (type.name, place) in self._sold_out:
            raise ApiRejection("stockout")
        bid = asked.get("price")
        if bid is not None and bid < (type.spot_usd_hour or 0.0):
            return JSONResponse({"success": False, "error": "invalid_price", "msg": "bid below min_bid"}, 400)
        order = InstanceOrder(
            asked.get("label", ""),
            type.name,
            place,
            market="on-demand" if bid is None else "spot",
            user_data=asked["args"][-1],
            marks={"order": {**asked, "args": None}, "machine_id": machine_id},
            image=asked["image"],
        )
        try:
            machine = self.market.order(order, str(10**7 + secrets.randbelow(9 * 10**7)))
        except ApiRejection as rejected:
            if rejected.reason == "stockout":
                self._sold_out.add((type.name, place))
            raise
        finally:
            self._asks.pop(id, None)
        offered = self.market.price(type.name, order.market)
        price = (bid or offered) + STORAGE_USD_GB_MONTH * asked["disk"] / HOURS_A_MONTH
        machine.usd_hour = round(machine.usd_hour / offered * price, 6)
        self.market.save()
        key = uuid.uuid4().hex
        return JSONResponse({"success": True, "new_contract": numeric_id(machine.id), "instance_api_key": key})

    async def instances(self, request: Request) -> Response:
        size, start = int(request.query_params.get("limit", PAGE)), int(request.query_params.get("after_token", 0))
        if not 1 <= size <= PAGE:
            raise ApiRejection("invalid", "limit")
        self.market.update()
        for machine in self.market.instances.values():
            if machine.preempted and machine.stopping and machine.order.market == "spot" and not machine.shown_until:
                machine.shown_until = math.inf  # paused: it stays until it is deleted
        shown = [self._shown(one) for one in self.market.list_instances() if self._is_listed(one)]
        more = start + size < len(shown)
        page = shown[start : start + size]
        return JSONResponse(
            {"instances": page, "next_token": str(start + size) if more else None, "total_instances": len(shown)}
        )

    async def delete(self, request: Request) -> Response:
        ids = {numeric_id(id): id for id in self.market.instances}
        machine = self.market.instances.get(ids.get(request.path_params["id"], ""))
        if machine is None or not self._is_listed(machine):
            raise ApiRejection("not-found", str(request.path_params["id"]))
        if machine.live:
            self.market.delete(machine.id)
        machine.preempted, machine.shown_until = False, 0.0
        self.market.save()
        return JSONResponse({"success": True})

    def _is_listed(self, machine: SimulatedInstance) -> bool:
        return machine.live or (machine.preempted and machine.order.market == "spot")

    def _shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        order, type = machine.order, self.market.types[machine.order.type]
        begun = self.market.clock() - machine.ordered > self.profile.address_s
        paused = not machine.live
        status = {"up": "running", "error": "exited"}.get(machine.phase, "loading" if begun else None)
        state = "stopped" if paused else "running"
        ports = {"22/tcp": [{"HostIp": machine.host, "HostPort": str(machine.port)}]}
        return {
            "id": numeric_id(machine.id),
            "machine_id": order.marks.get("machine_id"),
            "label": order.name,
            "actual_status": "exited" if paused else status,
            "intended_status": state,
            "cur_state": state,
            "next_state": state,
            "status_msg": "",
            "start_date": machine.ordered,
            "dph_total": machine.usd_hour,
            "is_bid": order.market == "spot",
            "public_ipaddr": f"{machine.host} " if machine.host else None,
            "ports": ports if machine.phase == "up" else None,
            "geolocation": PLACES[order.region],
            "gpu_name": type.gpu,
            "num_gpus": type.gpus,
        }


def _tests(asked: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return [(name, test) for name, test in asked.items() if isinstance(test, dict)]


OPERATORS: dict[str, Callable[[Any, Any], bool]] = {
    "eq": operator.eq,
    "neq": operator.ne,
    "gte": operator.ge,
    "lte": operator.le,
    "gt": operator.gt,
    "lt": operator.lt,
    "in": lambda value, many: value in many,
    "notin": lambda value, many: value not in many,
}


def _admits(value: Any, test: dict[str, Any]) -> bool:
    """Whether a value passes a test such as `{"gte": 1}`."""
    return value is not None and all(OPERATORS[name](value, other) for name, other in test.items())
