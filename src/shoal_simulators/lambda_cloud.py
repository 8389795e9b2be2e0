"""A simulated Lambda Cloud: its v1 API, with its documented or observed delays, limits and error bodies.

An address comes before `active`; `terminating` is followed by 404; creation times are not shown; names need not
be unique; listed capacity is no promise. In us-south-1 instances have no private address.
"""

from __future__ import annotations

import base64
import re
import secrets
import uuid
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.cloud.providers.api import Billing
from shoal.hosts.key_pair import make_key_pair
from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance
from shoal_simulators.market import ApiRejection
from shoal_simulators.server import RateLimit, Simulator, read_json

REGIONS = {
    "us-west-1": "California, USA",
    "us-east-1": "Virginia, USA",
    "us-south-1": "Texas, USA",
    "europe-central-1": "Germany",
}
LAUNCH = "instance-operations/launch"
ERRORS = {
    "stockout": (400, f"{LAUNCH}/insufficient-capacity", "Not enough capacity to fulfill launch request."),
    "quota": (400, "global/quota-exceeded", "Quota exceeded."),
    "balance": (403, "global/account-inactive", "Your account is inactive."),
    "auth": (401, "global/invalid-api-key", "API key was invalid, expired, or deleted."),
    "error-before-create": (503, "provider/internal-unavailable", "The provider is unavailable. Try again shortly."),
    "error-after-create": (500, "global/internal-error", "An unexpected error occurred."),
    "list-fails": (500, "global/internal-error", "An unexpected error occurred."),
    "wrong-region": (400, f"{LAUNCH}/file-system-in-wrong-region", "A filesystem is in another region."),
    "duplicate-name": (400, "global/duplicate", "There is one of that name."),
    "invalid": (400, "global/invalid-parameters", "Invalid request data."),
    "not-found": (404, "global/object-does-not-exist", "Specified object does not exist."),
}  # fmt: skip
STATUSES = {"pending": "booting", "up": "active", "error": "unhealthy", "stopping": "terminating", "gone": "terminated"}
FAMILIES = ("lambda-stack-24-04", "lambda-stack-22-04", "gpu-base-24-04", "debian-12")
"""Lambda's, and one that it does not have, for clusters of Debian 12 with packages."""
CALLS = r"(GET|POST|DELETE|PUT) .*"
USER_DATA_BYTES = 1 << 20


def _types() -> tuple[MachineType, ...]:
    plenty = {"us-west-1": 64, "us-east-1": 64, "us-south-1": 64, "europe-central-1": 64}
    scarce = {"us-west-1": 8, "us-east-1": 8}
    return (
        MachineType("cpu_4x_general", "", 0, 0, 4, 16, 0.20, places=plenty),
        MachineType("gpu_1x_a10", "A10", 1, 24, 30, 200, 1.29, places=plenty),
        MachineType("gpu_1x_a100_sxm4", "A100", 1, 40, 30, 200, 1.99, places=plenty),
        MachineType("gpu_1x_gh200", "GH200", 1, 96, 64, 432, 2.29, arch="arm64", places=scarce),
        MachineType("gpu_1x_h100_sxm5", "H100", 1, 80, 26, 225, 4.29, places=plenty),
        MachineType("gpu_8x_a100_80gb_sxm4", "A100", 8, 80, 240, 1800, 22.32, places=scarce),
        MachineType("gpu_8x_h100_sxm5", "H100", 8, 80, 208, 1800, 31.92, places=scarce),
        MachineType("gpu_8x_b200_sxm6", "B200", 8, 180, 208, 2900, 53.52, places={"us-east-1": 0}),
    )


