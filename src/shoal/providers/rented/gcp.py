"""Google Compute Engine: whole virtual machines, ordered in bulk, which Google itself ends at their deadline.

An order is an operation that takes seconds to fail: out of stock and over quota are told by it, not by the answer to
the order. So `create` follows it for a while, and asks the list for what became of each machine. All machines of one
`bulkInsert` get the same labels; only their names differ. So the label `shoal-cluster` says whose a machine is, and its
name, `<node>--<token>`, which one.
"""

from __future__ import annotations

import uuid
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from shoal.providers.gpus import usual_gpu
from shoal.providers.prices import prices
from shoal.providers.rental import Abilities, Account, Billing, Offer, Order, Outcome, Query, Rented, State, Trouble
from shoal.providers.rented.body import ApiError, Body, order_taken, without_none
from shoal.providers.rented.google_login import GoogleLogin
from shoal.providers.rented.http import Api, ApiRenter, each, until_next_minute
from shoal.providers.rented.refusals import Refusal, Said, by_code, by_words

BASE = "https://compute.googleapis.com/compute/v1"
PAGE, NOTHING_THERE = 500, "NO_RESULTS_ON_PAGE"
FOLLOW_SECONDS = 90.0
"""So long an order is followed. What is out of stock is told within half a minute."""
USER, CLUSTER = "ubuntu", "shoal-cluster"
GPU_FAMILIES = "name eq (a2|a3|a4|a4x|g2|g4)-.*"
HYPERDISK_ONLY = ("a3-ultragpu", "a4", "c4", "g4", "n4")
"""Families that do not boot from a persistent disk."""
IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
ARM_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-arm64"
GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
"""The same Ubuntu with NVIDIA's driver in it."""
STATES: dict[str, State] = {
    "RUNNING": "up",
    "REPAIRING": "error",
    **dict.fromkeys(("PENDING_STOP", "STOPPING", "DEPROVISIONING", "SUSPENDING"), "stopping"),
    **dict.fromkeys(("SUSPENDED", "TERMINATED"), "stopped"),
}
"""All others, those that we do not know too, are of a machine that is not up yet: no reason to give it back."""
CODES = {
    "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT": Refusal(Trouble.CAPACITY),
    "RESOURCE_NOT_FOUND insufficientCapacity": Refusal(Trouble.CAPACITY),
    "UNSUPPORTED_OPERATION": Refusal(Trouble.CAPACITY),  # taken away while it was made
    "QUOTA_EXCEEDED quotaExceeded limitExceeded": Refusal(Trouble.QUOTA, "region"),
    "RESOURCE_ALREADY_EXISTS alreadyExists": Refusal(Trouble.CONFLICT),
    "RESOURCE_OPERATION_RATE_EXCEEDED rateLimitExceeded userRateLimitExceeded": Refusal(Trouble.RATE, "provider"),
    "RESOURCE_NOT_READY resourceNotReady": Refusal(Trouble.TRANSIENT),
    "BILLING_DISABLED accountDisabled": Refusal(Trouble.BALANCE, "provider"),
    "PERMISSIONS_ERROR authError forbidden insufficientPermissions": Refusal(Trouble.AUTH, "provider"),
    "accessNotConfigured": Refusal(Trouble.AUTH, "provider", hint="enable the Compute Engine API for the project"),
    "INVALID_USAGE INVALID_FIELD_VALUE required invalid notFound badRequest": Refusal(Trouble.INVALID),
    "VM_MIN_COUNT_NOT_REACHED": Refusal(Trouble.CAPACITY),  # only a summary: what else is said comes first
}
"""The codes of operations that failed, and the reasons in answers that refuse at once."""
EVERYWHERE = {"GPUS_ALL_REGIONS": Refusal(Trouble.QUOTA, "provider")}
"""A quota that is not of one region: only the words tell."""


