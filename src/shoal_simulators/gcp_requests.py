"""Requests and machine types of the simulated Google Compute Engine: checks, orders, filters, pages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from shoal.cloud.providers.google_orders import NOT_ON_DEMAND
from shoal.cloud.providers.prices import Prices, shipped
from shoal_simulators.instances import InstanceOrder, MachineType
from shoal_simulators.market import SERVER_ERRORS, ApiRejection

API = "https://compute.googleapis.com/compute/v1"
ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-east1-b", "us-west1-b", "europe-west4-b")
REGION = "us-central1"
MANY = 1000
GPUS = {
    ("L4", 24): "nvidia-l4",
    ("A100", 40): "nvidia-tesla-a100",
    ("A100", 80): "nvidia-a100-80gb",
    ("H100", 80): "nvidia-h100-80gb",
    ("H200", 141): "nvidia-h200-141gb",
    ("B200", 180): "nvidia-b200",
}
"""A GPU and its memory -> Google's name of it."""
NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
ERRORS = {
    "auth": (401, "authError", "Request had invalid authentication credentials."),
    "rate": (403, "rateLimitExceeded", "Quota exceeded for quota group 'default' and limit 'Queries per minute'."),
    "balance": (403, "BILLING_DISABLED", "This API method requires billing to be enabled."),
    **dict.fromkeys(SERVER_ERRORS, (503, "backendError", "Backend Error")),
    "duplicate-name": (409, "alreadyExists", "The resource '{}' already exists"),
    "invalid": (400, "invalid", "{}"),
    "not-found": (404, "notFound", "The resource '{}' was not found"),
}
"""Reason -> status, code, message of an immediate error."""

FAILURES = {
    "stockout": (
        "ZONE_RESOURCE_POOL_EXHAUSTED",
        "The zone '{}' does not have enough resources available to fulfill the request. Try a different zone, or try"
        " again later.",
    ),
    "quota": ("QUOTA_EXCEEDED", "Quota 'GPUS_ALL_REGIONS' exceeded.  Limit: 0.0 globally."),
}
"""Reason -> code, message of a failed operation."""


def check(request_id: str, body: Mapping[str, Any]) -> None:
    """Reject what Google rejects at once."""
    if request_id and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", request_id):
        raise ApiRejection("invalid", f"Invalid value for field 'requestId': '{request_id}'.")
    named, properties = body.get("perInstanceProperties"), body.get("instanceProperties")
    if not isinstance(named, dict) or not isinstance(properties, dict) or "namePattern" in body:
        raise ApiRejection("invalid", "Exactly one of namePattern and perInstanceProperties, and instanceProperties.")
    if int(body.get("count", 0)) != len(named):
        raise ApiRejection(
            "invalid", "Invalid value for field 'resource.count': it is not that of perInstanceProperties."
        )
    for name, own in named.items():
        if not re.fullmatch(NAME, name):
            raise ApiRejection("invalid", f"Invalid value for field 'resource.perInstanceProperties': '{name}'.")
        if set(own) - {"hostname"}:
            raise ApiRejection("invalid", f"Invalid JSON payload received. Unknown name {sorted(own)[0]!r}.")
    scheduling = properties.get("scheduling", {})
    _, plus, _ = type_of(properties).partition("+")
    gpus = plus or type_of(properties).startswith(("a2-", "a3-", "a4", "g2-", "g4-"))
    if gpus and scheduling.get("onHostMaintenance") != "TERMINATE":
        raise ApiRejection("invalid", "Instances with guest accelerators do not support live migration.")
    if scheduling.get("provisioningModel") == "SPOT" and scheduling.get("automaticRestart") is not False:
        raise ApiRejection("invalid", "Scheduling must have automaticRestart be false when the VM is a Spot VM.")
    if scheduling.get("provisioningModel") == "STANDARD" and type_of(properties).startswith(NOT_ON_DEMAND):
        raise ApiRejection(
            "invalid", f"Machine type {type_of(properties)} is not available with STANDARD provisioning."
        )
    if "maxRunDuration" in scheduling and "instanceTerminationAction" not in scheduling:
        raise ApiRejection("invalid", "Instance termination action must be specified with max run duration.")


def read_insert(body: Mapping[str, Any], zone: str) -> tuple[dict[str, Any], str]:
    """The properties of one machine as bulkInsert has them, and its reserved address. It names types by their paths."""
    if not re.fullmatch(NAME, str(body.get("name", ""))):
        raise ApiRejection("invalid", f"Invalid value for field 'resource.name': '{body.get('name')}'.")
    paths = [body.get("machineType", ""), *(gpu["acceleratorType"] for gpu in body.get("guestAccelerators", []))]
    paths += [disk["initializeParams"]["diskType"] for disk in body.get("disks", [])]
    for path in paths:
        if not re.fullmatch(rf"zones/{zone}/(machine|accelerator|disk)Types/[a-z0-9-]+", path):
            raise ApiRejection("invalid", f"Invalid value for a type: '{path}'. The URL is malformed.")
    gpus = [
        {**gpu, "acceleratorType": gpu["acceleratorType"].rpartition("/")[2]}
        for gpu in body.get("guestAccelerators", [])
    ]
    properties = {**body, "machineType": body["machineType"].rpartition("/")[2]}
    properties |= {"guestAccelerators": gpus} if gpus else {}
    access = body.get("networkInterfaces", [{}])[0].get("accessConfigs", [])
    return properties, next((config["natIP"] for config in access if "natIP" in config), "")


