"""A simulated Google Compute Engine: bulkInsert with its operations, lists by zone and of all zones, spot, deadlines.

An order that is well formed is answered with an operation at once, which reports stock and quota when it ends.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.cloud.providers.api import Billing
from shoal_simulators import gcp_firewalls as firewalls
from shoal_simulators.gcp_addresses import add_address, check_address, get_address, remove_address, shown_address
from shoal_simulators.gcp_requests import (
    API,
    ERRORS,
    FAILURES,
    MANY,
    TYPES,
    check,
    filtered,
    page_of,
    read_insert,
    read_order,
    shown_type,
)
from shoal_simulators.instances import Profile, SimulatedInstance
from shoal_simulators.market import ApiRejection, Market
from shoal_simulators.server import RateLimit, Simulator, iso_time, read_json

POLLS_UNTIL_DONE = 2
"""Requests after which an operation is done."""


@dataclass
class Operation:
    """A long-running operation."""

    name: str
    type: str
    zone: str
    polls: int = 0
    group: str = ""
    errors: list[dict[str, str]] = field(default_factory=list)
    target: str = ""
    counts: Mapping[str, Any] | None = None
    change: Callable[[], None] | None = None
    """What happens when it ends without an error."""


class GoogleComputeSimulator(Simulator):
    """The part of the API that rents machines out."""

    kind = "gcp"
    base = "/compute/v1"
    profile = Profile(
        user="ubuntu",
        boot_s=40.0,
        address_s=5.0,
        stop_s=20.0,
        unique_names=True,
        billing=Billing(step=1, least=60, from_up=True),
    )
    types = TYPES
    creating = rf"POST {base}/projects/[^/]+/zones/[^/]+/instances(/bulkInsert)?"
    listing = rf"GET {base}/projects/[^/]+/(aggregated|zones/[^/]+)/instances"

    def __init__(self, market: Market) -> None:
        super().__init__(market)
        self._operations: dict[str, Operation] = {}
        self._requests: dict[str, Operation] = {}
        self.quota_limits: dict[str, float] = {"GPUS_ALL_REGIONS": MANY}
        """Limits by metric; tests lower them."""
        self.firewall_rights = {*firewalls.RIGHTS.values()}
        """What the key may do with rules; tests take some away."""
        self.firewall_errors: list[dict[str, str]] = []
        """With which errors their operations end; tests add some."""

    def routes(self) -> list[BaseRoute]:
        zone = f"{self.base}/projects/{{project}}/zones/{{zone}}"
        region = f"{self.base}/projects/{{project}}/regions/{{region}}"
        everywhere = f"{self.base}/projects/{{project}}/global"
        return [
            Route(f"{self.base}/projects/{{project}}", self._project),
            Route(f"{self.base}/projects/{{project}}/regions/{{region}}", self._region),
            Route(f"{everywhere}/firewalls", self._change_firewall, methods=["POST"]),
            Route(f"{everywhere}/firewalls/{{name}}", self._change_firewall, methods=["GET", "PATCH", "DELETE"]),
            Route(f"{everywhere}/operations/{{name}}", self._operation, methods=["GET"]),
            Route(f"{region}/subnetworks/{{name}}", self._subnetwork),
            Route(f"{self.base}/projects/{{project}}/aggregated/{{what}}", self._aggregated),
            Route(f"{region}/addresses", self._add_address, methods=["POST"]),
            Route(f"{region}/addresses/{{name}}", self._address, methods=["GET", "DELETE"]),
            Route(f"{region}/operations/{{name}}", self._operation, methods=["GET"]),
            Route(f"{zone}/instances", self._insert, methods=["POST"]),
            Route(f"{zone}/instances/{{name}}/{{verb}}", self._power, methods=["POST"]),
            Route(f"{zone}/instances/{{name}}", self._get, methods=["GET"]),
            Route(f"{zone}/instances/{{name}}", self._delete, methods=["DELETE"]),
            Route(f"{zone}/instances/bulkInsert", self._bulk_insert, methods=["POST"]),
            Route(f"{zone}/operations/{{name}}", self._operation, methods=["GET"]),
            Route(f"{zone}/operations/{{name}}/wait", self._operation, methods=["POST"]),
            Route(f"{zone}/{{what}}", self._zonal),
        ]

    def limits(self) -> list[RateLimit]:
        # 1500 a minute, with bursts of a few seconds.
        return [RateLimit(interval=60 / 1500, slack=6.0)]

    def error_response(self, reason: str, detail: str = "") -> Response:
        status, code, text = ERRORS[reason]
        message = text.format(detail)
        domain = "usageLimits" if status == 403 else "global"
        error = {"message": message, "domain": domain, "reason": code}
        return JSONResponse({"error": {"code": status, "message": message, "errors": [error]}}, status)

    def metadata(self, request: Request, machine: SimulatedInstance) -> Response | None:
        if request.headers.get("metadata-flavor") != "Google":
            return PlainTextResponse("Missing Metadata-Flavor:Google header.", 403)
        name = request.url.path.removeprefix("/computeMetadata/v1/instance/")
        values = {"preempted": "TRUE" if machine.preempted else "FALSE", "name": machine.order.name}
        return PlainTextResponse(values[name]) if name in values else None

    # The project and its quotas

    async def _project(self, request: Request) -> Response:
        return JSONResponse({"kind": "compute#project", "quotas": [self._quota("GPUS_ALL_REGIONS", "")]})

    async def _region(self, request: Request) -> Response:
        region = request.path_params["region"]
        if not any(place.startswith(f"{region}-") for type in self.types for place in type.places):
            raise ApiRejection("not-found", f"projects/{request.path_params['project']}/regions/{region}")
        quotas = [self._quota(metric, region) for metric in self.quota_limits if metric != "GPUS_ALL_REGIONS"]
        return JSONResponse({"kind": "compute#region", "name": region, "quotas": quotas})

    def _quota(self, metric: str, region: str) -> dict[str, Any]:
        """A quota, used by all machines with GPUs of the region."""
        live = [one.order for one in self.market.instances.values() if one.live and one.order.region.startswith(region)]
        usage = sum(self.market.types[order.type].gpus for order in live)
        return {"metric": metric, "limit": self.quota_limits.get(metric, MANY), "usage": usage}

    async def _change_firewall(self, request: Request) -> Response:
        rules, right = self.stored("firewalls"), firewalls.RIGHTS[request.method]
        if right not in self.firewall_rights:
            return firewalls.forbidden(right)
        if request.method == "GET":
            return JSONResponse(firewalls.find(request, rules))
        change = await firewalls.read_change(request, rules, self.market)
        operation = self._begin("insert" if right == "create" else request.method.lower(), "")
        operation.change, operation.errors = change, [*self.firewall_errors]
        return JSONResponse(self._shown_operation(operation))

    async def _subnetwork(self, request: Request) -> Response:
        """One that a test has stored: `PROJECT/REGION/NAME` -> the path of its network."""
        key = "/".join(request.path_params[name] for name in ("project", "region", "name"))
        if key not in self.stored("subnetworks"):
            raise ApiRejection("not-found", key)
        network = f"{firewalls.WWW}/{self.stored('subnetworks')[key]['network']}"
        return JSONResponse({"kind": "compute#subnetwork", "name": request.path_params["name"], "network": network})

    # Orders

    async def _bulk_insert(self, request: Request) -> Response:
        body, params = await read_json(request), request.path_params
        zone, asked = params["zone"], request.query_params.get("requestId", "")
        if asked and asked in self._requests:
            return JSONResponse(self._shown_operation(self._requests[asked]))
        check(asked, body)
        names = list(body["perInstanceProperties"])
        taken = {machine.order.name for machine in self.market.list_instances() if machine.order.zone == zone}
        for name in names:
            if name in taken:
                raise ApiRejection("duplicate-name", f"projects/{params['project']}/zones/{zone}/instances/{name}")
        made, failed, lost = self._order_all(names, zone, body["instanceProperties"])
        operation = self._begin("bulkInsert", zone)
        self._settle(operation, zone, made, failed, int(body.get("minCount") or len(names)))
        self._requests[asked or operation.name] = operation
        if lost:
            raise ApiRejection("error-after-create")
        return JSONResponse(self._shown_operation(operation))

    async def _insert(self, request: Request) -> Response:
        """One machine, which may have a reserved address."""
        body, zone = await read_json(request), request.path_params["zone"]
        asked = request.query_params.get("requestId", "")
        if asked and asked in self._requests:
            return JSONResponse(self._shown_operation(self._requests[asked]))
        properties, natted = read_insert(body, zone)
        if natted:
            check_address(natted, zone, self.stored("addresses"), self.market)
        made, failed, lost = self._order_all([body["name"]], zone, properties)
        operation = self._begin("insert", zone)
        operation.errors = [{"code": FAILURES[one][0], "message": FAILURES[one][1].format(zone)} for one in failed]
        self._requests[asked or operation.name] = operation
        if made and natted:
            self.market.attach(made[0], natted)
        if lost:
            raise ApiRejection("error-after-create")
        return JSONResponse(self._shown_operation(operation))

    async def _power(self, request: Request) -> Response:
        machine, verbs = self._find(request), {"start": self.market.start, "stop": self.market.stop}
        if request.path_params["verb"] not in verbs:
            raise ApiRejection("not-found", request.path_params["verb"])
        verbs[request.path_params["verb"]](machine.id)
        return JSONResponse(self._shown_operation(self._begin(request.path_params["verb"], machine.order.zone)))

    async def _add_address(self, request: Request) -> Response:
        await add_address(request, self.stored("addresses"), self.market)
        return JSONResponse(self._shown_operation(self._begin("insert", "")))

    async def _address(self, request: Request) -> Response:
        if request.method == "GET":
            return get_address(request, self.stored("addresses"), self.market)
        remove_address(request, self.stored("addresses"), self.market)
        return JSONResponse(self._shown_operation(self._begin("delete", "")))

    def _order_all(self, names: list[str], zone: str, asked: Mapping[str, Any]) -> tuple[list[str], list[str], bool]:
        """The machines made, the reasons for those that were not, and whether the response is an error all the same."""
        made, failed, lost = list[str](), list[str](), False
        for name in names:
            try:
                self.market.order(read_order(name, zone, asked), id=name)
            except ApiRejection as rejected:
                if rejected.reason == "error-after-create":
                    lost = True
                elif rejected.reason in FAILURES:
                    failed.append(rejected.reason)
                    continue
                else:
                    raise
            made.append(name)
            if asked.get("scheduling", {}).get("instanceTerminationAction") != "DELETE":
                self.market.instances[name].shown_until = math.inf  # preempted, it stays, powered off
        return made, failed, lost

    def _settle(self, operation: Operation, zone: str, made: list[str], failed: list[str], least: int) -> None:
        """Below the minimum, delete all; above it, report each failure by its own operation."""
        errors = [{"code": FAILURES[reason][0], "message": FAILURES[reason][1].format(zone)} for reason in failed]
        short = len(made) < least
        for name in made if short else []:
            self._hide(self.market.delete(name))
        if short:
            summary = f"Requested minimum count of {least} VMs could not be created."
            operation.errors = [{"code": "VM_MIN_COUNT_NOT_REACHED", "message": summary}, *errors[:1]]
        else:
            for error in errors:
                part = self._begin("insert", zone)
                part.group, part.errors, part.polls = operation.group, [error], POLLS_UNTIL_DONE
        operation.counts = {
            f"zones/{zone}": {
                "targetVmCount": len(made) + len(failed),
                "createdVmCount": len(made),
                "deletedVmCount": len(made) if short else 0,
                "failedToCreateVmCount": len(failed),
                "status": "DONE",
            }
        }

    async def _delete(self, request: Request) -> Response:
        machine = self._find(request)
        if machine.live:
            self.market.delete(machine.id)
        self._hide(machine)
        operation = self._begin("delete", machine.order.zone)
        operation.target = self._link(request, machine)
        return JSONResponse(self._shown_operation(operation))

    def _hide(self, machine: SimulatedInstance) -> None:
        if machine.shown_until == math.inf:
            machine.shown_until = 0.0

    # Operations

    def _begin(self, type: str, zone: str) -> Operation:
        name = f"operation-{uuid.uuid4()}"
        operation = Operation(name, type, zone, group=str(uuid.uuid4()))
        self._operations[name] = operation
        return operation

    async def _operation(self, request: Request) -> Response:
        operation = self._operations.get(request.path_params["name"])
        if operation is None:
            raise ApiRejection("not-found", request.path_params["name"])
        operation.polls += 1
        if operation.polls == POLLS_UNTIL_DONE and operation.change is not None and not operation.errors:
            operation.change()
        return JSONResponse(self._shown_operation(operation))

    def _shown_operation(self, operation: Operation) -> dict[str, Any]:
        done = operation.polls >= POLLS_UNTIL_DONE
        shown: dict[str, Any] = {
            "kind": "compute#operation",
            "name": operation.name,
            "operationType": operation.type,
            "operationGroupId": operation.group,
            "zone": f"{API}/projects/p/zones/{operation.zone}",
            "status": "DONE" if done else "RUNNING" if operation.polls else "PENDING",
        }
        if operation.target:
            shown["targetLink"] = operation.target
        if done:
            shown["endTime"] = iso_time(self.market.clock())
        if done and operation.counts is not None:
            shown["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": operation.counts}
        if done and operation.errors:
            shown["error"] = {"errors": operation.errors}
        return shown

    # Lists

    async def _aggregated(self, request: Request) -> Response:
        what = request.path_params["what"]
        rows = self._rows(request, what)
        shown, token = page_of(request, rows)
        places = sorted({f"zones/{place}" for type in self.types for place in type.places})
        empty = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "There are no results on this page."}}
        items: dict[str, Any] = {place: dict(empty) for place in places}
        for row in shown:
            place = "/".join((row.get("zone") or row["region"]).split("/")[-2:])
            items.setdefault(place, {}).pop("warning", None)
            items[place].setdefault(what, []).append(row)
        return JSONResponse({"kind": "compute#aggregatedList", "items": items} | token)

    async def _zonal(self, request: Request) -> Response:
        zone = request.path_params["zone"]
        rows = [row for row in self._rows(request, request.path_params["what"]) if row["zone"].endswith(f"/{zone}")]
        shown, token = page_of(request, rows)
        return JSONResponse({"kind": "compute#list", "items": shown} | token)

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._shown(request, self._find(request)))

    def _rows(self, request: Request, what: str) -> list[dict[str, Any]]:
        if what == "instances":
            rows = [self._shown(request, machine) for machine in self.market.list_instances()]
        elif what == "machineTypes":
            rows = [shown_type(type, zone) for type in self.types if "+" not in type.name for zone in type.places]
        elif what == "addresses":
            rows = [shown_address(address, self.market) for address in self.stored("addresses").values()]
        elif what == "operations":
            rows = [self._shown_operation(operation) for operation in self._operations.values()]
        else:
            raise ApiRejection("not-found", what)
        return filtered(rows, request.query_params.get("filter", ""))

    def _find(self, request: Request) -> SimulatedInstance:
        """A machine by its name, also while lists do not show it yet."""
        self.market.update()
        machine = self.market.instances.get(request.path_params["name"])
        zone = machine.order.zone if machine else ""
        gone = machine is not None and machine.phase == "gone" and not machine.shown_until
        if machine is None or gone or zone != request.path_params["zone"]:
            raise ApiRejection("not-found", request.path_params["name"])
        return machine

    def _link(self, request: Request, machine: SimulatedInstance) -> str:
        zone = f"{API}/projects/{request.path_params['project']}/zones/{machine.order.zone}"
        return f"{zone}/instances/{machine.order.name}"

    def _shown(self, request: Request, machine: SimulatedInstance) -> dict[str, Any]:
        order, properties = machine.order, machine.order.marks
        zone = self._link(request, machine).rpartition("/instances/")[0]
        interface: dict[str, Any] = {"name": "nic0", "network": f"{API}/projects/p/global/networks/default"}
        if machine.host:
            interface["networkIP"] = machine.private_address or machine.host
            access = properties.get("networkInterfaces", [{}])[0].get("accessConfigs", [])
            interface["accessConfigs"] = [
                {**config, "kind": "compute#accessConfig", "natIP": machine.host} for config in access
            ]
        shown = {
            "kind": "compute#instance",
            "name": order.name,
            "creationTimestamp": iso_time(machine.ordered),
            "lastStartTimestamp": iso_time(machine.started_at or machine.ordered),
            "status": self._status(machine),
            "zone": zone,
            "machineType": f"{zone}/machineTypes/{order.type.partition('+')[0]}",
            "networkInterfaces": [interface],
        }
        for echoed in ("labels", "scheduling", "metadata", "tags"):
            shown[echoed] = properties.get(echoed, {})
        if "guestAccelerators" in properties:
            shown["guestAccelerators"] = [
                {**gpu, "acceleratorType": f"{zone}/acceleratorTypes/{gpu['acceleratorType']}"}
                for gpu in properties["guestAccelerators"]
            ]
        return shown

    def _status(self, machine: SimulatedInstance) -> str:
        if machine.phase == "pending":
            half = machine.ordered + machine.boot_seconds / 2
            return "PROVISIONING" if self.market.clock() < half else "STAGING"
        if machine.phase in ("stopped", "error", "gone"):
            return "TERMINATED"
        return "STOPPING" if machine.phase == "stopping" else "RUNNING"  # also while it has its notice
