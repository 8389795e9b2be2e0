"""A simulated RunPod: v2 of its REST API, with its documented or observed states, limits and errors.

Unknown fields are rejected (422), only requested ports are open, RUNNING comes before SSH answers, each pod shows its
price, and a 400 has several meanings. Machines are containers behind one port; one whose first process ends is started
again with its command, and its bill goes on.
"""

from __future__ import annotations

import re
import secrets
import shlex
import string
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance
from shoal_simulators.market import SERVER_ERRORS, ApiRejection
from shoal_simulators.server import RateLimit, Simulator, iso_time, read_json

GPUS = (
    ("NVIDIA A40", "A40", 48, 0.44, 9, 50),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 24, 0.74, 6, 41),
    ("NVIDIA L40S", "L40S", 48, 1.09, 12, 94),
    ("NVIDIA A100-SXM4-80GB", "A100 SXM", 80, 1.59, 16, 117),
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 80, 3.49, 20, 188),
    ("NVIDIA H200", "H200 SXM", 141, 4.59, 24, 251),
)
"""Id, name, memory in GB, dollars an hour, CPUs and GB of memory for each."""
DATA_CENTERS = {"US-KS-2": "Kansas", "US-TX-3": "Texas", "EU-RO-1": "Romania"}
ROOM = {1: 64, 2: 32, 4: 16, 8: 8}
"""How often so many GPUs are in one machine of a data centre."""
LEVELS = ((8, "HIGH"), (3, "MEDIUM"), (1, "LOW"))
PER_MINUTE = 180
STARTS, RUNS = 0.4, 0.7
"""Parts of the boot after which a pod is STARTING, and RUNNING although SSH does not answer yet."""
FIELDS = frozenset({
    "name", "image", "gpu", "cpu", "cloud", "dataCenterIds", "disk", "ports", "env", "args", "entrypoint", "cmd",
    "mounts", "registry", "globalNetworking", "startSsh", "startJupyter", "templateId",
})  # fmt: skip
GPU_FIELDS = {"id", "count", "allowedCudaVersions", "minCudaVersion", "minRamPerGpu", "minVcpuCountPerGpu"}
ERRORS = {
    "stockout": (
        400,
        "There are no longer any instances available with the requested specifications. Please refresh and try again.",
    ),
    "quota": (400, "You have reached your spend limit. Contact support to raise it."),
    "balance": (402, "Your account balance is too low to rent a pod"),
    "auth": (401, "missing bearer token"),
    "rate": (429, "rate limit exceeded for the minute window"),
    **dict.fromkeys(SERVER_ERRORS, (500, "internal server error")),
    "duplicate-name": (409, "pod name is already in use"),
    "invalid": (400, "request could not be processed"),
    "not-found": (404, "pod not found"),
}
ACTIONS = {
    "RUNNING": ("stop", "restart", "terminate"),
    "EXITED": ("start", "terminate"),
    "ERROR": ("start", "terminate"),
    "PROVISIONING": ("stop", "terminate"),
    "STARTING": ("stop", "terminate"),
}


def _types() -> Iterator[MachineType]:
    for gpu, name, memory, price, cpus, gb in GPUS:
        for count, room in ROOM.items():
            resources = (name, count, memory, cpus * count, gb * count, round(price * count, 4))
            yield MachineType(type_name(gpu, count), *resources, places=dict.fromkeys(DATA_CENTERS, room))


def type_name(gpu: str, count: int) -> str:
    return gpu if count == 1 else f"{count}x {gpu}"