def type_of(properties: Mapping[str, Any]) -> str:
    """The name in the market, with the GPUs that are attached to it."""
    gpus = [f"+{gpu['acceleratorType']}:{gpu['acceleratorCount']}" for gpu in properties.get("guestAccelerators", [])]
    return str(properties.get("machineType", "")) + "".join(gpus)


def read_order(name: str, zone: str, properties: Mapping[str, Any]) -> InstanceOrder:
    """One machine of an order, by the properties that all of them share."""
    scheduling = properties.get("scheduling", {})
    metadata = {item["key"]: item["value"] for item in properties.get("metadata", {}).get("items", [])}
    keys = (line.partition(":")[2] for line in metadata.get("ssh-keys", "").splitlines())
    return InstanceOrder(
        name=name,
        type=type_of(properties),
        region=zone.rpartition("-")[0],
        zone=zone,
        market="spot" if scheduling.get("provisioningModel") == "SPOT" else "on-demand",
        public_keys=tuple(key for key in keys if key),
        user_data=metadata.get("startup-script", ""),
        image=properties.get("disks", [{}])[0].get("initializeParams", {}).get("sourceImage", ""),
        marks=dict(properties),
        lifetime=float(scheduling.get("maxRunDuration", {}).get("seconds", 0)),
        notice_s=float(scheduling.get("preemptionNoticeDuration", {}).get("seconds", 0)),
    )


def shown_type(type: MachineType, zone: str) -> dict[str, Any]:
    """A type as `machineTypes` lists it."""
    shown: dict[str, Any] = {
        "kind": "compute#machineType",
        "name": type.name,
        "guestCpus": type.cpus,
        "memoryMb": type.memory_gb * 1024,
        "zone": f"{API}/projects/p/zones/{zone}",
        "architecture": "ARM64" if type.arch == "aarch64" else "X86_64",
    }
    if type.gpus:
        shown["accelerators"] = [{"guestAcceleratorType": type.gpu, "guestAcceleratorCount": type.gpus}]
    return shown


def filtered(rows: list[dict[str, Any]], text: str) -> list[dict[str, Any]]:
    """Google's filters, the two forms in use: `name eq "EXPRESSION"`, and `field=value` joined by OR."""
    if not text:
        return rows
    if match := re.fullmatch(r'name eq "(\S+)"', text):
        return [row for row in rows if re.fullmatch(match[1], row["name"])]
    pairs = []
    for part in text.split(" OR "):
        match = re.fullmatch(r'\(?([\w.-]+) ?= ?"?([^"()]*?)"?\)?', part)
        if match is None:
            raise ApiRejection(
                "invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression."
            )
        pairs.append((match[1].split("."), match[2]))
    return [row for row in rows if any(_at(row, path) == value for path, value in pairs)]


def _at(row: Any, path: Iterable[str]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def page_of(request: Request, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of the page that was asked for, and where the next one begins."""
    size = int(request.query_params.get("maxResults", "500"))
    if not 0 <= size <= 500:
        raise ApiRejection("invalid", f"Invalid value for field 'maxResults': '{size}'.")
    start = int(request.query_params.get("pageToken", "0"))
    more = {"nextPageToken": str(start + size)} if start + size < len(rows) else {}
    return rows[start : start + size], more


def _types() -> tuple[MachineType, ...]:
    table = Prices(shipped())
    rows = {row.type: row for row in table if row.provider == "gcp"}
    made = []
    for name, row in rows.items():
        on_demand, spot = table.find("gcp", name, REGION, "on-demand"), table.find("gcp", name, REGION, "spot")
        made.append(
            MachineType.of(
                replace(row, usd_hour=on_demand.usd_hour if on_demand else None),
                gpu=GPUS[row.gpu, row.gpu_memory_gb],
                spot_usd_hour=(spot and spot.usd_hour) or 1.0,
                places={zone: MANY for zone in ZONES if _costs_the_same(table, name, zone)},
            )
        )
    return (
        MachineType("e2-standard-2", cpus=2, memory_gb=8, usd_hour=0.067, places=dict.fromkeys(ZONES, MANY)),
        MachineType("n1-standard-4", cpus=4, memory_gb=15, usd_hour=0.19, places=dict.fromkeys(ZONES, MANY)),
        MachineType("n1-standard-2", cpus=2, memory_gb=7, usd_hour=0.095, places=dict.fromkeys(ZONES, MANY)),
        MachineType("n1-standard-16", cpus=16, memory_gb=60, usd_hour=0.76, places=dict.fromkeys(ZONES, MANY)),
        MachineType(
            *("n1-standard-16+nvidia-tesla-v100:1", "nvidia-tesla-v100", 1, 16, 16, 60, 3.24, 0.83),
            places={ZONES[1]: MANY},
        ),
        MachineType("n1-standard-4+nvidia-tesla-t4:1", "nvidia-tesla-t4", 1, 16, 4, 15, 0.54, places={ZONES[0]: MANY}),
        *made,
    )


def _costs_the_same(table: Prices, name: str, zone: str) -> bool:
    """A simulated cloud has one price for a type: offer it only where the table has that price."""
    there, here = (table.find("gcp", name, region, "on-demand") for region in (zone.rpartition("-")[0], REGION))
    return (there and there.usd_hour) == (here and here.usd_hour)


TYPES = _types()
