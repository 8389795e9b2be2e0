"""Nebius AI Cloud, over gRPC.

A project belongs to one region, so the projects of the account are its regions. A type is a platform and a preset:
`gpu-h100-sxm 8gpu-128vcpu-1600gb`. An order that was accepted may still fail, because hardware and the quota of GPUs
are looked at when the machine starts: its operation tells, and leaves a stopped machine whose disk is billed. Names
are unique in a project; our marks are labels, and no list can be narrowed by them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from shoal.cloud.providers import api
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.capabilities import Quota
from shoal.cloud.providers.http import map_concurrently
from shoal.cloud.providers.nebius_api import INSTANCES, NebiusApi, count_of
from shoal.cloud.providers.prices import gpu_model, prices
from shoal.cloud.providers.responses import ApiError, Body, drop_none, known_price

CLUSTER, NODE, TOKEN = "shoal-cluster", "shoal-node", "shoal-token"
"""Our labels."""
DEFAULT_PROJECT = "default-project"
"""How the name begins of the project that every region has."""
DEFAULT_SUBNET = "default-subnet"
GPU_IMAGE, CPU_IMAGE = "ubuntu24.04-cuda13.0", "ubuntu24.04-driverless"
"""Image families; the first has NVIDIA's driver."""
USER_DATA_BYTES = 32768
FOLLOW_TIMEOUT_S = 60.0
"""How long the operation of an order is polled. Later failures show as a stopped machine."""
SPOT_PRICE_MAX_AGE_S = 300.0
GPUS = {"gpu-rtx6000": "RTX PRO 6000"}
"""GPUs whose platforms are not called after them."""
STATES: dict[str, api.InstanceState] = {
    **dict.fromkeys(("CREATING", "STARTING", "UPDATING"), "pending"),
    "RUNNING": "up",
    **dict.fromkeys(("STOPPING", "DELETING"), "stopping"),
    "STOPPED": "stopped",
    "ERROR": "error",
}
LEVELS: dict[str, Literal["yes", "low", "no", "unknown"]] = {
    "AVAILABILITY_LEVEL_HIGH": "yes",
    "AVAILABILITY_LEVEL_MEDIUM": "yes",
    "AVAILABILITY_LEVEL_LOW": "low",
    "AVAILABILITY_LEVEL_LIMIT_REACHED": "no",
}
QUOTAS = {"on-demand": "compute.instance.count", "spot": "compute.instance.preemptible.count"}
ADDRESS_QUOTA = "vpc.ipv4-address.public.count"
"""Small by default: the first limit that an account reaches."""


@dataclass(frozen=True)
class Project:
    id: str
    name: str
    region: str
    tenant: str


