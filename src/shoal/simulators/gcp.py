"""A simulated Google Compute Engine: bulkInsert with its operations, lists by zone and of all zones, spot, deadlines.

An order that is well formed is answered with an operation at once. Whether there was stock or quota is told by the
operation when it ends. The same `requestId` brings the same operation.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.providers.rental import Billing
from shoal.simulators.gcp_rules import API, check, filtered, number, page_of, read_order, shown_type, stamp
from shoal.simulators.gcp_types import TYPES
from shoal.simulators.machines import Machine, Profile
from shoal.simulators.market import Market, Refused
from shoal.simulators.server import Cloud, Limit, read_json

LOOKS = 2
"""An operation has ended when it was looked at so often."""

ERRORS = {
    "auth": (401, "authError", "Request had invalid authentication credentials."),
    "rate": (403, "rateLimitExceeded", "Quota exceeded for quota group 'default' and limit 'Queries per minute'."),
    "balance": (403, "BILLING_DISABLED", "This API method requires billing to be enabled."),
    "error-before-create": (503, "backendError", "Backend Error"),
    "error-after-create": (503, "backendError", "Backend Error"),
    "list-fails": (503, "backendError", "Backend Error"),
    "duplicate-name": (409, "alreadyExists", "The resource '{}' already exists"),
    "invalid": (400, "invalid", "{}"),
    "not-found": (404, "notFound", "The resource '{}' was not found"),
}
"""Why -> status, reason, words of an answer that refuses at once."""

FAILURES = {
    "stockout": (
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "The zone '{}' does not have enough resources available to fulfill the request. Try a different zone, or try"
        " again later.",
    ),
    "quota": ("QUOTA_EXCEEDED", "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."),
}
"""Why -> code, words of an operation that fails."""


@dataclass
class Operation:
    """Something that Google does for us, which takes a while."""

    name: str
    type: str
    zone: str
    began: float
    looks: int = 0
    group: str = ""
    errors: list[dict[str, str]] = field(default_factory=list)
    target: str = ""
    counts: Mapping[str, Any] | None = None


class GoogleCompute(Cloud):
    """The part of the API that rents machines out."""

    kind = "gcp"
    base = "/compute/v1"
    profile = Profile(
        user="ubuntu",
        boot_seconds=40.0,
        address_seconds=5.0,
        stop_seconds=20.0,
        notice_seconds=30.0,
        unique_names=True,
        billing=Billing(step=1, least=60, from_up=True),
    )
    types = TYPES
    creating = rf"POST {base}/projects/[^/]+/zones/[^/]+/instances/bulkInsert"
    listing = rf"GET {base}/projects/[^/]+/(aggregated|zones/[^/]+)/instances"

    def __init__(self, market: Market) -> None:
        super().__init__(market)
        self._operations: dict[str, Operation] = {}
        self._requests: dict[str, Operation] = {}

    def routes(self) -> list[BaseRoute]:
        zone = f"{self.base}/projects/{{project}}/zones/{{zone}}"
        return [
            Route(f"{self.base}/projects/{{project}}/aggregated/{{what}}", self._aggregated),
            Route(f"{zone}/instances/{{name}}", self._get, methods=["GET"]),
            Route(f"{zone}/instances/{{name}}", self._delete, methods=["DELETE"]),
            Route(f"{zone}/instances/bulkInsert", self._bulk_insert, methods=["POST"]),
            Route(f"{zone}/operations/{{name}}", self._operation, methods=["GET"]),
            Route(f"{zone}/operations/{{name}}/wait", self._operation, methods=["POST"]),
            Route(f"{zone}/{{what}}", self._zonal),
        ]

    def limits(self) -> list[Limit]:
        # 1500 a minute; who asks much faster for a few seconds is stopped.
        return [Limit(interval=60 / 1500, slack=6.0)]

    def refuse(self, why: str, detail: str = "") -> Response:
        status, reason, words = ERRORS[why]
        message = words.format(detail)
        domain = "usageLimits" if status == 403 else "global"
        error = {"message": message, "domain": domain, "reason": reason}
        return JSONResponse({"error": {"code": status, "message": message, "errors": [error]}}, status)

    def metadata(self, request: Request, machine: Machine) -> Response | None:
        if request.headers.get("metadata-flavor") != "Google":
            return PlainTextResponse("Missing Metadata-Flavor:Google header.", 403)
        name = request.url.path.removeprefix("/computeMetadata/v1/instance/")
        told = {"preempted": "TRUE" if machine.preempted else "FALSE", "name": machine.wanted.name}
        return PlainTextResponse(told[name]) if name in told else None

    # Orders

    async def _bulk_insert(self, request: Request) -> Response:
        body, params = await read_json(request), request.path_params
        zone, asked = params["zone"], request.query_params.get("requestId", "")
        if asked and asked in self._requests:
            return self._told(self._requests[asked])
        check(asked, body)
        names = list(body["perInstanceProperties"])
        taken = {one.wanted.name for one in self.market.listed() if one.wanted.zone == zone}
        for name in names:
            if name in taken:
                raise Refused("duplicate-name", f"projects/{params['project']}/zones/{zone}/instances/{name}")
        made, failed, lost = self._order_all(names, zone, body["instanceProperties"])
        operation = self._begin("bulkInsert", zone)
        self._settle(operation, zone, made, failed, int(body.get("minCount") or len(names)))
        self._requests[asked or operation.name] = operation
        if lost:
            raise Refused("error-after-create")
        return self._told(operation)

    def _order_all(self, names: list[str], zone: str, asked: Mapping[str, Any]) -> tuple[list[str], list[str], bool]:
        """What was made, why the others were not, and whether the answer is to be an error all the same."""
        made: list[str] = []
        failed: list[str] = []
        lost = False
        for name in names:
            try:
                self.market.order(read_order(name, zone, asked), id=name)
            except Refused as refused:
                if refused.why == "error-after-create":
                    lost = True
                elif refused.why in FAILURES:
                    failed.append(refused.why)
                    continue
                else:
                    raise
            made.append(name)
            if asked.get("scheduling", {}).get("instanceTerminationAction") != "DELETE":
                self.market.machines[name].shown_until = math.inf  # taken away, it stays there without power
        return made, failed, lost

    def _settle(self, operation: Operation, zone: str, made: list[str], failed: list[str], least: int) -> None:
        """Too few, and those that were made go again; enough, and operations of their own tell of the others."""
        errors = [{"code": FAILURES[why][0], "message": FAILURES[why][1].format(zone)} for why in failed]
        short = len(made) < least
        for name in made if short else []:
            self._gone(self.market.delete(name))
        if short:
            summary = f"Requested minimum count of {least} VMs could not be created."
            operation.errors = [{"code": "VM_MIN_COUNT_NOT_REACHED", "message": summary}, *errors[:1]]
        else:
            for error in errors:
                part = self._begin("insert", zone)
                part.group, part.errors, part.looks = operation.group, [error], LOOKS
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
        machine = self._found(request)
        if machine.live:
            self.market.delete(machine.id)
        self._gone(machine)
        operation = self._begin("delete", machine.wanted.zone)
        operation.target = self._link(request, machine)
        return self._told(operation)

    def _gone(self, machine: Machine) -> None:
        if machine.shown_until == math.inf:
            machine.shown_until = 0.0

    # Operations

    def _begin(self, type: str, zone: str) -> Operation:
        name = f"operation-{uuid.uuid4()}"
        operation = Operation(name, type, zone, self.market.clock(), group=str(uuid.uuid4()))
        self._operations[name] = operation
        return operation

    async def _operation(self, request: Request) -> Response:
        found = self._operations.get(request.path_params["name"])
        if found is None:
            raise Refused("not-found", request.path_params["name"])
        found.looks += 1
        return self._told(found)

    def _told(self, operation: Operation) -> Response:
        return JSONResponse(self._shown_operation(operation))

    def _shown_operation(self, operation: Operation) -> dict[str, Any]:
        done = operation.looks >= LOOKS
        shown: dict[str, Any] = {
            "kind": "compute#operation",
            "id": number(operation.name),
            "name": operation.name,
            "operationType": operation.type,
            "operationGroupId": operation.group,
            "zone": f"{API}/projects/p/zones/{operation.zone}",
            "status": "DONE" if done else "RUNNING" if operation.looks else "PENDING",
            "progress": 100 if done else 0,
            "insertTime": stamp(operation.began),
        }
        if operation.target:
            shown["targetLink"] = operation.target
        if done:
            shown["endTime"] = stamp(self.market.clock())
        if done and operation.counts is not None:
            shown["instancesBulkInsertOperationMetadata"] = {"perLocationStatus": operation.counts}
        if done and operation.errors:
            shown |= {"error": {"errors": operation.errors}, "httpErrorStatusCode": 503}
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
            place = f"zones/{row['zone'].rpartition('/')[2]}"
            items.setdefault(place, {}).pop("warning", None)
            items[place].setdefault(what, []).append(row)
        return JSONResponse({"kind": "compute#aggregatedList", "items": items} | token)

    async def _zonal(self, request: Request) -> Response:
        zone = request.path_params["zone"]
        rows = [row for row in self._rows(request, request.path_params["what"]) if row["zone"].endswith(f"/{zone}")]
        shown, token = page_of(request, rows)
        return JSONResponse({"kind": "compute#list", "items": shown} | token)

    async def _get(self, request: Request) -> Response:
        return JSONResponse(self._shown(request, self._found(request)))

    def _rows(self, request: Request, what: str) -> list[dict[str, Any]]:
        if what == "instances":
            rows = [self._shown(request, one) for one in self.market.listed()]
        elif what == "machineTypes":
            rows = [shown_type(one, zone) for one in self.types if "+" not in one.name for zone in one.places]
        elif what == "operations":
            rows = [self._shown_operation(one) for one in self._operations.values()]
        else:
            raise Refused("not-found", what)
        return filtered(rows, request.query_params.get("filter", ""))

    def _found(self, request: Request) -> Machine:
        """A machine by its name: it is there even while lists do not show it yet."""
        self.market.look()
        found = self.market.machines.get(request.path_params["name"])
        zone = found.wanted.zone if found else ""
        if found is None or zone != request.path_params["zone"] or (found.phase == "gone" and not found.shown_until):
            raise Refused("not-found", request.path_params["name"])
        return found

    def _link(self, request: Request, machine: Machine) -> str:
        zone = f"{API}/projects/{request.path_params['project']}/zones/{machine.wanted.zone}"
        return f"{zone}/instances/{machine.wanted.name}"

    def _shown(self, request: Request, machine: Machine) -> dict[str, Any]:
        wanted, asked = machine.wanted, machine.wanted.marks
        link = self._link(request, machine)
        zone = link.rpartition("/instances/")[0]
        interface: dict[str, Any] = {"name": "nic0", "network": f"{API}/projects/p/global/networks/default"}
        if machine.host:
            interface["networkIP"] = machine.private_address or machine.host
            access = asked.get("networkInterfaces", [{}])[0].get("accessConfigs", [])
            interface["accessConfigs"] = [
                {**one, "kind": "compute#accessConfig", "natIP": machine.host} for one in access
            ]
        shown = {
            "kind": "compute#instance",
            "id": number(machine.id),
            "name": wanted.name,
            "creationTimestamp": stamp(machine.ordered),
            "status": self._status(machine),
            "zone": zone,
            "machineType": f"{zone}/machineTypes/{wanted.type.partition('+')[0]}",
            "networkInterfaces": [interface],
            "selfLink": link,
        }
        for echoed in ("labels", "scheduling", "metadata", "tags"):
            shown[echoed] = asked.get(echoed, {})
        if "guestAccelerators" in asked:
            shown["guestAccelerators"] = [
                {**one, "acceleratorType": f"{zone}/acceleratorTypes/{one['acceleratorType']}"}
                for one in asked["guestAccelerators"]
            ]
        return shown

    def _status(self, machine: Machine) -> str:
        if machine.phase == "pending":
            half = machine.ordered + machine.boot_seconds / 2
            return "PROVISIONING" if self.market.clock() < half else "STAGING"
        if machine.phase in ("error", "gone"):
            return "TERMINATED"
        return "STOPPING" if machine.phase == "stopping" or machine.takes_away is not None else "RUNNING"