class RunPodSimulator(Simulator):
    """RunPod's API in front of a Market."""

    kind = "runpod"
    base = "/v2"
    profile = Profile(boot_s=40.0, stop_s=2.0, container=True, restarts=True)
    types = tuple(_types())
    creating = r"POST /v2/pods"
    listing = r"GET /v2/pods"
    page = 50
    own_keys_delete = True
    """Whether the key inside a pod may delete that pod, which RunPod does not document."""

    def authorised(self, request: Request, key: str) -> bool:
        """An account's key may do everything; the one that a pod gets may only read and delete that pod."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        pod = next((one for one in self.market.instances.values() if one.order.marks["key"] == given), None)
        if pod is None:
            return super().authorised(request, key)
        methods = ("GET", "DELETE") if self.own_keys_delete else ("GET",)
        return request.method in methods and request.url.path == f"/v2/pods/{pod.id}"

    def environment(self, id: str) -> dict[str, str]:
        """What RunPod adds to the environment of a pod's first process."""
        return {"RUNPOD_POD_ID": id, "RUNPOD_API_KEY": self.market.instances[id].order.marks["key"]}

    def limits(self) -> list[RateLimit]:
        interval = 60.0 / PER_MINUTE
        self._minute = RateLimit(interval, slack=60.0 - interval)
        return [self._minute]

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v2/pods", self.pods),
            Route("/v2/pods", self.create, methods=["POST"]),
            Route("/v2/pods/{id}", self.pod),
            Route("/v2/pods/{id}", self.delete, methods=["DELETE"]),
            Route("/v2/pods/{id}/action", self.action, methods=["POST"]),
            Route("/v2/catalog/gpus", self.gpus),
        ]

    def error_response(self, reason: str, detail: str = "") -> Response:
        status, text = ERRORS[reason]
        return self.problem(status, detail if reason in ("invalid", "not-found") and detail else text)

    def problem(self, status: int, detail: str, errors: tuple[str, ...] = ()) -> Response:
        body: dict[str, Any] = {"title": HTTPStatus(status).phrase, "status": status, "detail": detail}
        if errors:
            body["errors"] = list(errors)
        after = {"Retry-After": "12"} if status == 429 else {}
        headers = {**self._limit_headers(), **after}
        return JSONResponse(body, status, headers, media_type="application/problem+json")

    async def gpus(self, request: Request) -> Response:
        """The catalog. Availability is shown for one number of GPUs and one kind of cloud."""
        params = request.query_params
        with_room = params.get("include") == "AVAILABILITY"
        if with_room != ("product" in params):
            return self.problem(400, "product is required with include=AVAILABILITY, and valid only with it")
        count = int(params.get("count", "1"))
        secure = params.get("cloud", "SECURE") == "SECURE"
        return self._response({"gpus": [self._gpu(gpu, count, with_room, secure) for gpu in GPUS]})

    async def pods(self, request: Request) -> Response:
        """All pods if they fit on one page, else pages."""
        pods = [self.shown(machine) for machine in self._listed()]
        params = request.query_params
        size = int(params.get("limit", self.page))
        start = int(params["cursor"]) if params.get("cursor", "").isdigit() else 0
        body: dict[str, Any] = {"pods": pods[start : start + size]}
        if len(pods) > size:
            more = start + size < len(pods)
            body["pagination"] = {"hasNextPage": more, "nextCursor": str(start + size) if more else None}
        return self._response(body)

    async def pod(self, request: Request) -> Response:
        return self._response(self.shown(self._find(request)))

    async def create(self, request: Request) -> Response:
        order = await read_json(request)
        if problems := tuple(_violations(order)):
            return self.problem(422, "Request validation failed.", problems)
        gpu, count = order["gpu"]["id"], order["gpu"].get("count", 1)
        type = type_name(gpu, count)
        if type not in self.market.types:
            return self.problem(400, f"gpu {gpu!r} cannot be had {count} at a time")
        if too_small(order["gpu"], self.market.types[type]):
            raise ApiRejection("stockout")
        places = order.get("dataCenterIds") or list(DATA_CENTERS)
        if unknown := [place for place in places if place not in DATA_CENTERS]:
            return self.problem(400, f"unknown data center {unknown[0]}")
        free = [place for place in places if self.market.free(type, place) > 0]
        env = order.get("env", {})
        machine = self.market.order(
            InstanceOrder(
                name=order["name"],
                type=type,
                region=(free or places)[0],
                public_keys=(env["PUBLIC_KEY"],) if "PUBLIC_KEY" in env else (),
                user_data=command_of(order),
                image=order.get("image", ""),
                marks={"order": order, "key": f"rpa_{secrets.token_hex(20)}"},
            ),
            id="".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(14)),
        )
        return self._response(self.shown(machine), 201)

    async def delete(self, request: Request) -> Response:
        self._find(request)
        self.market.delete(request.path_params["id"])
        return Response(status_code=204, headers=self._limit_headers())

    async def action(self, request: Request) -> Response:
        machine, order = self._find(request), await read_json(request)
        if set(order) != {"action"}:
            return self.problem(422, "Request validation failed.", tuple(_unknown(order, {"action"})))
        status = self.shown(machine)["status"]
        if order["action"] not in ACTIONS[status]:
            return self.problem(409, f"a pod that is {status} cannot {order['action']}")
        if order["action"] != "terminate":
            return self.problem(400, f"this simulator cannot {order['action']} a pod")
        self.market.delete(machine.id)
        return self._response({})

    def shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        """A pod as the API shows it."""
        order = machine.order.marks["order"]
        up, status = machine.phase == "up", self._status(machine)
        open = up and bool(machine.host) and "22/tcp" in order["ports"]
        type = self.market.types[machine.order.type]
        command = f"ssh root@{machine.host} -p {machine.port}"
        direct = {"host": machine.host, "port": machine.port, "username": "root", "command": command}
        port = {"private": 22, "public": machine.port, "type": "tcp", "ip": machine.host}
        return {
            "id": machine.id,
            "name": machine.order.name,
            "status": status,
            "actions": list(ACTIONS.get(status, ())),
            "image": order.get("image"),
            **{name: order[name] for name in ("args", "entrypoint", "cmd") if name in order},
            "ports": order.get("ports", []),
            "env": order.get("env", {}),
            "gpu": {
                "id": order["gpu"]["id"],
                "count": order["gpu"].get("count", 1),
                "vcpuCount": type.cpus,
                "memory": type.memory_gb,
            },
            "cloud": order.get("cloud", "SECURE"),
            "dataCenterId": machine.order.region,
            "ssh": {"proxy": None, "direct": direct if open else None},
            "cost": round(machine.usd_hour, 4) if machine.live else 0,
            "runtime": {"uptime": int(self.market.clock() - (machine.up or 0)), "ports": [port]} if open else None,
            "createdAt": iso_time(machine.ordered),
            "startedAt": iso_time(machine.up),
        }

    def _status(self, machine: SimulatedInstance) -> str:
        if machine.phase != "pending":
            return {"up": "RUNNING", "error": "ERROR"}.get(machine.phase, "TERMINATED")
        part = (self.market.clock() - machine.ordered) / max(machine.boot_seconds, 0.001)
        return "PROVISIONING" if part < STARTS else "STARTING" if part < RUNS else "RUNNING"

    def _listed(self) -> list[SimulatedInstance]:
        # A pod that is deleted is gone from lists at once.
        return [machine for machine in self.market.list_instances() if machine.phase != "stopping"]

    def _find(self, request: Request) -> SimulatedInstance:
        machine = self.market.find(request.path_params["id"])
        if machine.phase in ("stopping", "gone"):
            raise ApiRejection("not-found")
        return machine

    def _gpu(self, gpu: tuple[str, str, int, float, int, int], count: int, with_room: bool, secure: bool) -> Any:
        id, name, memory, price, _, _ = gpu
        shown: dict[str, Any] = {
            "id": id,
            "name": name,
            "memory": memory,
            "price": {"secure": price, "community": round(price * 0.8, 2)},
            "maxCount": {"secure": 8, "community": 4},
        }
        if with_room:
            type = type_name(id, count)
            known = type in self.market.types
            room = {place: self.market.free(type, place) if known else 0 for place in DATA_CENTERS}
            places = [{"id": id, "name": name, "availability": _level(room[id])} for id, name in DATA_CENTERS.items()]
            shown |= {"availability": _level(sum(room.values())), "dataCenters": places if secure else []}
        return shown

    def _response(self, body: Any, status: int = 200) -> Response:
        return JSONResponse(body, status, self._limit_headers())

    def _limit_headers(self) -> dict[str, str]:
        limit, now = getattr(self, "_minute", None), self.market.clock()
        ahead = max(0.0, limit._next - now) if limit else 0.0
        left = max(0, int(PER_MINUTE - ahead * PER_MINUTE / 60))
        return {
            "RateLimit": f'"minute";r={left};t={int(ahead) + 1}, "hour";r=7000;t=1800, "day";r=80000;t=40000',
            "RateLimit-Policy": f'"minute";q={PER_MINUTE};w=60, "hour";q=7200;w=3600, "day";q=86400;w=86400',
        }