class NebiusProvider:
    """Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user="ubuntu",
        system=api.System("ubuntu", "24.04"),
        notice_s=60,
        idempotent="token",
        billing=api.Billing(step=1),
        boot_s=900,
        grace_s=120,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        self._account, self._api = account, NebiusApi(account)
        self._projects: list[Project] = []
        self._subnets: dict[str, str] = {}
        self._spot_prices: dict[tuple[str, ...], tuple[float, float]] = {}
        """The price of an hour, and when it was told, by offer."""

    async def offers(self, query: api.Query) -> list[api.Offer]:
        """The presets of every platform. Stock comes from Nebius, prices on demand from our table."""
        offers: list[api.Offer] = []
        projects = [one for one in await self._all_projects() if not query.regions or one.region in query.regions]
        advice: dict[tuple[str, str], Body] = {}
        for tenant in sorted({project.tenant for project in projects}):
            advice |= await self._advice(tenant)
        for project in projects:
            async for platform in self._api.items("compute.v1.PlatformService", parentId=project.id):
                offers += [
                    replace(offer, available=_available(advice.get((offer.region, offer.type)), offer.market))
                    for offer in self._presets(platform, project.region)
                ]
        filled = prices().fill(self._account.kind, (offer for offer in offers if query.admits(offer)))
        return await map_concurrently(self._with_spot_price, filled)

    async def create(self, orders: Sequence[api.RentalOrder]) -> list[api.RequestOutcome]:
        outcomes: list[api.RequestOutcome] = []
        for order in orders:
            try:
                outcomes.append(await self._create(order))
            except ApiError as error:
                outcomes.append(error.outcome())
        return outcomes

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        return [
            machine
            for project in await self._all_projects()
            async for one in self._api.items(INSTANCES, parentId=project.id)
            if (machine := _instance(one, project.region)).cluster == cluster
        ]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        return await map_concurrently(lambda one: self._remove(one.id), instances)

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        return ""  # each order carries it

    async def close(self) -> None:
        await self._api.close()

    async def quotas(self, offer: api.Offer) -> list[Quota]:
        """The quotas of machines, of GPUs, and of public addresses."""
        project = await self._project_in(offer.region)
        if project is None:
            return []
        need = {QUOTAS[offer.market]: 1.0, ADDRESS_QUOTA: 1.0}
        async for platform in self._api.items("compute.v1.PlatformService", parentId=project.id):
            if platform.object("metadata").text("name") == offer.type.partition(" ")[0] and offer.gpus:
                need[platform.object("spec").text("gpuCountQuotaType", "")] = float(offer.gpus)
        quotas: list[Quota] = []
        async for one in self._api.items("quotas.v1.QuotaAllowanceService", parentId=project.tenant):
            name, spec = one.object("metadata").text("name"), one.object_or_empty("spec")
            if name in need and spec.text("region", "") == offer.region and spec.has("limit"):
                used = count_of(one.object_or_empty("status"), "usage")
                quotas.append(Quota(f"{name} in {offer.region}", count_of(spec, "limit"), used, need[name]))
        return quotas

    async def _create(self, order: api.RentalOrder) -> api.RequestOutcome:
        project = await self._project_in(order.offer.region)
        if project is None:
            message = f"{self._account.name}: the account has no project in {order.offer.region}"
            return api.RequestOutcome(failure=FailureKind.INVALID, scope="region", message=message)
        request = instance_order(order, project.id, await self._subnet(project), self._account.settings)
        if len(request["spec"]["cloudInitUserData"].encode()) > USER_DATA_BYTES:
            message = f"{self._account.name}: the boot script is longer than {USER_DATA_BYTES} bytes"
            return api.RequestOutcome(failure=FailureKind.INVALID, message=message)
        accepted = await self._api.call(INSTANCES, "Create", request, creates=True, key=order.token)
        id = accepted.text("resourceId")
        if refusal := await self._api.follow(accepted, FOLLOW_TIMEOUT_S):
            removed = await self._remove(id)
            message = f"{self._account.name}: the order was accepted, and failed: {refusal.message}"
            if not removed.ok:
                message += f"; its machine {id} could not be deleted yet: {removed.message}"
            failure = refusal.failure or FailureKind.TRANSIENT
            return api.RequestOutcome("", failure, refusal.scope, message=message)
        return api.RequestOutcome(id)

    async def _remove(self, id: str) -> api.RequestOutcome:
        try:
            await self._api.call(INSTANCES, "Delete", {"id": id})
        except ApiError as error:
            if error.status != 404:
                return error.outcome(id)
        return api.RequestOutcome(id)

    async def _all_projects(self) -> list[Project]:
        """The projects that the settings name, or the default one of each region."""
        if self._projects:
            return self._projects
        ids = self._account.settings.get("project", "").split()
        if ids:
            found = [_project(await self._api.call("iam.v1.ProjectService", "Get", {"id": id})) for id in ids]
        else:
            found = await self._default_projects()
        self._projects = found
        return found

    async def _project_in(self, region: str) -> Project | None:
        return next((one for one in await self._all_projects() if one.region == region), None)

    async def _default_projects(self) -> list[Project]:
        by_region: dict[str, list[Project]] = {}
        async for tenant in self._api.items("iam.v1.TenantService"):
            id = tenant.object("metadata").text("id")
            async for one in self._api.items("iam.v1.ProjectService", parentId=id):
                project = _project(one)
                by_region.setdefault(project.region, []).append(project)
        chosen = [
            next((one for one in projects if one.name.startswith(DEFAULT_PROJECT)), projects[0])
            for _, projects in sorted(by_region.items())
        ]
        if not chosen:
            raise ApiError(
                f"{self._account.name}: the key shows no project",
                FailureKind.INVALID,
                hint=f"name one: providers.{self._account.name}.settings: {{project: project-e00…}}",
            )
        return chosen

    async def _subnet(self, project: Project) -> str:
        """The subnet of the settings, or the project's default one."""
        if named := self._account.settings.get("subnet"):
            return named
        if project.id not in self._subnets:
            found = [
                (one.object("metadata").text("name", ""), one.object("metadata").text("id"))
                async for one in self._api.items("vpc.v1.SubnetService", parentId=project.id)
            ]
            if not found:
                raise ApiError(
                    f"{self._account.name}: project {project.id} in {project.region} has no subnet",
                    FailureKind.INVALID,
                    scope="region",
                    hint="make one in Nebius's console, or name another project",
                )
            default = [id for name, id in found if name.startswith(DEFAULT_SUBNET)]
            self._subnets[project.id] = (default or [found[0][1]])[0]
        return self._subnets[project.id]

    async def _advice(self, tenant: str) -> dict[tuple[str, str], Body]:
        """How much of each type a region has, by region and type; of several fabrics, the best."""
        advice: dict[tuple[str, str], Body] = {}
        try:
            async for one in self._api.items("capacity.v1.ResourceAdviceService", parentId=tenant):
                spec, status = one.object("spec"), one.object_or_empty("status")
                machine = spec.object_or_empty("computeInstance")
                preset = machine.object_or_empty("preset").text("name", "")
                key = spec.text("region", ""), f"{machine.text('platform', '')} {preset}"
                if key not in advice or _number_available(status) > _number_available(advice[key]):
                    advice[key] = status
        except ApiError as error:
            if error.failure is not FailureKind.AUTH:
                raise  # it needs a right on the tenant, which a key for one project does not have
        return advice

    def _presets(self, platform: Body, region: str) -> list[api.Offer]:
        name, spec = platform.object("metadata").text("name"), platform.object("spec")
        if name.startswith("gpu-gb"):
            return []  # GB200 and GB300 are arm64, and have other images
        gpu = GPUS.get(name) or gpu_model(name)[0]
        markets: list[api.Market] = ["on-demand"]
        markets += ["spot"] if platform.object_or_empty("status").flag("allowedForPreemptibles", False) else []
        offers: list[api.Offer] = []
        for preset in spec.rows("presets"):
            resources = preset.object("resources")
            gpus = int(resources.number("gpuCount", 0))
            offers += [
                api.Offer(
                    provider=self._account.name,
                    type=f"{name} {preset.text('name')}",
                    region=region,
                    market=market,
                    gpu=gpu if gpus else "",
                    gpus=gpus,
                    gpu_memory_gb=int(spec.number("gpuMemoryGigabytes", 0)) if gpus else 0,
                    cpus=int(resources.number("vcpuCount")),
                    memory_gb=int(resources.number("memoryGibibytes")),
                )
                for market in markets
            ]
        return offers

    async def _with_spot_price(self, offer: api.Offer) -> api.Offer:
        """The price of a spot offer moves; Nebius estimates it. Without an answer it is that on demand."""
        project = await self._project_in(offer.region)
        if offer.market != "spot" or project is None:
            return offer
        known, told = self._spot_prices.get(offer.identity, (None, 0.0))
        if known is not None and time.monotonic() < told + SPOT_PRICE_MAX_AGE_S:
            return replace(offer, usd_hour=known, as_of="")
        platform, _, preset = offer.type.partition(" ")
        spec = {"resources": {"platform": platform, "preset": preset}, **SPOT_SPEC}
        request = {"computeInstanceSpec": {"metadata": {"parentId": project.id}, "spec": spec}}
        try:
            answer = await self._api.call("billing.v1alpha1.CalculatorService", "Estimate", {"resourceSpec": request})
            total = answer.object("hourlyCost").object("general").object("total")
            price = known_price(float(total.text("cost")))
        except (ApiError, ValueError):
            return offer
        if price is None:
            return offer
        self._spot_prices[offer.identity] = price, time.monotonic()
        return replace(offer, usd_hour=price, as_of="")


