"""Elastic IP addresses of the simulated Amazon EC2, and machines that are stopped and started."""

from __future__ import annotations

import re
import uuid
from typing import Any

from shoal_simulators.market import ApiRejection, Market

Addresses = dict[str, dict[str, Any]]
Form = dict[str, str]


def describe(region: str, filters: dict[str, list[str]], addresses: Addresses, market: Market) -> dict[str, Any]:
    rows = []
    for id, address in addresses.items():
        tags = address["tags"]
        if address["region"] != region or any(
            tags.get(name.removeprefix("tag:")) not in values for name, values in filters.items()
        ):
            continue
        user = next((one.id for one in market.instances.values() if _has(one, address)), None)
        shown = [{"key": key, "value": value} for key, value in tags.items()]
        rows.append({"allocationId": id, "publicIp": address["address"], "instanceId": user, "tagSet": shown})
    return {"addressesSet": rows}


def allocate(region: str, form: Form, addresses: Addresses, market: Market) -> dict[str, Any]:
    keys = [name for name in form if re.fullmatch(r"TagSpecification\.1\.Tag\.\d+\.Key", name)]
    taken = {address["address"] for address in addresses.values()}
    free = (f"{market.backend.address_prefix()}.{number}" for number in range(10, 250))
    id, address = f"eipalloc-{uuid.uuid4().hex[:17]}", next(one for one in free if one not in taken)
    tags = {form[name]: form[f"{name[:-3]}Value"] for name in keys}
    addresses[id] = {"address": address, "region": region, "tags": tags}
    market.save()
    return {"allocationId": id, "publicIp": address, "domain": "vpc"}


def associate(region: str, form: Form, addresses: Addresses, market: Market) -> dict[str, Any]:
    address = _find(region, form, addresses)
    machine = market.instances.get(form.get("InstanceId", ""))
    if machine is None or not machine.live:
        raise ApiRejection("not-found", form.get("InstanceId", ""))
    if machine.phase == "pending":
        what = f"The pending instance '{machine.id}' is not in a valid state for this operation."
        raise ApiRejection("invalid", f"IncorrectInstanceState: {what}")
    for other in market.instances.values():
        if _has(other, address) and other is not machine:
            market.attach(other.id, "")
    market.attach(machine.id, address["address"])
    return {"return": True, "associationId": f"eipassoc-{machine.id[2:]}"}


def release(region: str, form: Form, addresses: Addresses, market: Market) -> dict[str, Any]:
    address = _find(region, form, addresses)
    if any(_has(one, address) for one in market.instances.values()):
        raise ApiRejection("invalid", f"InvalidIPAddress.InUse: {address['address']} is in use.")
    del addresses[form["AllocationId"]]
    market.save()
    return {"return": True}


def _has(machine: Any, address: dict[str, Any]) -> bool:
    return bool(machine.live and machine.external_address == address["address"])


def _find(region: str, form: Form, addresses: Addresses) -> dict[str, Any]:
    id = form.get("AllocationId", "")
    if id not in addresses or addresses[id]["region"] != region:
        raise ApiRejection("invalid", f"InvalidAllocationID.NotFound: The allocation ID '{id}' does not exist")
    return addresses[id]