def command_of(order: dict[str, Any]) -> str:
    """The container's command as a line of shell."""
    return shlex.join([*order.get("entrypoint", []), *order.get("cmd", [])]) or str(order.get("args", ""))


def too_small(gpu: dict[str, Any], type: MachineType) -> bool:
    """Whether no host of a type has the requested CPUs and memory."""
    count = max(1, type.gpus)
    cpus, memory_gb = int(gpu.get("minVcpuCountPerGpu", 1)), int(gpu.get("minRamPerGpu", 1))
    return cpus > type.cpus / count or memory_gb > type.memory_gb / count


def _violations(order: dict[str, Any]) -> Iterator[str]:
    """The errors in the form of an order, as RunPod words them."""
    yield from _unknown(order, FIELDS)
    if not isinstance(order.get("name"), str) or not order["name"]:
        yield "$: missing property 'name'"
    if "image" not in order and "templateId" not in order:
        yield "$: missing property 'image'"
    if ("gpu" in order) == ("cpu" in order):
        yield "$: exactly one of 'gpu' and 'cpu' is required"
    elif "gpu" not in order:
        yield "$.cpu: this simulator has pods with GPUs only"
    elif not isinstance(order["gpu"], dict) or not isinstance(order["gpu"].get("id"), str):
        yield "$.gpu: missing property 'id'"
    else:
        yield from _unknown(order["gpu"], GPU_FIELDS, "$.gpu")
        if not re.fullmatch(r"\d+\.\d+", order["gpu"].get("minCudaVersion", "12.0")):
            yield "$.gpu.minCudaVersion: does not match pattern '^\\d+\\.\\d+$'"
    env = order.get("env", {})
    if not isinstance(env, dict) or len(env) > 50 or not all(isinstance(value, str) for value in env.values()):
        yield "$.env: at most 50 strings"
    if not isinstance(order.get("args", ""), str):
        yield "$.args: got array, want string"
    for name in ("entrypoint", "cmd"):
        if not isinstance(order.get(name, []), list):
            yield f"$.{name}: got string, want array"
    if order.get("cloud", "SECURE") not in ("SECURE", "COMMUNITY"):
        yield "$.cloud: value must be one of 'SECURE', 'COMMUNITY'"
    if not isinstance(order.setdefault("ports", []), list):
        yield "$.ports: want array"


def _unknown(order: dict[str, Any], names: frozenset[str] | set[str], where: str = "$") -> Iterator[str]:
    for name in order:
        if name not in names:
            yield f"{where}: additional properties '{name}' not allowed"


def _level(room: int) -> str:
    return next((level for least, level in LEVELS if room >= least), "NONE")
