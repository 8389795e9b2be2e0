"""A simulated Nebius: projects of one region each, orders that fail after they were accepted, unique names.

A new machine is STOPPED and reconciling. No hardware and no quota are told by the operation, and leave a STOPPED
machine without a bill. A preempted spot machine is told to shut down. A minute later it is STOPPED, until it is
deleted. One that powers itself off is started again unless its recovery policy is FAIL. Addresses have a suffix.
"""

from __future__ import annotations

import base64
import json
import math
import secrets
from collections.abc import Mapping
from typing import Any

from nebius.base.protos.dynamic import REGISTRY
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.cloud.providers.api import Billing, Market
from shoal.cloud.providers.prices import shipped
from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance, read_cloud_config
from shoal_simulators.market import ApiRejection
from shoal_simulators.server import Simulator, iso_time, read_json

TENANT = "tenant-e00sim"
SERVICE_ACCOUNT = "serviceaccount-e00sim"
"""The one whose keys are exchanged for tokens."""
ERROR_TYPE = "nebius.common.v1.ServiceError"
USER_DATA_BYTES = 32768
MAX_PAGE = 10
BIRTH_S = 2.0
"""How long a new machine is STOPPED and reconciling."""
REGIONS = {"gpu-b200-sxm": "us-central1", "gpu-b300-sxm": "uk-south1"}
"""Where a platform is, if not in eu-north1 and eu-west1."""
SPOT_SHARE = 0.55
STATES = {"up": "RUNNING", "stopping": "DELETING", "stopped": "STOPPED", "error": "ERROR", "gone": "DELETING"}
ERRORS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "stockout": (8, "VM schedule timeout", {"notEnoughResources": {"violations": [{"message": "no host has room"}]}}),
    "quota": (
        8,
        "Quota limit exceeded",
        {"quotaFailure": {"violations": [{"quota": "compute.instance.gpu", "limit": "0", "message": "0 left"}]}},
    ),
    "rate": (8, "Too many requests", {"tooManyRequests": {"violation": "requests"}}),
    "balance": (9, "The project is suspended: unpaid", {}),
    "auth": (16, "The token is invalid", {}),
    "invalid": (3, "Invalid request: {}", {"badRequest": {"violations": [{"field": "spec", "message": "DETAIL"}]}}),
    "not-found": (5, "{} not found", {"resourceNotFound": {"resourceId": "DETAIL"}}),
    "duplicate-name": (6, "The name {} is taken", {"resourceAlreadyExists": {"resourceId": "DETAIL"}}),
}
SERVER_ERROR = (13, "Internal error", {"internalError": {"requestId": "1"}})


def _types() -> tuple[MachineType, ...]:
    types: list[MachineType] = []
    for row in shipped():
        if row.provider == "nebius":
            there = REGIONS.get(row.type.partition(" ")[0])
            places = {there: 8} if there else {"eu-north1": 16, "eu-west1": 16}
            types.append(MachineType.of(row, spot_usd_hour=round((row.usd_hour or 1) * SPOT_SHARE, 4), places=places))
    return tuple(types)


class NebiusMessages:
    """Implements `grpc_front.Messages` by Nebius's library."""

    def to_json(self, method: str, request: bytes) -> str:
        return str(self._type(method, "input_type").FromString(request).to_json())

    def from_json(self, method: str, answer: str) -> bytes:
        message = self._type(method, "output_type").from_json(answer, ignore_unknown_fields=True)
        return bytes(message.SerializeToString())

    def status(self, error: dict[str, Any]) -> bytes:
        packed = REGISTRY.message_class("google.rpc.Status").from_json(json.dumps(rpc_status(error)))
        return bytes(packed.SerializeToString())

    def _type(self, method: str, which: str) -> Any:
        service, _, name = method.partition("/")
        try:
            return REGISTRY.message_class(
                getattr(REGISTRY.service_descriptor(service).methods_by_name[name], which).full_name
            )
        except KeyError:
            raise LookupError(method) from None


def rpc_status(error: dict[str, Any]) -> dict[str, Any]:
    """An error as an operation shows it."""
    details = [{"@type": f"type.googleapis.com/{ERROR_TYPE}", **one} for one in error["errors"]]
    return {"code": error["code"], "message": error["message"], "details": details}