class GoogleCompute(ApiRenter):
    """Rents from one project. Implements `shoal.providers.rental.Renter`."""

    abilities = Abilities(
        user=USER,
        notice_seconds=30,
        idempotent="token",
        at_once=1000,
        billing=Billing(step=1, least=60, from_up=True),
        grace_seconds=90,
    )

    def __init__(self, account: Account) -> None:
        login = GoogleLogin(account)
        self._project = f"/projects/{login.project}"
        api = Api(account, BASE, understand=understand, bearer=login.bearer, retry_after=until_next_minute)
        super().__init__(account, api)

    async def offers(self, query: Query) -> list[Offer]:
        """What Google has in its zones. It does not tell what is in stock."""
        named = " OR ".join(f'(name = "{name}")' for name in sorted({split_type(one)[0] for one in query.types}))
        found: list[Offer] = []
        async for machine in self._everywhere("machineTypes", named or GPU_FAMILIES):
            name = machine.text("name")
            for type_ in [one for one in query.types if split_type(one)[0] == name] or [name]:
                offer = offer_of(self._account.name, machine, type_)
                found += [offer, replace(offer, market="spot")]
        return [offer for offer in prices().fill(self._account.kind, found) if query.admits(offer)]

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        """One bulkInsert. Where it made less than all, those that are listed are filled."""
        names = [f"{order.node}--{order.token}" for order in orders]
        try:
            made, errors = await self._insert(names, orders[0])
            if made >= len(names):
                return [Outcome(name) for name in names]
            with order_taken():
                listed = {one.id for one in await self.rented(orders[0].cluster) if one.state in ("pending", "up")}
        except ApiError as error:
            return [error.outcome() for _ in orders]
        failed = outcome_of(errors)
        if made > (there := len(listed.intersection(names))):
            failed = Outcome(trouble=Trouble.AMBIGUOUS, message=f"of {made} that were made {there} are listed")
        return [Outcome(name) if name in listed else failed for name in names]

    async def rented(self, cluster: str) -> list[Rented]:
        return [rented_of(one) async for one in self._everywhere("instances", f"labels.{CLUSTER}={cluster}")]

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        zones = f"{self._project}/zones"
        return await each(lambda one: self._api.remove(f"{zones}/{one.zone}/instances/{one.id}", one.id), rented)

    async def _insert(self, names: Sequence[str], order: Order) -> tuple[int, list[Said]]:
        """Have machines made, all as one order says, and tell how many were, and why not all of them."""
        zone = f"{self._project}/zones/{order.offer.zone}"
        wanted = bulk_insert(names, order, self._account.settings)
        path, params = f"{zone}/instances/bulkInsert", {"requestId": request_id(names, order.offer)}
        operation = await self._api.ask("POST", path, params=params, json=wanted, creates=True)
        path = f"{zone}/operations/{operation.text('name')}"
        ended = await self._api.followed(operation, path, lambda it: it.text("status") == "DONE", FOLLOW_SECONDS)
        with order_taken():
            there = ended.piece_or_empty("instancesBulkInsertOperationMetadata").piece_or_empty("perLocationStatus")
            counts = [one.number("createdVmCount", 0) - one.number("deletedVmCount", 0) for _, one in there.items()]
            made, errors = int(sum(counts)), errors_of(ended)
            if made < len(names) and not errors:  # the operations of those that were not made say why
                group = f'operationGroupId="{ended.text("operationGroupId")}"'
                errors = [said async for one in self._everywhere("operations", group) for said in errors_of(one)]
        return made, errors

    async def _everywhere(self, what: str, filters: str) -> AsyncIterator[Body]:
        """All there is of something, in all zones. A zone that does not answer makes the whole unknown."""
        path, following = f"{self._project}/aggregated/{what}", lambda page: page.text("nextPageToken", "")
        async for page in self._api.pages(path, "pageToken", following, filter=filters, maxResults=PAGE):
            page.text("kind")  # an answer without it is not Google's
            for zone, items in page.piece_or_empty("items").items():
                warning = items.piece_or_empty("warning").text("code", NOTHING_THERE)
                if warning != NOTHING_THERE:
                    raise page.wrong(f"{zone} did not say what is there: {warning}", "ask again later")
                for one in items.rows_or_none(what):
                    yield one