class LambdaSimulator(Simulator):
    """Lambda's API in front of a Market."""

    kind = "lambda"
    base = "/api/v1"
    profile = Profile(
        user="ubuntu",
        boot_s=150.0,
        address_s=25.0,
        stop_s=30.0,
        billing=Billing(step=60, from_up=True),
    )
    types = _types()
    creating = r"POST /api/v1/instance-operations/launch"
    listing = r"GET /api/v1/instances"

    def limits(self) -> list[RateLimit]:
        # About one request a second; the slack absorbs network jitter.
        return [RateLimit(12.0, self.creating, slack=0.5), RateLimit(1.0, CALLS, slack=1.0)]

    def routes(self) -> list[BaseRoute]:
        base = self.base
        return [
            Route(f"{base}/instance-types", self.instance_types),
            Route(f"{base}/instances", self.instances),
            Route(f"{base}/instances/{{id}}", self.instance),
            Route(f"{base}/instances/{{id}}", self.rename, methods=["POST"]),
            Route(f"{base}/instance-operations/launch", self.launch, methods=["POST"]),
            Route(f"{base}/instance-operations/terminate", self.terminate, methods=["POST"]),
            Route(f"{base}/instance-operations/restart", self.restart, methods=["POST"]),
            Route(f"{base}/ssh-keys", self.keys),
            Route(f"{base}/ssh-keys", self.add_key, methods=["POST"]),
            Route(f"{base}/ssh-keys/{{id}}", self.remove_key, methods=["DELETE"]),
            Route(f"{base}/images", self.images),
            Route(f"{base}/file-systems", self.filesystems),
            Route(f"{base}/filesystems", self.add_filesystem, methods=["POST"]),
            Route(f"{base}/firewall-rulesets", self.rulesets),
            Route(f"{base}/firewall-rulesets", self.add_ruleset, methods=["POST"]),
        ]

    def authorised(self, request: Request, key: str) -> bool:
        given = request.headers.get("authorization", "")
        if given.startswith("Basic "):  # `curl -u KEY:` works, too
            try:
                user = base64.b64decode(given.removeprefix("Basic ")).decode().partition(":")[0]
            except ValueError:
                return False
            return bool(user) and (not key or secrets.compare_digest(user.encode(), key.encode()))
        return super().authorised(request, key)

    def error_response(self, reason: str, detail: str = "") -> Response:
        if reason == "rate":  # Lambda documents no body for it
            return PlainTextResponse("Too Many Requests", 429)
        status, code, message = ERRORS[reason]
        text = detail if reason == "invalid" and detail else message
        return JSONResponse({"error": {"code": code, "message": text, "suggestion": ""}}, status)

    async def instance_types(self, request: Request) -> Response:
        data = {}
        for type in self.types:
            free = [place for place in type.places if self.market.free(type.name, place) > 0]
            regions = [{"name": place, "description": REGIONS[place]} for place in free]
            data[type.name] = {"instance_type": shown_type(type), "regions_with_capacity_available": regions}
        return JSONResponse({"data": data})

    async def instances(self, request: Request) -> Response:
        return JSONResponse({"data": [self.shown(machine) for machine in self.market.list_instances()]})

    async def instance(self, request: Request) -> Response:
        return JSONResponse({"data": self.shown(self.market.find(request.path_params["id"]))})

    async def rename(self, request: Request) -> Response:
        machine, name = self.market.find(request.path_params["id"]), (await read_json(request)).get("name")
        if not isinstance(name, str) or len(name) > 64:
            raise ApiRejection("invalid", "name: at most 64 characters")
        machine.name = name
        self.market.save()
        return JSONResponse({"data": self.shown(machine)})

    async def launch(self, request: Request) -> Response:
        order = await read_json(request)
        problem, known = self._problem(order)
        if problem:
            raise ApiRejection("invalid", problem)
        instance = InstanceOrder(
            name=order.get("name", ""),
            type=order["instance_type_name"],
            region=order["region_name"],
            public_keys=(known["public_key"],),
            user_data=order.get("user_data", ""),
            image=self._family(order.get("image", {})),
            marks={
                "tags": order.get("tags", []),
                "hostname": order.get("hostname"),
                "file_system_names": order.get("file_system_names", []),
                "file_system_mounts": order.get("file_system_mounts", []),
                "firewall_rulesets": order.get("firewall_rulesets", []),
                "ssh_key_names": order["ssh_key_names"],
                "jupyter_token": secrets.token_hex(16),
            },
        )
        return JSONResponse({"data": {"instance_ids": [self.market.order(instance, uuid.uuid4().hex).id]}})

    async def terminate(self, request: Request) -> Response:
        ids = (await read_json(request)).get("instance_ids")
        if not isinstance(ids, list) or not ids:
            raise ApiRejection("invalid", "instance_ids: a list of ids")
        for id in ids:  # all or none
            self.market.find(id)
        done = [self.market.delete(id) for id in ids]
        return JSONResponse({"data": {"terminated_instances": [self.shown(machine) for machine in done]}})

    async def restart(self, request: Request) -> Response:
        machines = [self.market.find(id) for id in (await read_json(request)).get("instance_ids", [])]
        return JSONResponse({"data": {"restarted_instances": [self.shown(machine) for machine in machines]}})

    async def keys(self, request: Request) -> Response:
        return JSONResponse({"data": list(self.stored("keys").values())})

    async def add_key(self, request: Request) -> Response:
        body = await read_json(request)
        name = body.get("name")
        if not isinstance(name, str) or not 0 < len(name) <= 64:
            raise ApiRejection("invalid", "name: 1 to 64 characters")
        if name in {key["name"] for key in self.stored("keys").values()}:
            raise ApiRejection("duplicate-name")
        key, extra = {"id": uuid.uuid4().hex, "name": name}, {}
        if public := body.get("public_key"):
            key["public_key"] = public
        else:
            pair = make_key_pair()
            key["public_key"], extra["private_key"] = pair.public, pair.private
        self.stored("keys")[key["id"]] = key
        self.market.save()
        return JSONResponse({"data": {**key, **extra}})

    async def remove_key(self, request: Request) -> Response:
        if self.stored("keys").pop(request.path_params["id"], None) is None:
            raise ApiRejection("not-found")
        self.market.save()
        return JSONResponse({"data": {}})

    async def images(self, request: Request) -> Response:
        shown = [
            {
                "id": image_id(family, region),
                "name": family,
                "family": family,
                "architecture": "x86_64",
                "region": {"name": region, "description": description},
            }
            for family in FAMILIES
            for region, description in REGIONS.items()
        ]
        return JSONResponse({"data": shown})

    async def filesystems(self, request: Request) -> Response:
        return JSONResponse({"data": list(self.stored("filesystems").values())})

    async def add_filesystem(self, request: Request) -> Response:
        body = await read_json(request)
        name, region = body.get("name"), body.get("region")
        if not isinstance(name, str) or region not in REGIONS:
            raise ApiRejection("invalid", "name and region are required")
        if name in {one["name"] for one in self.stored("filesystems").values()}:
            raise ApiRejection("duplicate-name")
        place = {"name": region, "description": REGIONS[region]}
        made: dict[str, Any] = {
            "id": uuid.uuid4().hex,
            "name": name,
            "mount_point": f"/lambda/nfs/{name}",
            "region": place,
        }
        self.stored("filesystems")[made["id"]] = made
        self.market.save()
        return JSONResponse({"data": made})

    async def rulesets(self, request: Request) -> Response:
        return JSONResponse({"data": list(self.stored("rulesets").values())})

    async def add_ruleset(self, request: Request) -> Response:
        body = await read_json(request)
        if not isinstance(body.get("name"), str) or body.get("region") not in REGIONS or not body.get("rules"):
            raise ApiRejection("invalid", "name, region and rules are required")
        if body["name"] in {one["name"] for one in self.stored("rulesets").values()}:
            raise ApiRejection("duplicate-name")
        ruleset = {**body, "id": uuid.uuid4().hex}
        self.stored("rulesets")[ruleset["id"]] = ruleset
        self.market.save()
        return JSONResponse({"data": ruleset})

    def _elsewhere(self, region: str) -> list[dict[str, Any]]:
        """The filesystems of other regions."""
        return [one for one in self.stored("filesystems").values() if one["region"]["name"] != region]

    def _family(self, image: dict[str, str]) -> str:
        """The family of the image in an order; without one the default depends on the region."""
        by_id = {image_id(family, region): family for family in FAMILIES for region in REGIONS}
        return by_id.get(image["id"], "") if "id" in image else image.get("family", FAMILIES[1])

    def _problem(self, order: dict[str, Any]) -> tuple[str, dict[str, str]]:
        """The error in an order, and its SSH key."""
        keys = {key["name"]: key for key in self.stored("keys").values()}
        named = order.get("ssh_key_names")
        if missing := [name for name in ("region_name", "instance_type_name", "ssh_key_names") if name not in order]:
            return f"{missing[0]}: Missing data for required field.", {}
        if order.get("quantity", 1) != 1:
            return "Requested too many instances.", {}
        if order["region_name"] not in REGIONS:
            return "region_name: unknown region", {}
        if not isinstance(named, list) or len(named) != 1:
            return "ssh_key_names: exactly one", {}
        if named[0] not in keys or order["instance_type_name"] not in self.market.types:
            raise ApiRejection("not-found")
        if self._family(order.get("image", {})) not in FAMILIES:
            raise ApiRejection("not-found")
        filesystems = set(order.get("file_system_names", []))
        if any(one["name"] in filesystems for one in self._elsewhere(order["region_name"])):
            raise ApiRejection("wrong-region")
        if filesystems - {one["name"] for one in self.stored("filesystems").values()}:
            raise ApiRejection("not-found")
        rulesets = self.stored("rulesets")
        for one in order.get("firewall_rulesets", []):
            if rulesets.get(one.get("id"), {}).get("region") != order["region_name"]:
                raise ApiRejection("not-found")
        return next((text for text, wrong in _rules(order) if wrong), ""), keys[named[0]]

    def shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        """An instance as the API shows it; without an address the field is missing."""
        order = machine.order
        going = machine.phase in ("stopping", "gone")
        action: dict[str, Any] = {"available": machine.phase in ("up", "error")}
        if not action["available"]:
            action["reason_code"] = "vm-is-terminating" if going else "vm-has-not-launched"
        actions = dict.fromkeys(("migrate", "rebuild", "restart", "cold_reboot"), action)
        shown: dict[str, Any] = {
            "id": machine.id,
            "name": machine.name or order.name,
            "status": "preempted" if machine.preempted and going else STATUSES[machine.phase],
            "ssh_key_names": order.marks["ssh_key_names"],
            "region": {"name": order.region, "description": REGIONS[order.region]},
            "instance_type": shown_type(self.market.types[order.type], machine.usd_hour),
            "hostname": order.marks["hostname"] or machine.host.replace(".", "-"),
            "actions": {**actions, "terminate": {"available": not going}},
            "tags": order.marks["tags"],
        }
        if machine.host:
            shown["ip"] = machine.host
        if machine.private_address and order.region != "us-south-1":
            shown["private_ip"] = machine.private_address
        if machine.phase == "up":
            token = order.marks["jupyter_token"]
            shown |= {"jupyter_token": token, "jupyter_url": f"https://jupyter.invalid/?token={token}"}
        return shown


