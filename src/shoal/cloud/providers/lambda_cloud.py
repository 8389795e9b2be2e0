"""Lambda Cloud, API version 1: virtual machines with NVIDIA's driver, one per launch.

Launches must be twelve seconds apart, names are not unique, nothing is idempotent, and an instance has no creation
time: our tags hold all of that. A machine that shuts itself down is billed until it is terminated.
"""

from __future__ import annotations

import hashlib
import re
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.http import ApiClient, HttpProvider
from shoal.cloud.providers.prices import gpu_model
from shoal.cloud.providers.responses import ApiError, Body, Refusal, drop_none, parse_epoch, refusal_by_code

BASE = "https://cloud.lambda.ai/api/v1"
IMAGE = "lambda-stack-24-04"
"""Without a family the image depends on the region."""
IMAGE_ID = r"[0-9a-f]{32}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"
STATES: dict[str, api.InstanceState] = {
    "booting": "pending",
    "active": "up",
    "unhealthy": "error",
    "preempted": "error",
    "terminating": "stopping",
}
REFUSALS_BY_CODE = {
    "instance-operations/launch/insufficient-capacity": Refusal(FailureKind.CAPACITY),
    "instance-operations/launch/file-system-in-wrong-region": Refusal(FailureKind.INVALID),
    "global/quota-exceeded": Refusal(FailureKind.QUOTA),
    "global/invalid-parameters": Refusal(FailureKind.INVALID),
    "global/object-does-not-exist": Refusal(FailureKind.INVALID),
    "global/duplicate": Refusal(FailureKind.CONFLICT),
    "global/invalid-api-key": Refusal(FailureKind.AUTH, "provider", hint="make a key in Lambda's console"),
    "global/account-inactive": Refusal(FailureKind.BALANCE, "provider", hint="see Lambda's console about the account"),
    "global/invalid-address": Refusal(FailureKind.BALANCE, "provider", hint="correct the billing address at Lambda"),
    "global/internal-error": Refusal(FailureKind.AMBIGUOUS),
}
"""By Lambda's error code; its messages change."""
CLUSTER, NODE, TOKEN, EPOCH = "shoal-cluster", "shoal-node", "shoal-token", "shoal-epoch"
NAME_LENGTH = 64
ANYWHERE = "0.0.0.0/0"
WITHOUT_RULES = ("us-south-1",)
"""Regions where Lambda's firewall rules have no effect."""
MOUNT_POINT = r"(/home|/lambda/nfs|/data)(/[A-Za-z0-9._-]+)+"
LAUNCH_INTERVAL_S = 12.0
"""Lambda requires this time between two launches."""


