"""A simulated DigitalOcean: GPU droplets that plain lists leave out, sizes without regions, orders that fail later.

A list by `type=gpus` refuses a tag, and what is deleted is gone from lists at once. The create action tells whether an
accepted order succeeds. A droplet that dies is shown as off, and billed on.
"""

from __future__ import annotations

import secrets
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from shoal.cloud.providers.api import Billing
from shoal_simulators.instances import InstanceOrder, MachineType, Profile, SimulatedInstance, numeric_id
from shoal_simulators.market import SERVER_ERRORS, ApiRejection
from shoal_simulators.server import RateLimit, Simulator, iso_time, read_json

ERRORS = {
    "stockout": (422, "unprocessable_entity", "Size is not available in this region."),
    "quota": (422, "unprocessable_entity", "creating this droplet will exceed your droplet limit"),
    "balance": (403, "forbidden", "Your account is restricted. Add a payment method."),
    "auth": (401, "unauthorized", "Unable to authenticate you"),
    "rate": (429, "too_many_requests", "API rate limit exceeded."),
    **dict.fromkeys(SERVER_ERRORS, (500, "server_error", "Unexpected server-side error")),
    "invalid": (422, "unprocessable_entity", "{}"),
    "not-found": (404, "not_found", "The resource you requested could not be found."),
}
STATUSES = {"pending": "new", "up": "active", "error": "off", "stopping": "active", "gone": "archive"}
REQUIRED = ("name", "region", "size", "image")
IMAGES = ("gpu-h100x1-base", "gpu-h100x8-base", "ubuntu-24-04-x64")
REGIONS = ("nyc2", "tor1", "atl1", "mkc1")
MAX_PAGE = 200


def _types() -> tuple[MachineType, ...]:
    plenty = {"nyc2": 64, "tor1": 64}
    return (
        MachineType("s-2vcpu-4gb", "", 0, 0, 2, 4, 0.03571, places={"nyc2": 64, "tor1": 64}),
        MachineType("gpu-l40sx1-48gb", "nvidia_l40s", 1, 48, 8, 64, 1.57, places=plenty),
        MachineType("gpu-h100x1-80gb", "nvidia_h100", 1, 80, 20, 240, 4.41, places=plenty),
        MachineType("gpu-h100x8-640gb", "nvidia_h100", 8, 80, 160, 1920, 35.28, places={"tor1": 4}),
        MachineType("gpu-b300x1-288gb-spot", "nvidia_b300", 1, 288, 28, 448, 8.0, places={"mkc1": 8}),
        MachineType("gpu-h200x1-141gb", "nvidia_h200", 1, 141, 24, 240, 4.47, places={}),
        MachineType("gpu-mi325x1-256gb", "amd_mi325x", 1, 256, 20, 160, 3.80, places={"nyc2": 4}),
    )