SPOT_SPEC = {"preemptible": {"onPreemption": "STOP"}, "followsSpotPrice": {}}


def instance_order(order: api.RentalOrder, project: str, subnet: str, settings: Any) -> Any:
    """The request that orders a machine. Its disk is deleted with it."""
    platform, _, preset = order.offer.type.partition(" ")
    name = f"{order.cluster}-{order.node}-{order.token}"
    family = order.image or settings.get("image") or (GPU_IMAGE if order.offer.gpus else CPU_IMAGE)
    disk = {"sizeGibibytes": order.disk_gb, "type": "NETWORK_SSD", "sourceImageFamily": {"imageFamily": family}}
    if family.startswith("computeimage-"):
        disk = {"sizeGibibytes": order.disk_gb, "type": "NETWORK_SSD", "sourceImageId": family}
    groups = [{"id": id} for id in settings.get("security_groups", "").split()]
    spot = order.offer.market == "spot"
    return drop_none(
        {
            "metadata": {
                "parentId": project,
                "name": name,
                "labels": {CLUSTER: order.cluster, NODE: order.node, TOKEN: order.token},
            },
            "spec": {
                "resources": {"platform": platform, "preset": preset},
                "bootDisk": {"attachMode": "READ_WRITE", "managedDisk": {"name": name, "spec": disk}},
                "networkInterfaces": [
                    {
                        "name": "eth0",
                        "subnetId": subnet,
                        "ipAddress": {},
                        "publicIpAddress": {"static": False},
                        "securityGroups": groups or None,
                    }
                ],
                "cloudInitUserData": _cloud_config(order),
                "hostname": order.node,
                # Otherwise Nebius starts a machine again that shuts itself down.
                "recoveryPolicy": "FAIL",
                "gpuCluster": {"id": settings["gpu_cluster"]} if settings.get("gpu_cluster") else None,
                **(SPOT_SPEC if spot else {"onDemand": {}}),
            },
        }
    )


