"""Reserved external addresses of the simulated Google Compute Engine, as `regions/.../addresses` has them."""

from __future__ import annotations

import re
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from shoal_simulators.gcp_requests import API, NAME
from shoal_simulators.market import ApiRejection, Market
from shoal_simulators.server import read_json

Addresses = dict[str, dict[str, Any]]


async def add_address(request: Request, addresses: Addresses, market: Market) -> None:
    """Reserve an address. Its name is unique in the region."""
    body, region = await read_json(request), request.path_params["region"]
    name = body.get("name", "")
    if not re.fullmatch(NAME, name) or "labels" in body:  # labels are set afterwards only
        raise ApiRejection("invalid", f"Invalid value for field 'resource.name': '{name}'.")
    if f"{region}/{name}" in addresses:
        raise ApiRejection("duplicate-name", f"regions/{region}/addresses/{name}")
    taken = {address["address"] for address in addresses.values()}
    free = (f"{market.backend.address_prefix()}.{number}" for number in range(10, 250))
    address = next(one for one in free if one not in taken)
    more = {"description": body.get("description", ""), "addressType": "EXTERNAL", "name": name, "address": address}
    addresses[f"{region}/{name}"] = {"kind": "compute#address", "region": f"{API}/projects/p/regions/{region}", **more}
    market.save()


def shown_address(address: dict[str, Any], market: Market) -> dict[str, Any]:
    """An address with the machine that uses it."""
    users = [one for one in market.instances.values() if one.live and one.external_address == address["address"]]
    if not users:
        return {**address, "status": "RESERVED"}
    links = [f"{API}/projects/p/zones/{one.order.zone}/instances/{one.order.name}" for one in users]
    return {**address, "status": "IN_USE", "users": links}


def get_address(request: Request, addresses: Addresses, market: Market) -> Response:
    return JSONResponse(shown_address(_find(request, addresses), market))


def remove_address(request: Request, addresses: Addresses, market: Market) -> None:
    address = _find(request, addresses)
    if "users" in shown_address(address, market):
        raise ApiRejection("invalid", f"The address resource '{address['name']}' is already being used.")
    del addresses[f"{request.path_params['region']}/{address['name']}"]
    market.save()


def check_address(natted: str, zone: str, addresses: Addresses, market: Market) -> None:
    """Reject an order with an external address that is not ours, of another region, or in use."""
    own = [address for address in addresses.values() if address["address"] == natted]
    if not own or not zone.startswith(own[0]["region"].rpartition("/")[2]):
        raise ApiRejection("invalid", f"Invalid value for field 'natIP': '{natted}'.")
    if "users" in shown_address(own[0], market):
        raise ApiRejection("invalid", f"External IP address: {natted} is already in-use.")


def _find(request: Request, addresses: Addresses) -> dict[str, Any]:
    region, name = request.path_params["region"], request.path_params["name"]
    if f"{region}/{name}" not in addresses:
        raise ApiRejection("not-found", f"regions/{region}/addresses/{name}")
    return addresses[f"{region}/{name}"]
