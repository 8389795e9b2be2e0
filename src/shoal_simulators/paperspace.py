"""A simulated Paperspace: its v1 API, with events for each order and startup scripts as resources.

An order is answered with a machine and an event that is `new`; the event reports missing capacity later.
Names need not be unique, there are no tags and no keys, and lists come in pages.
"""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.cloud.providers.api import Billing
from shoal.cloud.providers.prices import shipped
from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance
from shoal_simulators.market import SERVER_ERRORS, ApiRejection
from shoal_simulators.server import Simulator, iso_time, read_json

REGIONS = ("East Coast (NY2)", "West Coast (CA1)", "Europe (AMS1)")
DISKS = (50, 100, 250, 500, 1000, 2000)
PAGE = 120
ERRORS = {
    "auth": (401, "UNAUTHORIZED", "Not authenticated"),
    "rate": (429, "TOO_MANY_REQUESTS", "Too many requests"),
    "balance": (412, "PRECONDITION_FAILED", "A valid payment method is required."),
    **dict.fromkeys(SERVER_ERRORS, (500, "INTERNAL_SERVER_ERROR", "Internal server error")),
    "duplicate-name": (409, "CONFLICT", "There is one of that name."),
    "invalid": (400, "BAD_REQUEST", "Input validation failed"),
    "not-found": (404, "NOT_FOUND", "Not found"),
}
"""Reason -> status, code, message of an immediate error."""
FAILURES = {
    "stockout": "We are currently out of capacity for the selected VM type. Try again in a few minutes.",
    "quota": "You have reached your machine limit for this machine type.",
}
"""Reason -> message of a failed event."""
REQUIRED = {"name": str, "machineType": str, "templateId": str, "region": str, "diskSize": int}
STATES = {"pending": "provisioning", "up": "ready", "error": "off", "stopping": "stopping", "gone": "off"}
TEMPLATES = {
    "t0nspur5": ("C",),
    "twnlo3zj": ("V100", "A4000", "A5000", "A6000", "P4000", "RTX4000"),
    "tqqsxr6b": ("A100-80G",),
    "tvimtol9": ("A100-80Gx8",),
    "tilqt47t": ("H100",),
    "t7vp562h": ("H100x8",),
}
"""A system -> the machine types that it is made for."""


def _types() -> tuple[MachineType, ...]:
    places = dict.fromkeys(REGIONS, 200)
    of_table = (MachineType.of(row, places=places) for row in shipped() if row.provider == "paperspace")
    return (MachineType("C5", cpus=4, memory_gb=8, usd_hour=0.08, places=places), *of_table)