def _cloud_config(order: api.RentalOrder) -> str:
    """What cloud-init reads. The sshd of Nebius's images may forbid the forwarding that Shoal's tunnels need."""
    config = json.loads(order.cloud_config().partition("\n")[2])
    forwarding = {"path": "/etc/ssh/sshd_config.d/10-shoal.conf", "content": "AllowTcpForwarding yes\n"}
    config["write_files"] = [forwarding, *config.get("write_files", [])]
    return f"#cloud-config\n{json.dumps(config)}\n"


def _project(one: Body) -> Project:
    metadata, status, spec = one.object("metadata"), one.object_or_empty("status"), one.object_or_empty("spec")
    region = status.text("region", "") or spec.text("region")
    return Project(metadata.text("id"), metadata.text("name", ""), region, metadata.text("parentId", ""))


def _number_available(status: Body) -> int:
    return sum(count_of(status.object_or_empty(name), "available") for name in ("onDemand", "preemptible"))


def _available(advice: Body | None, market: api.Market) -> Literal["yes", "low", "no", "unknown"]:
    """What Nebius says about the stock. It counts only as far as the account's quota goes."""
    if advice is None:
        return "unknown"
    stock = advice.object_or_empty("onDemand" if market == "on-demand" else "preemptible")
    if stock.text("dataState", "") != "DATA_STATE_FRESH":
        return "unknown"
    level = LEVELS.get(stock.text("availabilityLevel", ""), "unknown")
    return "no" if level != "unknown" and not count_of(stock, "available") else level


def _instance(one: Body, region: str) -> api.RentedInstance:
    metadata, spec, status = one.object("metadata"), one.object_or_empty("spec"), one.object("status")
    labels, resources = metadata.object_or_empty("labels"), spec.object_or_empty("resources")
    state = status.text("state")
    if state == "STOPPED" and status.flag("reconciling", False):
        state = "STARTING"  # a new machine begins like that
    interface = status.first("networkInterfaces")
    host = interface.object_or_empty("publicIpAddress").text("address", "").partition("/")[0]
    return api.RentedInstance.listed(
        metadata.text("id"),
        (labels.text(CLUSTER, ""), labels.text(NODE, ""), labels.text(TOKEN, "")),
        state,
        STATES,
        host=host,
        user=NebiusProvider.abilities.user,
        type=f"{resources.text('platform', '')} {resources.text('preset', '')}",
        region=region,
        market="spot" if spec.has("preemptible") else "on-demand",
        created=metadata.time("createdAt"),
        ending=state == "STOPPING",  # we delete machines, and never stop one
    )
