"""DigitalOcean GPU Droplets, API version 2, the successor of Paperspace's machines.

A plain list of droplets leaves out those with GPUs, and theirs cannot be narrowed by tag: both lists are read, and our
marks are in the name, `<node>.<token>.<cluster>`. An accepted order may still fail; its action tells. Powered off, a
droplet is billed in full.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any
from urllib.parse import parse_qs, urlsplit

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.capabilities import Quota
from shoal.cloud.providers.http import ApiClient, HttpProvider, map_concurrently
from shoal.cloud.providers.prices import gpu_model
from shoal.cloud.providers.responses import ApiError, Body, Refusal, drop_none, refusal_by_message

BASE = "https://api.digitalocean.com/v2"
PAGE = 200
TAG = "shoal-cluster:"
SPOT = "-spot"
"""The end of the name of a size that DigitalOcean may take back."""
IMAGE = "ubuntu-24-04-x64"
GPU_IMAGES = {1: "gpu-h100x1-base", 8: "gpu-h100x8-base"}
"""With NVIDIA's driver, by the number of GPUs; the second has the fabric manager."""
FOLLOW_TIMEOUT_S = 10.0
"""How long the action of an order is polled. Later failures are noticed because the droplet vanishes."""
STATES: dict[str, api.InstanceState] = {"new": "pending", "active": "up", "off": "stopped", "archive": "stopped"}
REFUSALS_BY_MESSAGE = {
    r"(size|region) is not available|not available in this region|out of capacity": Refusal(FailureKind.CAPACITY),
    r"exceed your droplet limit|droplet limit|gpu limit|limit_exceeded": Refusal(
        FailureKind.QUOTA, "provider", hint="ask DigitalOcean to raise the limit: new accounts have no GPU droplets"
    ),
    r"payment|billing|restricted|past due": Refusal(
        FailureKind.BALANCE, "provider", hint="see DigitalOcean's console about the account"
    ),
    r"invalid key identifiers": Refusal(FailureKind.TRANSIENT),  # a key that was registered just now
}


class DigitalOceanProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user="root",
        system=api.System("ubuntu", "22.04"),  # of GPU_IMAGES, in September 2026
        create_interval=0.3,
        billing=api.Billing(step=1, least=60),
        boot_s=900,
        grace_s=180,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        super().__init__(account, ApiClient(account, BASE, read_error=read_error, interval=0.25))

    async def offers(self, query: api.Query) -> list[api.Offer]:
        """Sizes with NVIDIA's GPUs, and others that are named. A size without regions cannot be had by this account."""
        offers: list[api.Offer] = []
        async for size in self._all("/sizes", "sizes"):
            slug, gpus = size.text("slug"), size.object_or_empty("gpu_info")
            if slug not in query.types and not gpus.text("model", "").startswith("nvidia"):
                continue
            there = [str(one.value) for one in size.rows("regions")] if size.flag("available", True) else []
            for region in sorted({*there, *query.regions}):
                offers.append(self._offer(size, gpus, region, region in there))
        return [offer for offer in offers if query.admits(offer)]

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        droplets: dict[str, api.RentedInstance] = {}
        for kind in ("gpus", "droplets"):
            async for droplet in self._all("/droplets", "droplets", type=kind):
                machine = _instance(droplet)
                droplets[machine.id] = machine
        return [one for one in droplets.values() if one.cluster == cluster]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        # never by tag: that removes the tag first, and the droplet is billed on without it
        return await map_concurrently(self._destroy, instances)

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        material = " ".join(public_key.split()[:2])
        if registered := await self._fingerprint(material):
            return registered
        name = f"shoal-{cluster}-{hashlib.sha256(material.encode()).hexdigest()[:8]}"
        try:
            made = await self._api.request(
                "POST", "/account/keys", json={"name": name, "public_key": public_key.strip()}
            )
        except ApiError as error:
            if error.failure is FailureKind.AUTH or not (registered := await self._fingerprint(material)):
                raise
            return registered  # another process was faster
        return made.object("ssh_key").text("fingerprint")

    async def quotas(self, offer: api.Offer) -> list[Quota]:
        """The account's limit of droplets. That of GPU droplets is not in the API: new accounts have none of them."""
        limit = (await self._api.request("GET", "/account")).object("account").number("droplet_limit")
        used = 0
        for kind in ("gpus", "droplets"):
            async for _ in self._all("/droplets", "droplets", type=kind):
                used += 1
        return [Quota("droplet_limit", limit, used, need=1)]

    async def _fingerprint(self, material: str) -> str:
        async for key in self._all("/account/keys", "ssh_keys"):
            if " ".join(key.text("public_key").split()[:2]) == material:
                return key.text("fingerprint")
        return ""

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        if not order.key_name:
            message = "DigitalOcean requires the fingerprint of an SSH key"  # it would mail a password
            return api.RequestOutcome(failure=FailureKind.INVALID, message=message)
        request = droplet_order(order, self._account.settings.get("image", ""), self._account.settings.get("network"))
        answer = await self._api.request("POST", "/droplets", json=request, creates=True)
        droplet = answer.object("droplet")
        id, price = str(int(droplet.number("id"))), droplet.object_or_empty("size").price_or_none("price_hourly")
        action = answer.object_or_empty("links").first("actions")
        if action.has("id"):
            path = f"/actions/{int(action.number('id'))}"
            started = Body({"action": {"status": "in-progress"}}, answer.where)
            done = await self._api.poll(started, path, lambda it: _status(it) != "in-progress", FOLLOW_TIMEOUT_S)
            if _status(done) == "errored":
                await self._api.remove(f"/droplets/{id}")
                message = f"{self._account.name}: the create action of droplet {id} failed"
                return api.RequestOutcome("", FailureKind.CAPACITY, message=message)
        return api.RequestOutcome(id, usd_hour=price)

    async def _destroy(self, machine: api.RentedInstance) -> api.RequestOutcome:
        outcome = await self._api.remove(f"/droplets/{machine.id}", machine.id)
        in_progress = re.search(r"destroy is already in progress", outcome.message, re.IGNORECASE)
        return api.RequestOutcome(machine.id) if in_progress else outcome

    async def _all(self, path: str, name: str, **params: str | int) -> AsyncIterator[Body]:
        async for page in self._api.pages(path, "page", _next_page, per_page=PAGE, **params):
            for one in page.rows(name):
                yield one

    def _offer(self, size: Body, gpus: Body, region: str, available: bool) -> api.Offer:
        slug, vram = size.text("slug"), gpus.object_or_empty("vram")
        model, memory = gpu_model(gpus.text("model").replace("_", " ")) if gpus.has("model") else ("", 0)
        return api.Offer(
            provider=self._account.name,
            type=slug,
            region=region,
            market="spot" if slug.endswith(SPOT) else "on-demand",
            usd_hour=size.price("price_hourly"),
            gpu=model.removeprefix("nvidia ").upper(),
            gpus=int(gpus.number("count", 0)),
            gpu_memory_gb=int(vram.number("amount", 0)) or memory,
            cpus=int(size.number("vcpus")),
            memory_gb=int(size.number("memory") // 1024),
            available="yes" if available else "no",
        )


def droplet_order(order: api.RentalOrder, image: str, network: str | None) -> Any:
    """The request that orders a droplet. The size decides on its disk."""
    return drop_none(
        {
            "name": f"{order.node}.{order.token}.{order.cluster}",
            "region": order.offer.region,
            "size": order.offer.type,
            "image": order.image or image or GPU_IMAGES.get(order.offer.gpus, IMAGE),
            "ssh_keys": [order.key_name],
            "user_data": order.user_data or None,
            "tags": [f"{TAG}{order.cluster}"],
            "vpc_uuid": network,
            "monitoring": False,
            "ipv6": False,
        }
    )


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means: by its message, and otherwise by its status."""
    code, message = answer.text("id", ""), answer.text("message")
    words = f"{code}: {message}" if code else message
    known = refusal_by_message(REFUSALS_BY_MESSAGE, words) if status in (400, 402, 403, 409, 422) else None
    return known or Refusal(message=words)


def _status(answer: Body) -> str:
    return answer.object("action").text("status")


def _next_page(page: Body) -> str:
    """The number of the next page, which is in its address."""
    address = page.object_or_empty("links").object_or_empty("pages").text("next", "")
    return next(iter(parse_qs(urlsplit(address).query).get("page", [])), "")


def _instance(one: Body) -> api.RentedInstance:
    name, size = one.text("name"), one.object_or_empty("size")
    node, token, cluster = name.split(".") if name.count(".") == 2 else ("", "", "")
    ours = f"{TAG}{cluster}" in [tag.value for tag in one.rows_or_empty("tags")]
    public = [
        address.text("ip_address")
        for address in one.object_or_empty("networks").rows_or_empty("v4")
        if address.text("type") == "public"
    ]
    slug = one.text("size_slug", "")
    return api.RentedInstance.listed(
        str(int(one.number("id"))),
        (cluster, node, token) if ours else ("", "", ""),
        one.text("status"),
        STATES,
        host=next(iter(public), ""),
        user=DigitalOceanProvider.abilities.user,
        type=slug,
        region=one.object_or_empty("region").text("slug", ""),
        market="spot" if slug.endswith(SPOT) else "on-demand",
        usd_hour=size.price_or_none("price_hourly"),
        created=one.time("created_at"),
    )