class LambdaProvider(HttpProvider):
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user="ubuntu",
        system=api.System("ubuntu", "24.04"),  # of IMAGE; in use on 2026-11-16
        create_interval=LAUNCH_INTERVAL_S,
        billing=api.Billing(step=60, from_up=True),
        boot_s=1800,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        interval = float(account.settings.get("create_interval", self.abilities.create_interval))
        self.abilities = replace(self.abilities, create_interval=interval)
        api = ApiClient(account, BASE, read_error=read_error, interval=1.0, retry_after=lambda: LAUNCH_INTERVAL_S)
        super().__init__(account, api)
        self._rulesets: dict[str, str] = {}
        """Known firewall rulesets: id by name."""

    async def offers(self, query: api.Query) -> list[api.Offer]:
        body = await self._api.request("GET", "/instance-types")
        offers = []
        for _, entry in body.object("data").items():
            there = [region.text("name") for region in entry.rows("regions_with_capacity_available")]
            # Lambda names no region without capacity: only the requested ones can be listed
            for region in sorted({*there, *query.regions}):
                offer = self._offer(entry.object("instance_type"), region, region in there)
                if query.admits(offer):
                    offers.append(offer)
        return offers

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        body = await self._api.request("GET", "/instances")
        machines = [_instance(one) for one in body.rows("data") if one.text("status") != "terminated"]
        return [one for one in machines if one.cluster == cluster]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        if len(instances) > 1:
            outcome = await self._terminate([one.id for one in instances])
            # with one unknown id Lambda terminates none: then one by one
            if outcome.failure is not FailureKind.INVALID:
                return [replace(outcome, id=one.id) for one in instances]
        return [await self._terminate([one.id]) for one in instances]

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        material = " ".join(public_key.split()[:2])
        if registered := await self._key_name(material):
            return registered
        name = f"shoal-{cluster}-{hashlib.sha256(material.encode()).hexdigest()[:8]}"
        try:
            await self._api.request("POST", "/ssh-keys", json={"name": name, "public_key": public_key.strip()})
        except ApiError as error:
            if error.failure is FailureKind.AUTH or not (registered := await self._key_name(material)):
                raise
            return registered  # another process was faster
        return name

    async def _key_name(self, material: str) -> str:
        for key in (await self._api.request("GET", "/ssh-keys")).rows("data"):
            if " ".join(key.text("public_key").split()[:2]) == material:
                return key.text("name")
        return ""

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        if not order.key_name:
            return api.RequestOutcome(failure=FailureKind.INVALID, message="Lambda requires the name of an SSH key")
        name = f"{order.cluster}--{order.node}--{order.token}"
        tags = {CLUSTER: order.cluster, NODE: order.node, TOKEN: order.token, EPOCH: str(int(time.time()))}
        request = {
            "region_name": order.offer.region,
            "instance_type_name": order.offer.type,
            "ssh_key_names": [order.key_name],
            "name": name[:NAME_LENGTH],
            "image": {"id" if re.fullmatch(IMAGE_ID, order.image) else "family": order.image or IMAGE},
            "tags": [{"key": key, "value": value} for key, value in tags.items()],
            "user_data": order.user_data or None,
            "hostname": order.node if re.fullmatch(r"[a-z0-9][0-9a-z-]{0,62}", order.node) else None,
            **await self._filesystems(order.offer.region),
            "firewall_rulesets": await self._firewall(order),
        }
        launch = drop_none(request)
        body = await self._api.request("POST", "/instance-operations/launch", json=launch, creates=True)
        ids = body.object("data").rows("instance_ids")
        if len(ids) != 1 or not isinstance(ids[0].value, str):
            raise body.error(f"data.instance_ids has {len(ids)} ids, expected one")
        return api.RequestOutcome(ids[0].value)

    async def _filesystems(self, region: str) -> dict[str, Any]:
        """The fields of an order that attach the account's filesystems. Raises ApiError where the region lacks one."""
        named = [name.partition(":") for name in list_setting(self._account.settings.get("filesystems", ""))]
        if not named:
            return {}
        listed = (await self._api.request("GET", "/file-systems")).rows("data")
        ids = {one.text("name"): one.text("id") for one in listed if one.object("region").text("name") == region}
        if missing := [name for name, _, _ in named if name not in ids]:
            message = f"{self._account.name} has no filesystem {', '.join(missing)} in {region}"
            raise ApiError(message, FailureKind.INVALID, scope="region", hint="make it there, or name another region")
        if wrong := [place for _, _, place in named if place and not re.fullmatch(MOUNT_POINT, place)]:
            message = f"Lambda mounts nothing at {', '.join(wrong)}"
            raise ApiError(message, FailureKind.INVALID, scope="provider", hint="use a directory below /data")
        mounts = [{"mount_point": place, "file_system_id": ids[name]} for name, _, place in named if place]
        return {"file_system_names": [name for name, _, _ in named], "file_system_mounts": mounts or None}

    async def _firewall(self, order: api.RentalOrder) -> list[dict[str, str]] | None:
        """The cluster's ruleset of a region, made once; None where Lambda has none, and its own rules stay."""
        region = order.offer.region
        if not order.ports or region in WITHOUT_RULES:
            return None
        name = f"shoal-{order.cluster}-{region}"[:NAME_LENGTH]
        try:
            if name not in self._rulesets:
                listed = (await self._api.request("GET", "/firewall-rulesets")).rows("data")
                self._rulesets |= {one.text("name"): one.text("id") for one in listed}
            if name not in self._rulesets:
                ruleset = {"name": name, "region": region, "rules": firewall_rules(order.ports)}
                answer = await self._api.request("POST", "/firewall-rulesets", json=ruleset)
                self._rulesets[name] = answer.object("data").text("id")
        except ApiError as error:
            if error.failure is FailureKind.AUTH:
                raise
            return None  # without it the controller reaches SSH, and WireGuard goes through the controller
        return [{"id": self._rulesets[name]}]

    async def _terminate(self, ids: list[str]) -> api.RequestOutcome:
        try:
            body = await self._api.request("POST", "/instance-operations/terminate", json={"instance_ids": ids})
            done = {one.text("id") for one in body.object("data").rows("terminated_instances")}
        except ApiError as error:
            if error.status == 404 and len(ids) == 1:
                return api.RequestOutcome(ids[0])  # already gone
            return error.outcome(ids[0])
        if not (missed := [id for id in ids if id not in done]):
            return api.RequestOutcome(ids[0])
        message = f"Lambda did not terminate {', '.join(missed)}"
        return api.RequestOutcome(ids[0], FailureKind.TRANSIENT, message=message)

    def _offer(self, kind: Body, region: str, available: bool) -> api.Offer:
        specs = kind.object("specs")
        gpus = int(specs.number("gpus", 0))
        gpu, memory = gpu_model(kind.text("gpu_description", "")) if gpus else ("", 0)
        cents = kind.price("price_cents_per_hour")
        return api.Offer(
            provider=self._account.name,
            type=kind.text("name"),
            region=region,
            usd_hour=None if cents is None else cents / 100,
            gpu=gpu,
            gpus=gpus,
            gpu_memory_gb=memory,
            cpus=int(specs.number("vcpus")),
            memory_gb=int(specs.number("memory_gib")),
            arch=kind.text("architecture", "x86_64"),
            available="yes" if available else "no",
        )


