"""Google Compute Engine: virtual machines, ordered in bulk, which Google itself ends at their deadline.

An order is an operation that may fail seconds later: it reports missing stock and quota, not the answer to the order.
So `create` polls it for a while, and lists the machines that it made. All machines of one `bulkInsert` get the same
labels and differ only by name: the label `shoal-cluster` marks the cluster, the name is `<node>--<token>`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from shoal.cloud.providers import api
from shoal.cloud.providers import google_orders as orders_of
from shoal.cloud.providers.api import FailureKind
from shoal.cloud.providers.capabilities import FirewallFix, Quota, ReservedAddress
from shoal.cloud.providers.google_auth import GoogleTokens
from shoal.cloud.providers.google_firewall import VpcFirewall
from shoal.cloud.providers.google_operations import errors_of, finish, outcome_of, poll, read_error
from shoal.cloud.providers.google_orders import CLUSTER, NOTICE_S, USER, split_type
from shoal.cloud.providers.http import ApiClient, HttpProvider, map_concurrently, seconds_to_next_minute
from shoal.cloud.providers.prices import gpu_model, prices
from shoal.cloud.providers.responses import ApiError, Body, CodedError, ambiguous_on_error

BASE = "https://compute.googleapis.com/compute/v1"
PAGE, NO_RESULTS = 500, "NO_RESULTS_ON_PAGE"
NOTICE_URL = "http://169.254.169.254/computeMetadata/v1/instance/preempted"
GPU_FAMILIES = 'name eq "(a2|a3|a4|a4x|g2|g4)-.*"'
STATES: dict[str, api.InstanceState] = {
    "RUNNING": "up",
    "REPAIRING": "error",
    **dict.fromkeys(("PENDING_STOP", "STOPPING", "DEPROVISIONING", "SUSPENDING"), "stopping"),
    **dict.fromkeys(("SUSPENDED", "STOPPED", "TERMINATED"), "stopped"),
}


class GoogleProvider(HttpProvider):
    """Rents from one project. Implements `shoal.cloud.providers.api.RentalProvider`."""

    abilities = api.Abilities(
        user=USER,
        system=api.System("ubuntu", "24.04"),  # of all default images; in use in October 2026
        notice_s=NOTICE_S,
        notice_url=NOTICE_URL,
        idempotent="token",
        at_once=1000,
        billing=api.Billing(step=1, least=60, from_up=True),
        grace_s=90,
    )

    def __init__(self, account: api.ProviderLogin) -> None:
        login = GoogleTokens(account)
        self._project = f"/projects/{login.project}"
        api = ApiClient(account, BASE, read_error=read_error, bearer=login.bearer, retry_after=seconds_to_next_minute)
        super().__init__(account, api)
        self._firewall = VpcFirewall(api, login.project)

    async def offers(self, query: api.Query) -> list[api.Offer]:
        """The machine types of all zones. Google does not tell what is in stock."""
        named = " OR ".join(f'(name = "{name}")' for name in sorted({split_type(one)[0] for one in query.types}))
        offers: list[api.Offer] = []
        async for machine in self._list_all_zones("machineTypes", named or GPU_FAMILIES):
            name = machine.text("name")
            for type_ in [one for one in query.types if split_type(one)[0] == name] or [name]:
                offer = offer_of(self._account.name, machine, type_)
                note = orders_of.not_sold(type_, "on-demand", self._account.settings)
                offers.append(replace(offer, available="no", note=note) if note else offer)
                offers.append(replace(offer, market="spot"))
        return [offer for offer in prices().fill(self._account.kind, offers) if query.admits(offer)]

    async def create(self, orders: Sequence[api.RentalOrder]) -> list[api.RequestOutcome]:
        """One bulkInsert. If it made fewer machines, the listed ones count as made."""
        names = [f"{order.node}--{order.token}" for order in orders]
        offer, permanent = orders[0].offer, orders[0].permanent
        if note := orders_of.not_sold(offer.type, offer.market, self._account.settings):
            return [api.RequestOutcome(failure=FailureKind.INVALID, message=note) for _ in orders]
        await self._firewall.ensure(orders[0].cluster, orders[0].ports)
        try:
            made, errors = await (
                self._insert_one(names[0], orders[0]) if permanent else self._insert(names, orders[0])
            )
            if made >= len(names):
                return [api.RequestOutcome(name) for name in names]
            with ambiguous_on_error():
                listed = {one.id for one in await self.instances(orders[0].cluster) if one.state in ("pending", "up")}
        except ApiError as error:
            return [error.outcome() for _ in orders]
        failed = outcome_of(errors)
        if made > (there := len(listed.intersection(names))):
            message = f"{made} machines were made, {there} are listed"
            failed = api.RequestOutcome(failure=FailureKind.AMBIGUOUS, message=message)
        return [api.RequestOutcome(name) if name in listed else failed for name in names]

    async def instances(self, cluster: str) -> list[api.RentedInstance]:
        return [instance_of(one) async for one in self._list_all_zones("instances", f'labels.{CLUSTER}="{cluster}"')]

    async def delete(self, instances: Sequence[api.RentedInstance]) -> list[api.RequestOutcome]:
        zones = f"{self._project}/zones"
        return await map_concurrently(
            lambda one: self._api.remove(f"{zones}/{one.zone}/instances/{one.id}", one.id), instances
        )

    async def addresses(self, cluster: str) -> list[ReservedAddress]:
        listed = [one async for one in self._list_all_zones("addresses", 'name eq "shoal-.*"')]
        return [address for one in listed if (address := address_of(one, cluster)) is not None]

    async def reserve_address(self, cluster: str, node: str, region: str) -> ReservedAddress:
        place, name = f"{self._project}/regions/{region}", orders_of.address_name(cluster, node)
        body = {"name": name, "addressType": "EXTERNAL", "description": orders_of.address_mark(cluster, node)}
        try:
            await finish(self._api, await self._api.request("POST", f"{place}/addresses", json=body), place)
        except ApiError as error:
            if error.failure is not FailureKind.CONFLICT:
                raise
        answer = await self._api.request("GET", f"{place}/addresses/{name}")
        address = address_of(answer, cluster)
        if address is None:
            raise answer.error(f"{name} is not an address of cluster {cluster}", "delete it in Google's console")
        return address

    async def attach_address(self, address: ReservedAddress, machine: api.RentedInstance) -> None:
        """The order names it."""

    async def release_address(self, address: ReservedAddress) -> None:
        outcome = await self._api.remove(f"{self._project}/regions/{address.region}/addresses/{address.id}", address.id)
        if outcome.failure is not None:
            raise ApiError(outcome.message, outcome.failure)

    async def start(self, machine: api.RentedInstance) -> None:
        zone = f"{self._project}/zones/{machine.zone}"
        await finish(self._api, await self._api.request("POST", f"{zone}/instances/{machine.id}/start"), zone)

    async def quotas(self, offer: api.Offer) -> list[Quota]:
        """Those of GPUs, of the region and of all regions. Google may keep those of new GPUs elsewhere."""
        metric = orders_of.quota_metric(offer)
        if not metric:
            return []
        region = f"{self._project}/regions/{offer.region}"
        quotas = []
        for path, name, place in ((region, metric, offer.region), (self._project, "GPUS_ALL_REGIONS", "all regions")):
            for row in (await self._api.request("GET", path)).rows_or_empty("quotas"):
                if row.text("metric") == name:
                    limits = row.number("limit"), row.number("usage")
                    quotas.append(Quota(f"{name} in {place}", *limits, need=offer.gpus))
        return quotas

    async def firewall_fixes(self, cluster: str, ports: Sequence[str]) -> list[FirewallFix]:
        return await self._firewall.fixes(cluster, ports)

    async def _insert_one(self, name: str, order: api.RentalOrder) -> tuple[int, list[CodedError]]:
        """Create a machine that stays. Returns how many were made, and the errors."""
        zone = f"{self._project}/zones/{order.offer.zone}"
        request = orders_of.insert(name, order, self._account.settings)
        path, params = f"{zone}/instances", {"requestId": orders_of.request_id([name], order.offer)}
        operation = await self._api.request("POST", path, params=params, json=request, creates=True)
        ended = await poll(self._api, operation, zone)
        with ambiguous_on_error():
            errors = errors_of(ended)
            return int(ended.text("status") == "DONE" and not errors), errors

    async def _insert(self, names: Sequence[str], order: api.RentalOrder) -> tuple[int, list[CodedError]]:
        """Create machines as one order describes. Returns how many were made, and the errors of the others."""
        zone = f"{self._project}/zones/{order.offer.zone}"
        request = orders_of.bulk_insert(names, order, self._account.settings)
        path, params = f"{zone}/instances/bulkInsert", {"requestId": orders_of.request_id(names, order.offer)}
        operation = await self._api.request("POST", path, params=params, json=request, creates=True)
        ended = await poll(self._api, operation, zone)
        with ambiguous_on_error():
            there = ended.object_or_empty("instancesBulkInsertOperationMetadata").object_or_empty("perLocationStatus")
            counts = [one.number("createdVmCount", 0) - one.number("deletedVmCount", 0) for _, one in there.items()]
            made, errors = int(sum(counts)), errors_of(ended)
            if made < len(names) and not errors:  # the operations of the others have the errors
                group = f'operationGroupId="{ended.text("operationGroupId")}"'
                errors = [said async for one in self._list_all_zones("operations", group) for said in errors_of(one)]
        return made, errors

    async def _list_all_zones(self, what: str, filters: str) -> AsyncIterator[Body]:
        """All resources of a kind, in all zones. Raises if one zone does not answer."""
        path, following = f"{self._project}/aggregated/{what}", lambda page: page.text("nextPageToken", "")
        async for page in self._api.pages(path, "pageToken", following, filter=filters, maxResults=PAGE):
            page.text("kind")  # an answer without it is not from Google
            for zone, items in page.object_or_empty("items").items():
                warning = items.object_or_empty("warning").text("code", NO_RESULTS)
                if warning != NO_RESULTS:
                    raise page.error(f"{zone} did not answer: {warning}", "try again later")
                for one in items.rows_or_empty(what):
                    yield one


def offer_of(provider: str, machine: Body, type_: str) -> api.Offer:
    """One machine type in one zone, as `machineTypes` lists it."""
    _, attached, count = split_type(type_)
    built_in, zone = machine.first("accelerators"), machine.last_part("zone")
    gpu, memory = gpu_model(built_in.text("guestAcceleratorType", attached))
    return api.Offer(
        provider=provider,
        type=type_,
        region=zone.rpartition("-")[0],
        zone=zone,
        gpu=gpu,
        gpus=int(built_in.number("guestAcceleratorCount", count)),
        gpu_memory_gb=memory,
        cpus=int(machine.number("guestCpus")),
        memory_gb=int(machine.number("memoryMb")) // 1024,
        arch="aarch64" if machine.text("architecture", "") == "ARM64" else "x86_64",
    )


def instance_of(instance: Body) -> api.RentedInstance:
    """A machine as Google lists it."""
    name, status, zone = instance.text("name"), instance.text("status"), instance.last_part("zone")
    node, marked, token = name.rpartition("--")
    cluster = instance.object_or_empty("labels").text(CLUSTER, "") if marked else ""
    type_ = instance.last_part("machineType")
    interface, attached = instance.first("networkInterfaces"), instance.first("guestAccelerators")
    if type_.startswith("n1-") and attached.has("acceleratorType"):
        type_ += f"+{attached.last_part('acceleratorType')}:{int(attached.number('acceleratorCount'))}"
    model = instance.object_or_empty("scheduling").text("provisioningModel", "")
    return api.RentedInstance.listed(
        name,
        (cluster, node, token) if cluster else ("", "", ""),
        status,
        STATES,
        host=interface.first("accessConfigs").text("natIP", "") or interface.text("networkIP", ""),
        user=USER,
        type=type_,
        region=zone.rpartition("-")[0],
        zone=zone,
        market="spot" if model == "SPOT" else "on-demand",
        created=instance.time("creationTimestamp"),
        started=instance.time("lastStartTimestamp"),
        ending=STATES.get(status) == "stopping",
    )


def address_of(address: Body, cluster: str) -> ReservedAddress | None:
    """A reserved address of the cluster; None for another one."""
    owner, node, _ = api.marks_in_name(address.text("description", ""))
    if owner != cluster or not address.has("address"):
        return None
    users = [row.value.rpartition("/")[2] for row in address.rows_or_empty("users")]
    region = address.last_part("region")
    return ReservedAddress(address.text("name"), address.text("address"), node, region, "".join(users[:1]))