def image_id(family: str, region: str) -> str:
    return uuid.uuid5(uuid.NAMESPACE_DNS, f"{family}.{region}").hex


def shown_type(type: MachineType, usd_hour: float | None = None) -> dict[str, Any]:
    gpu = f"{type.gpu} ({type.gpu_memory_gb} GB)" if type.gpus else "N/A"
    return {
        "name": type.name,
        "description": f"{type.gpus}x {gpu}" if type.gpus else f"{type.cpus}x CPU General",
        "gpu_description": gpu,
        "price_cents_per_hour": round((type.usd_hour if usd_hour is None else usd_hour) * 100),
        "architecture": type.arch,
        "specs": {"vcpus": type.cpus, "memory_gib": type.memory_gb, "storage_gib": 512, "gpus": type.gpus},
    }


def _rules(order: dict[str, Any]) -> list[tuple[str, bool]]:
    """Lambda's message for each field, and whether the order violates it."""
    name, hostname, tags = order.get("name", ""), order.get("hostname", "a"), order.get("tags", [])
    return [
        ("name: Longer than maximum length 64.", len(name) > 64),
        ("hostname: String does not match expected pattern.", not re.fullmatch(r"[a-z0-9][0-9a-z-]{0,62}", hostname)),
        ("user_data: Longer than maximum length.", len(order.get("user_data", "").encode()) > USER_DATA_BYTES),
        ("tags: Invalid key.", any(not re.fullmatch(r"[a-z][a-z0-9:-]{1,54}", tag.get("key", "")) for tag in tags)),
        ("tags: Invalid value.", any(len(tag.get("value", "")) > 128 for tag in tags)),
    ]