class NebiusSimulator(Simulator):
    """Nebius's API in front of a Market."""

    kind = "nebius"
    grpc = NebiusMessages()
    profile = Profile(
        user="ubuntu",
        boot_s=60.0,
        address_s=10.0,
        stop_s=5.0,
        notice_s=60.0,
        notice_shuts_down=True,
        unique_names=True,
        billing=Billing(step=1),
    )
    types = _types()
    creating = r"POST /nebius\.compute\.v1\.InstanceService/Create"
    listing = r"POST /nebius\.compute\.v1\.InstanceService/List"
    limit = 64
    """Every quota, in every region."""

    def routes(self) -> list[BaseRoute]:
        calls = {
            "iam.v1.TokenExchangeService/Exchange": self.exchange,
            "iam.v1.TenantService/List": self.tenants,
            "iam.v1.ProjectService/List": self.list_projects,
            "iam.v1.ProjectService/Get": self.project,
            "vpc.v1.SubnetService/List": self.subnets,
            "compute.v1.PlatformService/List": self.platforms,
            "capacity.v1.ResourceAdviceService/List": self.advice,
            "quotas.v1.QuotaAllowanceService/List": self.quotas,
            "billing.v1alpha1.CalculatorService/Estimate": self.estimate,
            "compute.v1.InstanceService/Create": self.create,
            "compute.v1.InstanceService/List": self.list_machines,
            "compute.v1.InstanceService/Delete": self.delete,
            "common.v1.OperationService/Get": self.operation,
        }
        return [Route(f"/nebius.{path}", endpoint, methods=["POST"]) for path, endpoint in calls.items()]

    def error_response(self, reason: str, detail: str = "") -> Response:
        return JSONResponse(_error(reason, detail), 400)

    def authorised(self, request: Request, key: str) -> bool:
        """A key that was exchanged for a token is as good as a token."""
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        exchanging = request.url.path.endswith("TokenExchangeService/Exchange")
        return exchanging or given in self.stored("tokens") or super().authorised(request, key)

    async def exchange(self, request: Request) -> Response:
        payload = (await read_json(request)).get("subjectToken", "").split(".")
        claims = json.loads(base64.urlsafe_b64decode(payload[1] + "==")) if len(payload) == 3 else {}
        if claims.get("iss") != SERVICE_ACCOUNT:
            raise ApiRejection("auth")
        token = secrets.token_hex(16)
        self.stored("tokens")[token] = {}
        return JSONResponse({"accessToken": token, "tokenType": "Bearer", "expiresIn": "43200"})

    async def tenants(self, request: Request) -> Response:
        return JSONResponse({"items": [{"metadata": {"id": TENANT, "name": "sim"}}]})

    async def list_projects(self, request: Request) -> Response:
        items = [{"metadata": {"id": "project-e00other", "name": "a-project", "parentId": TENANT}}]
        items[0] |= {"status": {"region": "eu-north1"}}
        return JSONResponse({"items": [*items, *map(_project, self._regions())]})

    async def project(self, request: Request) -> Response:
        return JSONResponse(_project(self._region_of((await read_json(request)).get("id", ""))))

    async def subnets(self, request: Request) -> Response:
        project = (await read_json(request))["parentId"]
        region = self._region_of(project)
        metadata = {"id": f"vpcsubnet-{region}", "name": "default-subnet-1", "parentId": project}
        return JSONResponse({"items": [{"metadata": metadata}]})

    async def platforms(self, request: Request) -> Response:
        region = self._region_of((await read_json(request))["parentId"])
        platforms: dict[str, list[MachineType]] = {}
        for type in self.types:
            if region in type.places:
                platforms.setdefault(type.name.partition(" ")[0], []).append(type)
        return JSONResponse({"items": [_platform(name, types) for name, types in platforms.items()]})

    async def advice(self, request: Request) -> Response:
        if (await read_json(request))["parentId"] != TENANT:
            raise ApiRejection("invalid", "parent_id must be a tenant")
        items = []
        for type in self.types:
            for region in type.places:
                free, (platform, _, preset) = self.market.free(type.name, region), type.name.partition(" ")
                level = f"AVAILABILITY_LEVEL_{'HIGH' if free > 4 else 'LOW'}"
                stock = {"available": free, "availabilityLevel": level, "dataState": "DATA_STATE_FRESH"}
                machine = {"platform": platform, "preset": {"name": preset}}
                spec = {"region": region, "fabric": "fabric-1", "computeInstance": machine}
                items.append({"spec": spec, "status": {"onDemand": stock, "preemptible": stock}})
        return JSONResponse({"items": items})

    async def quotas(self, request: Request) -> Response:
        names = {_quota(type.name) for type in self.types if type.gpus}
        names |= {"compute.instance.count", "compute.instance.preemptible.count", "vpc.ipv4-address.public.count"}
        live = [machine.order for machine in self.market.instances.values() if machine.live]
        items = []
        for region in self._regions():
            there = [order for order in live if order.region == region]
            for name in sorted(names):
                gpus = [self.market.types[order.type].gpus for order in there if _quota(order.type) == name]
                used = sum(gpus) if ".gpu." in name else len(there)
                spec = {"region": region, "limit": str(self.limit)}
                items.append({"metadata": {"name": name}, "spec": spec, "status": {"usage": str(used)}})
        return JSONResponse({"items": items})

    async def estimate(self, request: Request) -> Response:
        spec = (await read_json(request))["resourceSpec"]["computeInstanceSpec"]["spec"]
        price = self.market.price(_type(spec), _market(spec))
        return JSONResponse({"hourlyCost": {"general": {"total": {"cost": str(price)}}}})

    async def create(self, request: Request) -> Response:
        key = request.headers.get("x-idempotency-key", "")
        if (known := self.stored("keys").get(key)) is not None:
            return JSONResponse(self._operation(known["operation"]))
        asked = await read_json(request)
        metadata, spec = asked.get("metadata", {}), asked.get("spec", {})
        order = self._order(metadata, spec)
        id = f"computeinstance-e00{secrets.token_hex(8)}"
        lost, failure = False, ""
        if any(one["metadata"]["name"] == order.name for one in self.stored("failed").values()):
            raise ApiRejection("duplicate-name", order.name)
        try:
            self.market.order(order, id)
        except ApiRejection as rejected:
            if rejected.reason in ("stockout", "quota"):
                failure = rejected.reason
                created = {"createdAt": iso_time(self.market.clock())}
                self.stored("failed")[id] = {"metadata": {**metadata, **created, "id": id}, "spec": spec}
            elif rejected.reason != "error-after-create":
                raise
            lost = rejected.reason == "error-after-create"
        operation = f"computeoperation-e00{secrets.token_hex(8)}"
        self.stored("operations")[operation] = {"machine": id, "failure": failure, "looks": 0}
        self.stored("keys")[key] = {"operation": operation}
        self.market.save()
        if lost:
            raise ApiRejection("error-after-create")
        return JSONResponse(self._operation(operation))

    async def operation(self, request: Request) -> Response:
        id = (await read_json(request)).get("id", "")
        if id not in self.stored("operations"):
            raise ApiRejection("not-found", id)
        self.stored("operations")[id]["looks"] += 1
        return JSONResponse(self._operation(id))

    async def list_machines(self, request: Request) -> Response:
        asked = await read_json(request)
        region, size = self._region_of(asked["parentId"]), min(MAX_PAGE, int(asked.get("pageSize", MAX_PAGE)))
        start = int(asked.get("pageToken") or 0)
        self._refresh()
        rows = [self._shown(one) for one in self.market.list_instances() if one.order.region == region]
        left = [one for one in self.stored("failed").values() if one["metadata"]["parentId"] == asked["parentId"]]
        rows += [{**one, "status": {"state": "STOPPED"}} for one in left]
        more = {"nextPageToken": str(start + size)} if start + size < len(rows) else {}
        return JSONResponse({"items": rows[start : start + size], **more})

    async def delete(self, request: Request) -> Response:
        id = (await read_json(request)).get("id", "")
        if self.stored("failed").pop(id, None) is None:
            machine = self.market.find(id)
            if machine.live:
                self.market.delete(id)
            machine.preempted, machine.shown_until = False, 0.0
        self.market.save()
        return JSONResponse({"id": f"computeoperation-e00{secrets.token_hex(8)}", "resourceId": id})

    def _order(self, metadata: Mapping[str, Any], spec: Mapping[str, Any]) -> InstanceOrder:
        region = self._region_of(metadata.get("parentId", ""))
        user_data, interfaces = spec.get("cloudInitUserData", ""), spec.get("networkInterfaces", [])
        disk = spec.get("bootDisk", {}).get("managedDisk", {}).get("spec", {})
        if not metadata.get("name") or not interfaces or not disk.get("sizeGibibytes"):
            raise ApiRejection("invalid", "a name, a network interface and a boot disk are needed")
        if interfaces[0].get("subnetId") != f"vpcsubnet-{region}":
            raise ApiRejection("invalid", "the subnet is not in this project")
        if len(user_data.encode()) > USER_DATA_BYTES or not user_data.startswith("#cloud-config\n"):
            raise ApiRejection("invalid", "cloud_init_user_data")
        keys, script = read_cloud_config(user_data)
        return InstanceOrder(
            metadata["name"],
            _type(spec),
            region,
            market=_market(spec),
            public_keys=keys,
            user_data=script,
            marks={"metadata": dict(metadata), "spec": dict(spec)},
            image=disk.get("sourceImageFamily", {}).get("imageFamily", ""),
        )

    def _refresh(self) -> None:
        """Apply what Nebius does with machines that go down."""
        self.market.update()
        for machine in self.market.instances.values():
            policy = machine.order.marks["spec"].get("recoveryPolicy", "RECOVER")
            if machine.preempted and machine.order.market == "spot" and machine.stopping and not machine.shown_until:
                machine.shown_until = math.inf
            elif machine.phase == "error" and policy == "FAIL":
                machine.phase, machine.stopped_at, machine.host = "stopped", self.market.clock(), ""
            elif machine.phase == "error":
                self.market.start(machine.id)
        self.market.save()

    def _operation(self, id: str) -> dict[str, Any]:
        """Done at the first look."""
        operation = self.stored("operations")[id]
        shown = {"id": id, "resourceId": operation["machine"]}
        if operation["looks"]:
            shown["status"] = rpc_status(_error(operation["failure"])) if operation["failure"] else {"code": 0}
        return shown

    def _shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        order, age = machine.order, self.market.clock() - machine.ordered
        preempted = machine.preempted and order.market == "spot" and not machine.live
        state = "STOPPED" if preempted else STATES.get(machine.phase, "STARTING")
        if machine.phase == "up" and machine.preempted:
            state = "STOPPING"
        status: dict[str, Any] = {"state": state}
        if machine.phase == "pending" and age < BIRTH_S:
            status = {"state": "STOPPED", "reconciling": True}
        if machine.host and not preempted:
            addresses = {"publicIpAddress": machine.host, "ipAddress": machine.private_address}
            interface = {name: {"address": f"{address}/32"} for name, address in addresses.items() if address}
            status["networkInterfaces"] = [{"name": "eth0", **interface}]
        metadata = {**order.marks["metadata"], "id": machine.id, "createdAt": iso_time(machine.ordered)}
        return {"metadata": metadata, "spec": order.marks["spec"], "status": status}

    def _regions(self) -> list[str]:
        return sorted({region for type in self.types for region in type.places})

    def _region_of(self, project: str) -> str:
        region = project.removeprefix("project-e00-")
        if region not in self._regions():
            raise ApiRejection("not-found", project)
        return region