class DigitalOceanSimulator(Simulator):
    """DigitalOcean's API in front of a Market."""

    kind = "digitalocean"
    base = "/v2"
    profile = Profile(boot_s=60.0, address_s=15.0, stop_s=10.0, billing=Billing(step=1, least=60))
    types = _types()
    creating = r"POST /v2/droplets"
    listing = r"GET /v2/droplets"
    droplet_limit = 100

    def limits(self) -> list[RateLimit]:
        return [RateLimit(60 / 250, slack=30.0), RateLimit(6.0, r"GET /v2/account/keys", slack=54.0)]

    def routes(self) -> list[BaseRoute]:
        return [
            Route("/v2/sizes", self.sizes),
            Route("/v2/account", self.account),
            Route("/v2/account/keys", self.keys),
            Route("/v2/account/keys", self.add_key, methods=["POST"]),
            Route("/v2/droplets", self.droplets),
            Route("/v2/droplets", self.create, methods=["POST"]),
            Route("/v2/droplets/{id:int}", self.delete, methods=["DELETE"]),
            Route("/v2/actions/{id:int}", self.action),
        ]

    def error_response(self, reason: str, detail: str = "") -> Response:
        status, code, text = ERRORS[reason]
        headers = {"retry-after": "3"} if status == 429 else None
        return JSONResponse({"id": code, "message": text.format(detail), "request_id": "1"}, status, headers)

    async def sizes(self, request: Request) -> Response:
        return self._page(request, "sizes", [self._size(type) for type in self.types])

    def _size(self, type: MachineType) -> dict[str, Any]:
        shown = {
            "slug": type.name,
            "vcpus": type.cpus,
            "memory": type.memory_gb * 1024,
            "price_hourly": type.usd_hour,
            "regions": [place for place in type.places if self.market.free(type.name, place) > 0],
            "available": True,
        }
        if type.gpus:
            vram = {"amount": type.gpu_memory_gb, "unit": "gib"}
            shown["gpu_info"] = {"count": type.gpus, "model": type.gpu, "vram": vram}
        return shown

    async def account(self, request: Request) -> Response:
        return JSONResponse({"account": {"droplet_limit": self.droplet_limit, "status": "active"}})

    async def keys(self, request: Request) -> Response:
        return self._page(request, "ssh_keys", list(self.stored("keys").values()))

    async def add_key(self, request: Request) -> Response:
        body = await read_json(request)
        material = " ".join(body["public_key"].split()[:2])
        if any(" ".join(key["public_key"].split()[:2]) == material for key in self.stored("keys").values()):
            raise ApiRejection("invalid", "SSH Key is already in use on your account")
        raw = secrets.token_hex(16)
        fingerprint = ":".join(raw[place : place + 2] for place in range(0, 32, 2))
        key = {"id": secrets.randbelow(10**6), "fingerprint": fingerprint, **body}
        self.stored("keys")[fingerprint] = key
        self.market.save()
        return JSONResponse({"ssh_key": key}, 201)

    async def create(self, request: Request) -> Response:
        asked = await read_json(request)
        if missing := [name for name in REQUIRED if not isinstance(asked.get(name), str)]:
            raise ApiRejection("invalid", f"{missing[0]} is missing")
        if asked["image"] not in IMAGES and not asked["image"].isdigit():
            raise ApiRejection("invalid", "You specified an invalid image for Droplet creation.")
        if asked["region"] not in REGIONS:
            raise ApiRejection("invalid", "Region is not valid")
        unknown = [key for key in asked.get("ssh_keys", []) if key not in self.stored("keys")]
        if unknown:
            raise ApiRejection("invalid", f"{unknown[0]} are invalid key identifiers for Droplet creation.")
        keys = tuple(self.stored("keys")[key]["public_key"] for key in asked.get("ssh_keys", []))
        order = InstanceOrder(
            asked["name"],
            asked["size"],
            asked["region"],
            public_keys=keys,
            user_data=asked.get("user_data", ""),
            marks={"tags": asked.get("tags", []), "image": asked["image"]},
            image=asked["image"],
        )
        machine = self.market.order(order, str(10**7 + secrets.randbelow(9 * 10**7)))
        action = str(1 + secrets.randbelow(10**9))
        self.stored("actions")[action] = {"id": int(action), "machine": machine.id, "looks": 0}
        self.market.save()
        links = {"actions": [{"id": int(action), "rel": "create", "href": f"/v2/actions/{action}"}]}
        return JSONResponse({"droplet": self._shown(machine), "links": links}, 202)

    async def action(self, request: Request) -> Response:
        action = self.stored("actions").get(str(request.path_params["id"]))
        if action is None:
            raise ApiRejection("not-found")
        action["looks"] += 1
        machine = self.market.instances[action["machine"]]
        lost = not machine.live
        status = "errored" if lost else "completed" if action["looks"] > 1 else "in-progress"
        return JSONResponse({"action": {"id": action["id"], "type": "create", "status": status}})

    async def droplets(self, request: Request) -> Response:
        kind, tag = request.query_params.get("type", "droplets"), request.query_params.get("tag_name")
        if kind == "gpus" and tag:
            raise ApiRejection("invalid", "type and tag_name cannot be combined")
        rows = [
            self._shown(machine)
            for machine in self.market.list_instances()
            if machine.phase != "stopping" and bool(self.market.types[machine.order.type].gpus) == (kind == "gpus")
        ]
        return self._page(request, "droplets", [row for row in rows if not tag or tag in row["tags"]])

    async def delete(self, request: Request) -> Response:
        ids = {numeric_id(id): id for id in self.market.instances}
        machine = self.market.find(ids.get(request.path_params["id"], ""))
        if machine.phase == "stopping":
            raise ApiRejection("invalid", "A destroy is already in progress for this droplet.")
        self.market.delete(machine.id)
        return Response(status_code=204)

    def _shown(self, machine: SimulatedInstance) -> dict[str, Any]:
        order = machine.order
        addresses = [(machine.private_address, "private"), (machine.host, "public")]
        return {
            "id": numeric_id(machine.id),
            "name": order.name,
            "status": STATUSES[machine.phase],
            "locked": machine.phase in ("pending", "stopping"),
            "size_slug": order.type,
            "size": {"slug": order.type, "price_hourly": machine.usd_hour},
            "region": {"slug": order.region},
            "image": {"slug": order.marks["image"]},
            "tags": order.marks["tags"],
            "networks": {"v4": [{"ip_address": one, "type": type} for one, type in addresses if one], "v6": []},
            "created_at": iso_time(machine.ordered),
        }

    def _page(self, request: Request, name: str, rows: list[dict[str, Any]]) -> Response:
        size, page = int(request.query_params.get("per_page", 20)), int(request.query_params.get("page", 1))
        if not 1 <= size <= MAX_PAGE:
            raise ApiRejection("invalid", "per_page")
        links = {}
        if page * size < len(rows):
            links = {"pages": {"next": f"{request.url.replace_query_params(per_page=size, page=page + 1)}"}}
        shown = rows[(page - 1) * size : page * size]
        return JSONResponse({name: shown, "links": links, "meta": {"total": len(rows)}})