class PaperspaceSimulator(Simulator):
    """Paperspace's API in front of a Market."""

    kind = "paperspace"
    base = "/v1"
    profile = Profile(
        user="paperspace",
        boot_s=120.0,
        address_s=20.0,
        stop_s=20.0,
        billing=Billing(step=3600),
    )
    types = _types()
    creating = r"POST /v1/machines"
    listing = r"GET /v1/machines"

    def routes(self) -> list[BaseRoute]:
        base = self.base
        return [
            Route(f"{base}/machines", self.machines),
            Route(f"{base}/machines", self.create, methods=["POST"]),
            Route(f"{base}/machines/{{id}}", self.machine),
            Route(f"{base}/machines/{{id}}", self.delete, methods=["DELETE"]),
            Route(f"{base}/machine-events", self.events),
            Route(f"{base}/machine-events/{{id}}", self.event),
            Route(f"{base}/machine-availability", self.availability),
            Route(f"{base}/os-templates", self.templates),
            Route(f"{base}/startup-scripts", self.scripts),
            Route(f"{base}/startup-scripts", self.add_script, methods=["POST"]),
            Route(f"{base}/startup-scripts/{{id}}", self.script),
            Route(f"{base}/startup-scripts/{{id}}", self.remove_script, methods=["DELETE"]),
        ]

    def error_response(self, reason: str, detail: str = "") -> Response:
        status, code, message = ERRORS[reason]
        body: dict[str, Any] = {"code": code, "message": message}
        if reason == "invalid" and detail:
            body["issues"] = [{"message": detail}]
        return JSONResponse(body, status)

    # Machines

    async def create(self, request: Request) -> Response:
        order = await read_json(request)
        if problem := self._problem(order):
            raise ApiRejection("invalid", problem)
        script = self.stored("scripts").get(order.get("startupScriptId", ""))
        instance = InstanceOrder(
            name=order["name"],
            type=order["machineType"],
            region=order["region"],
            user_data=script["script"] if script else "",
            image="Ubuntu 22.04",
            marks={"publicIpType": order.get("publicIpType", "none"), "networkId": order.get("networkId")},
            # switched off then; this simulator ends its bill, too
            lifetime=3600.0 * order["autoShutdownTimeout"] if order.get("autoShutdownEnabled") else 0.0,
        )
        id, error = f"ps{uuid.uuid4().hex[:12]}", ""
        try:
            machine = self.market.order(instance, id)
        except ApiRejection as rejected:
            if rejected.reason not in FAILURES:
                raise
            # Paperspace answers with a machine that never exists.
            error = FAILURES[rejected.reason]
            machine = SimulatedInstance(id, instance, self.market.price(instance.type), self.market.clock(), 0.0)
        finally:
            if script and id in self.market.instances:
                script["assignedMachineIds"].append(id)
        return JSONResponse({"data": self.shown(machine), "event": self._add_event("create", id, error)})

    async def delete(self, request: Request) -> Response:
        machine = self.market.delete(request.path_params["id"])
        return JSONResponse({"data": self.shown(machine), "event": self._add_event("deactivate", machine.id)})

    async def machine(self, request: Request) -> Response:
        return JSONResponse(self.shown(self.market.find(request.path_params["id"])))

    async def machines(self, request: Request) -> Response:
        shown = [self.shown(machine) for machine in self.market.list_instances()]
        return self._page(request, [row for row in shown if _matches(request, row, "name", "region", "machineType")])

    def _problem(self, order: dict[str, Any]) -> str:
        """The error in an order, or nothing."""
        for name, kind in REQUIRED.items():
            if not isinstance(order.get(name), kind):
                return f"{name}: Required"
        if order["region"] not in REGIONS or order["machineType"] not in self.market.types:
            return "No such region or machine type"
        if order["diskSize"] not in DISKS:
            return f"diskSize: one of {DISKS}"
        suits = TEMPLATES.get(order["templateId"])
        if suits is None or not (order["machineType"] in suits or order["machineType"].rstrip("0123456789") in suits):
            return "The template is not available for this machine type"
        if order.get("startupScriptId", "") not in ("", *self.stored("scripts")):
            raise ApiRejection("not-found")
        return ""

    def shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        """A machine as the API shows it."""
        order, type = machine.order, self.market.types[machine.order.type]
        address = machine.host if order.marks["publicIpType"] != "none" else ""
        return {
            "id": machine.id,
            "name": order.name,
            "state": STATES[machine.phase],
            "machineType": order.type,
            "region": order.region,
            "publicIp": address or None,
            "publicIpType": order.marks["publicIpType"],
            "networkId": order.marks["networkId"],
            "cpus": type.cpus,
            "ram": type.memory_gb << 30,
            "accelerators": [{"name": type.gpu, "count": type.gpus, "memory": type.gpu_memory_gb << 30}]
            if type.gpus
            else None,
            "usageRate": machine.usd_hour,
            "dtCreated": iso_time(machine.ordered),
            "dtDeleted": iso_time(machine.ended) if machine.phase == "gone" else None,
        }

    # Events

    async def events(self, request: Request) -> Response:
        self.market.update()
        events = [event for event in self.stored("events").values() if _matches(request, event, "machineId")]
        shown = [self._shown_event(event) for event in events]
        return self._page(request, shown[::-1] if request.query_params.get("order") == "desc" else shown)

    async def event(self, request: Request) -> Response:
        event = self.stored("events").get(request.path_params["id"])
        if event is None:
            raise ApiRejection("not-found")
        event["looks"] += 1
        return JSONResponse(self._shown_event(event))

    def _add_event(self, name: str, machine: str, error: str = "") -> dict[str, Any]:
        """Add an event of a machine. Requests for it advance it."""
        id, now = f"ev{uuid.uuid4().hex[:12]}", iso_time(self.market.clock())
        event = {"id": id, "name": name, "machineId": machine, "fails": error, "looks": 0, "dtCreated": now}
        self.stored("events")[id] = event
        return self._shown_event(event)

    def _shown_event(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event as the API shows it: new, then in progress, then done or failed."""
        machine, begun = self.market.instances.get(event["machineId"]), event["looks"] > 0
        done = machine is not None and (machine.up if event["name"] == "create" else machine.ended) is not None
        state = "done" if done else "new" if not begun else "error" if event["fails"] else "in progress"
        return {
            "id": event["id"],
            "name": event["name"],
            "machineId": event["machineId"],
            "state": state,
            "error": event["fails"] if state == "error" else None,
            "dtCreated": event["dtCreated"],
        }

    # Templates and scripts

    async def availability(self, request: Request) -> Response:
        name, region = (request.query_params.get(field, "") for field in ("machineType", "region"))
        if name not in self.market.types:
            raise ApiRejection("invalid", "machineType: unknown")
        return JSONResponse({"available": self.market.free(name, region) > 0})

    async def templates(self, request: Request) -> Response:
        rows = [
            {
                "id": id,
                "name": f"ML-in-a-Box for {', '.join(suits)}",
                "operatingSystemLabel": "Ubuntu 22.04",
                "availableMachineTypes": [{"machineTypeLabel": type, "isAvailable": True} for type in suits],
            }
            for id, suits in TEMPLATES.items()
        ]
        return self._page(request, rows)

    async def scripts(self, request: Request) -> Response:
        return self._page(request, [_without_text(script) for script in self.stored("scripts").values()])

    async def script(self, request: Request) -> Response:
        return JSONResponse(_without_text(self._script(request)))

    async def add_script(self, request: Request) -> Response:
        body = await read_json(request)
        if not all(isinstance(body.get(field), str) and body[field] for field in ("name", "script")):
            raise ApiRejection("invalid", "name, script: Required")
        id = f"ss{uuid.uuid4().hex[:12]}"
        self.stored("scripts")[id] = {
            "id": id,
            "name": body["name"],
            "script": body["script"],
            "isRunOnce": body.get("isRunOnce", False),
            "assignedMachineIds": [],
            "dtCreated": iso_time(self.market.clock()),
        }
        self.market.save()
        return JSONResponse(_without_text(self.stored("scripts")[id]))

    async def remove_script(self, request: Request) -> Response:
        script = self._script(request)
        del self.stored("scripts")[script["id"]]
        self.market.save()
        return JSONResponse(_without_text(script))

    def _script(self, request: Request) -> dict[str, Any]:
        if request.path_params["id"] not in self.stored("scripts"):
            raise ApiRejection("not-found")
        return self.stored("scripts")[request.path_params["id"]]

    def _page(self, request: Request, items: list[dict[str, Any]]) -> Response:
        try:
            size, start = int(request.query_params.get("limit", "10")), int(request.query_params.get("after", "0"))
        except ValueError:
            raise ApiRejection("invalid", "limit, after: no number") from None
        if not 1 <= size <= PAGE:
            raise ApiRejection("invalid", f"limit: 1 to {PAGE}")
        more = start + size < len(items)
        page = {"items": items[start : start + size], "hasMore": more}
        return JSONResponse(page | ({"nextPage": str(start + size)} if more else {}))


def _without_text(script: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in script.items() if name != "script"}


def _matches(request: Request, row: dict[str, Any], *fields: str) -> bool:
    return all(request.query_params.get(field, row[field]) == row[field] for field in fields)