def _error(reason: str, detail: str = "") -> dict[str, Any]:
    code, message, details = ERRORS.get(reason, SERVER_ERROR)
    filled = json.loads(json.dumps(details).replace("DETAIL", json.dumps(detail)[1:-1]))
    name = next((name[0].upper() + name[1:] for name in details), "Unknown")
    errors = [{"service": "compute", "code": name, **filled}] if details else []
    return {"code": code, "message": message.format(detail), "errors": errors}


def _project(region: str) -> dict[str, Any]:
    metadata = {"id": f"project-e00-{region}", "name": f"default-project-{region}", "parentId": TENANT}
    return {"metadata": metadata, "status": {"region": region}}


def _quota(type: str) -> str:
    return f"compute.instance.gpu.{type.split('-')[1]}"


def _platform(name: str, types: list[MachineType]) -> dict[str, Any]:
    presets = [
        {
            "name": type.name.partition(" ")[2],
            "resources": {"vcpuCount": type.cpus, "memoryGibibytes": type.memory_gb, "gpuCount": type.gpus},
        }
        for type in types
    ]
    spec: dict[str, Any] = {"presets": presets}
    if types[0].gpus:
        spec |= {"gpuMemoryGigabytes": types[0].gpu_memory_gb, "gpuCountQuotaType": _quota(types[0].name)}
    return {"metadata": {"name": name}, "spec": spec, "status": {"allowedForPreemptibles": bool(types[0].gpus)}}


def _type(spec: Mapping[str, Any]) -> str:
    resources = spec.get("resources", {})
    return f"{resources.get('platform', '')} {resources.get('preset', '')}"


def _market(spec: Mapping[str, Any]) -> Market:
    return "spot" if "preemptible" in spec else "on-demand"
