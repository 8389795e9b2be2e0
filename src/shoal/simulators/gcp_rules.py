"""What the simulated Google Compute Engine makes of a request: what it refuses, what was ordered, what is listed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any
from zlib import crc32

from starlette.requests import Request

from shoal.simulators.machines import MachineType, Wanted
from shoal.simulators.market import Refused

API = "https://compute.googleapis.com/compute/v1"
NAME = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"


def check(asked: str, body: Mapping[str, Any]) -> None:
    """Refuse what Google refuses at once."""
    if asked and not re.fullmatch(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", asked):
        raise Refused("invalid", f"Invalid value for field 'requestId': '{asked}'.")
    named, properties = body.get("perInstanceProperties"), body.get("instanceProperties")
    if not isinstance(named, dict) or not isinstance(properties, dict) or "namePattern" in body:
        raise Refused("invalid", "Exactly one of namePattern and perInstanceProperties, and instanceProperties.")
    if int(body.get("count", 0)) != len(named):
        raise Refused("invalid", "Invalid value for field 'resource.count': it is not that of perInstanceProperties.")
    for name, own in named.items():
        if not re.fullmatch(NAME, name):
            raise Refused("invalid", f"Invalid value for field 'resource.perInstanceProperties': '{name}'.")
        if set(own) - {"hostname"}:
            raise Refused("invalid", f"Invalid JSON payload received. Unknown name {sorted(own)[0]!r}.")
    scheduling = properties.get("scheduling", {})
    _, plus, _ = type_of(properties).partition("+")
    gpus = plus or type_of(properties).startswith(("a2-", "a3-", "a4", "g2-", "g4-"))
    if gpus and scheduling.get("onHostMaintenance") != "TERMINATE":
        raise Refused("invalid", "Instances with guest accelerators do not support live migration.")
    if scheduling.get("provisioningModel") == "SPOT" and scheduling.get("automaticRestart") is not False:
        raise Refused("invalid", "Scheduling must have automaticRestart be false when the VM is a Spot VM.")
    if "maxRunDuration" in scheduling and "instanceTerminationAction" not in scheduling:
        raise Refused("invalid", "Instance termination action must be specified with max run duration.")


def type_of(asked: Mapping[str, Any]) -> str:
    """The name in the market: GPUs that are put into a machine are part of it."""
    put_in = [f"+{one['acceleratorType']}:{one['acceleratorCount']}" for one in asked.get("guestAccelerators", [])]
    return str(asked.get("machineType", "")) + "".join(put_in)


def read_order(name: str, zone: str, asked: Mapping[str, Any]) -> Wanted:
    """One machine of an order, by the properties that all of them share."""
    scheduling = asked.get("scheduling", {})
    metadata = {one["key"]: one["value"] for one in asked.get("metadata", {}).get("items", [])}
    keys = (line.partition(":")[2] for line in metadata.get("ssh-keys", "").splitlines())
    return Wanted(
        name=name,
        type=type_of(asked),
        region=zone.rpartition("-")[0],
        zone=zone,
        market="spot" if scheduling.get("provisioningModel") == "SPOT" else "on-demand",
        public_keys=tuple(key for key in keys if key),
        user_data=metadata.get("startup-script", ""),
        marks=dict(asked),
        lifetime=float(scheduling.get("maxRunDuration", {}).get("seconds", 0)),
    )


def shown_type(type: MachineType, zone: str) -> dict[str, Any]:
    """A type as `machineTypes` lists it."""
    shown: dict[str, Any] = {
        "kind": "compute#machineType",
        "id": number(type.name),
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
    """Google's filters, as far as anybody uses them: `name eq EXPRESSION`, and `field=value` joined by OR."""
    if not text:
        return rows
    if found := re.fullmatch(r"name eq (\S+)", text):
        return [row for row in rows if re.fullmatch(found[1], row["name"])]
    pairs = []
    for part in text.split(" OR "):
        found = re.fullmatch(r'\(?([\w.-]+) ?= ?"?([^"()]*?)"?\)?', part)
        if found is None:
            raise Refused("invalid", f"Invalid value for field 'filter': '{text}'. Invalid list filter expression.")
        pairs.append((found[1].split("."), found[2]))
    return [row for row in rows if any(_at(row, path) == value for path, value in pairs)]


def _at(row: Any, path: Iterable[str]) -> Any:
    for name in path:
        row = row.get(name) if isinstance(row, dict) else None
    return row


def page_of(request: Request, rows: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """The rows of the page that was asked for, and where the next one begins."""
    size = int(request.query_params.get("maxResults", "500"))
    if not 0 <= size <= 500:
        raise Refused("invalid", f"Invalid value for field 'maxResults': '{size}'.")
    start = int(request.query_params.get("pageToken", "0"))
    more = {"nextPageToken": str(start + size)} if start + size < len(rows) else {}
    return rows[start : start + size], more


def number(name: str) -> str:
    """The id that goes with a name."""
    return str(10**18 + crc32(name.encode()))


def stamp(seconds: float) -> str:
    """A time as Google writes it."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