def firewall_rules(ports: Sequence[str]) -> list[dict[str, object]]:
    """Rules of a ruleset that admit ports such as `tcp:22` and `udp:51820`, and ping."""
    rules: list[dict[str, object]] = [{"protocol": "icmp", "source_network": ANYWHERE, "description": "ping"}]
    for port in ports:
        protocol, _, numbers = port.partition(":")
        first, _, last = numbers.partition("-")
        limits = [int(first), int(last or first)]
        rules.append({"protocol": protocol, "port_range": limits, "source_network": ANYWHERE, "description": "shoal"})
    return rules


def list_setting(text: str) -> list[str]:
    """The names in a setting such as `data, models:/data/models`."""
    return [name for name in re.split(r"[ ,]+", text) if name]


def read_error(status: int, answer: Body) -> Refusal | None:
    """What an error answer means: its code decides, never its text."""
    error = answer.object("error")
    code, message = error.text("code"), error.text("message", "")
    if code.startswith("provider/") and status < 500:
        return Refusal(FailureKind.TRANSIENT, message=f"{code}: {message}")
    return refusal_by_code(REFUSALS_BY_CODE, [(code, message)])


def _instance(one: Body) -> api.RentedInstance:
    status, tags = one.text("status"), {tag.text("key"): tag.text("value") for tag in one.rows_or_empty("tags")}
    kind, epoch = one.object_or_empty("instance_type"), tags.get(EPOCH, "")
    cents = kind.price_or_none("price_cents_per_hour")
    marks = tags.get(CLUSTER, ""), tags.get(NODE, ""), tags.get(TOKEN, "")
    return api.RentedInstance.listed(
        one.text("id"),
        marks if marks[2] else api.marks_in_name(one.text("name", "")),
        status,
        STATES,
        host=one.text("ip", ""),
        user=LambdaProvider.abilities.user,
        type=kind.text("name", ""),
        region=one.object_or_empty("region").text("name", ""),
        usd_hour=None if cents is None else cents / 100,
        created=parse_epoch(epoch),
        ending=status == "preempted",
    )