def request_id(names: Sequence[str], offer: Offer) -> str:
    """The same for the same machines, so that Google makes them once however often they are ordered."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join([*offer.identity, *sorted(names)])))


def bulk_insert(names: Sequence[str], order: Order, settings: Mapping[str, str]) -> Any:
    """The body that orders machines alike. One may come without the others: whoever needs all gives the rest back."""
    offer = order.offer
    image = ARM_IMAGE if offer.arch == "aarch64" else IMAGE
    machine, accelerator, count = split_type(offer.type)
    gpus, spot, subnetwork = bool(offer.gpus or accelerator), offer.market == "spot", settings.get("subnetwork")
    login = f"{USER}:{order.public_key.strip()}"
    metadata = {"ssh-keys": login, "enable-oslogin": "FALSE", "startup-script": order.user_data}
    disk = {
        "sourceImage": order.image or settings.get("image") or (GPU_IMAGE if gpus else image),
        "diskSizeGb": str(order.disk_gb),
        "diskType": "hyperdisk-balanced" if machine.startswith(HYPERDISK_ONLY) else "pd-balanced",
    }
    outside = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    interface = {
        "network": None if subnetwork else settings.get("network", "global/networks/default"),
        "subnetwork": subnetwork,
        "accessConfigs": None if settings.get("external_address") == "no" else outside,
    }
    scheduling = {
        "provisioningModel": "SPOT" if spot else "STANDARD",
        "onHostMaintenance": "TERMINATE" if gpus or spot else "MIGRATE",
        "automaticRestart": False,
        "instanceTerminationAction": "DELETE" if spot or order.lifetime else None,
        "maxRunDuration": {"seconds": str(order.lifetime)} if order.lifetime else None,
    }
    put_in = [{"acceleratorType": accelerator, "acceleratorCount": count}]
    properties = {
        "machineType": machine,
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
        "guestAccelerators": put_in if accelerator else None,
        "networkInterfaces": [interface],
        "scheduling": scheduling,
        "labels": {CLUSTER: order.cluster},
        "tags": {"items": ["shoal"]},
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items() if value]},
    }
    wanted = {"count": str(len(names)), "minCount": "1", "perInstanceProperties": {name: {} for name in names}}
    return without_none({**wanted, "instanceProperties": properties})


def split_type(name: str) -> tuple[str, str, int]:
    """`n1-standard-8+nvidia-tesla-t4:2` is a machine with GPUs put in; other families have theirs built in."""
    machine, _, extra = name.partition("+")
    accelerator, _, count = extra.partition(":")
    return machine, accelerator, int(count or 1) if accelerator else 0


def offer_of(provider: str, machine: Body, type_: str) -> Offer:
    """One kind of machine in one zone, as `machineTypes` lists it."""
    _, put_in, count = split_type(type_)
    built_in, zone = machine.first("accelerators"), machine.last_part("zone")
    gpu, memory = usual_gpu(built_in.text("guestAcceleratorType", put_in))
    return Offer(
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


def rented_of(instance: Body) -> Rented:
    """A machine as Google lists it."""
    name, status, zone = instance.text("name"), instance.text("status"), instance.last_part("zone")
    node, marked, token = name.rpartition("--")
    cluster = instance.piece_or_empty("labels").text(CLUSTER, "") if marked else ""
    type_, state = instance.last_part("machineType"), STATES.get(status, "pending")
    interface, put_in = instance.first("networkInterfaces"), instance.first("guestAccelerators")
    if type_.startswith("n1-") and put_in.has("acceleratorType"):
        type_ += f"+{put_in.last_part('acceleratorType')}:{int(put_in.number('acceleratorCount'))}"
    return Rented(
        id=name,
        cluster=cluster,
        node=node if cluster else "",
        token=token if cluster else "",
        state=state,
        raw_state=status,
        host=interface.first("accessConfigs").text("natIP", "") or interface.text("networkIP", ""),
        user=USER,
        type=type_,
        region=zone.rpartition("-")[0],
        zone=zone,
        market="spot" if instance.piece_or_empty("scheduling").text("provisioningModel", "") == "SPOT" else "on-demand",
        created=instance.time("creationTimestamp"),
        ending=state == "stopping",
    )


def errors_of(operation: Body) -> list[Said]:
    """What an operation that has ended complains about."""
    errors = operation.piece_or_empty("error").rows_or_none("errors")
    return [(error.text("code", ""), error.text("message", "")) for error in errors]


def understand(status: int, answer: Body) -> Refusal | None:
    """What an answer with an error status says; a 403 of Google's has four meanings that differ."""
    error = answer.piece("error")
    message = error.text("message", "")
    reasons = [one.text("reason", "") for part in ("details", "errors") for one in error.rows_or_none(part)]
    return by_words(EVERYWHERE, message) or by_code(CODES, [(reason, message) for reason in reasons])


def outcome_of(errors: Sequence[Said]) -> Outcome:
    """What an order came to that made nothing. A code that nobody told us of leaves open whether it did."""
    told = "; ".join(f"{code}: {words}" for code, words in errors) or "the order is under way, or ended without a word"
    known = by_words(EVERYWHERE, told) or by_code(CODES, errors)
    return (known or Refusal(Trouble.AMBIGUOUS, message=told)).outcome()
