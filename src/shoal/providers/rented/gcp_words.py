"""What is said to Google Compute Engine, and how its answers read: orders, machines, errors.

All machines of one `bulkInsert` get the same labels; only their names differ. So the label `shoal-cluster` says whose a
machine is, and its name, `<node>--<token>`, which one.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.providers.rental import Market, Offer, Order, Outcome, Rented, Scope, State, Trouble
from shoal.providers.rented.http import Body, Refusal

USER = "ubuntu"
CLUSTER_LABEL = "shoal-cluster"
IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
ARM_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-arm64"
GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
"""The same Ubuntu with NVIDIA's driver in it."""

HYPERDISK_ONLY = ("a3-ultragpu", "a4", "c4", "g4", "n4")
"""Families that do not boot from a persistent disk."""

GPUS = {
    "nvidia-tesla-p4": ("P4", 8),
    "nvidia-tesla-p100": ("P100", 16),
    "nvidia-tesla-v100": ("V100", 16),
    "nvidia-tesla-t4": ("T4", 16),
    "nvidia-l4": ("L4", 24),
    "nvidia-tesla-a100": ("A100", 40),
    "nvidia-a100-80gb": ("A100", 80),
    "nvidia-h100-80gb": ("H100", 80),
    "nvidia-h100-mega-80gb": ("H100", 80),
    "nvidia-h200-141gb": ("H200", 141),
    "nvidia-b200": ("B200", 180),
    "nvidia-rtx-pro-6000": ("RTX PRO 6000", 96),
}
"""Google's name of a GPU -> the usual one, and its memory in GB. One that is not here keeps Google's name."""

STATES: dict[str, State] = {
    "PROVISIONING": "pending",
    "STAGING": "pending",
    "RUNNING": "up",
    "REPAIRING": "error",
    "PENDING_STOP": "stopping",
    "STOPPING": "stopping",
    "DEPROVISIONING": "stopping",
    "SUSPENDING": "stopping",
    "SUSPENDED": "stopped",
    "TERMINATED": "stopped",
}

TROUBLES: dict[str, Trouble] = {
    # What an operation says when it has ended
    "ZONE_RESOURCE_POOL_EXHAUSTED": Trouble.CAPACITY,
    "ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS": Trouble.CAPACITY,
    "STOCKOUT": Trouble.CAPACITY,
    "RESOURCE_NOT_FOUND": Trouble.CAPACITY,
    "UNSUPPORTED_OPERATION": Trouble.CAPACITY,  # taken away again while it was made
    "insufficientCapacity": Trouble.CAPACITY,
    "QUOTA_EXCEEDED": Trouble.QUOTA,
    "RESOURCE_ALREADY_EXISTS": Trouble.CONFLICT,
    "RESOURCE_OPERATION_RATE_EXCEEDED": Trouble.RATE,
    "RESOURCE_NOT_READY": Trouble.TRANSIENT,
    "PERMISSIONS_ERROR": Trouble.AUTH,
    "INVALID_USAGE": Trouble.INVALID,
    "INVALID_FIELD_VALUE": Trouble.INVALID,
    # The reason in an answer that refuses at once
    "quotaExceeded": Trouble.QUOTA,
    "limitExceeded": Trouble.QUOTA,
    "rateLimitExceeded": Trouble.RATE,
    "userRateLimitExceeded": Trouble.RATE,
    "alreadyExists": Trouble.CONFLICT,
    "resourceNotReady": Trouble.TRANSIENT,
    "BILLING_DISABLED": Trouble.BALANCE,
    "accountDisabled": Trouble.BALANCE,
    "authError": Trouble.AUTH,
    "required": Trouble.INVALID,
    "invalid": Trouble.INVALID,
    "notFound": Trouble.INVALID,
    "badRequest": Trouble.INVALID,
    "forbidden": Trouble.AUTH,
    "accessNotConfigured": Trouble.AUTH,
    "insufficientPermissions": Trouble.AUTH,
    # Only a summary: what else is said comes first
    "VM_MIN_COUNT_NOT_REACHED": Trouble.CAPACITY,
}
"""Google's codes and reasons. Of several the one that stands first here is told."""

Error = tuple[str, str]
"""Google's code or reason, and its words."""


def name_of(order: Order) -> str:
    """What the order's machine is called; empty where Google would not take such a name."""
    name = f"{order.node}--{order.token}"
    fits = re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) and "--" not in order.token
    return name if fits else ""


def request_id(orders: Sequence[Order], attempt: int) -> str:
    """The same for the same orders, so that Google fills them once however often they are sent.

    It answers with a failure of before just as well: an order that has failed for good is another attempt.
    """
    offer = orders[0].offer
    what = [str(attempt), offer.type, offer.place, offer.market, *sorted(order.token for order in orders)]
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(what)))


def bulk_insert(orders: Sequence[Order], settings: Mapping[str, str]) -> dict[str, Any]:
    """The body that orders machines alike. One may come without the others: whoever needs all gives the rest back."""
    offer = orders[0].offer
    body: dict[str, Any] = {
        "count": str(len(orders)),
        "minCount": "1",
        "perInstanceProperties": {name_of(order): {} for order in orders},
        "instanceProperties": _properties(orders[0], settings),
    }
    if not offer.zone:
        body["locationPolicy"] = {"targetShape": "ANY_SINGLE_ZONE"}
    return body


def _properties(order: Order, settings: Mapping[str, str]) -> dict[str, Any]:
    offer = order.offer
    machine, accelerator, count = split_type(offer.type)
    gpus = bool(offer.gpus or accelerator)
    image = order.image or settings.get("image") or (GPU_IMAGE if gpus else IMAGE)
    if image == IMAGE and offer.arch == "aarch64":
        image = ARM_IMAGE
    disk = {
        "sourceImage": image,
        "diskSizeGb": str(order.disk_gb),
        "diskType": "hyperdisk-balanced" if machine.startswith(HYPERDISK_ONLY) else "pd-balanced",
    }
    metadata = {"ssh-keys": f"{USER}:{order.public_key.strip()}", "enable-oslogin": "FALSE"}
    if order.user_data:
        metadata["startup-script"] = order.user_data
    properties: dict[str, Any] = {
        "machineType": machine,
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
        "networkInterfaces": [_interface(settings)],
        "scheduling": _scheduling(order, gpus),
        "labels": {CLUSTER_LABEL: order.cluster},
        "tags": {"items": ["shoal"]},
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]},
    }
    if accelerator:
        properties["guestAccelerators"] = [{"acceleratorType": accelerator, "acceleratorCount": count}]
    return properties


def _interface(settings: Mapping[str, str]) -> dict[str, Any]:
    interface: dict[str, Any] = {"network": settings.get("network", "global/networks/default")}
    if "subnetwork" in settings:
        interface = {"subnetwork": settings["subnetwork"]}
    if settings.get("external_address", "yes") != "no":
        interface["accessConfigs"] = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    return interface


def _scheduling(order: Order, gpus: bool) -> dict[str, Any]:
    spot = order.offer.market == "spot"
    scheduling: dict[str, Any] = {
        "provisioningModel": "SPOT" if spot else "STANDARD",
        "onHostMaintenance": "TERMINATE" if gpus or spot else "MIGRATE",
        "automaticRestart": False,
    }
    if spot or order.lifetime:
        scheduling["instanceTerminationAction"] = "DELETE"
    if order.lifetime:
        scheduling["maxRunDuration"] = {"seconds": str(order.lifetime)}
    return scheduling


def split_type(name: str) -> tuple[str, str, int]:
    """`n1-standard-8+nvidia-tesla-t4:2` is a machine with GPUs put in; other families have theirs built in."""
    machine, _, extra = name.partition("+")
    accelerator, _, count = extra.partition(":")
    return machine, accelerator, int(count or 1) if accelerator else 0


def offer_of(provider: str, machine: Body, zone: str, type_: str, market: Market) -> Offer:
    """One kind of machine in one zone, as `machineTypes` lists it."""
    _, gpu, gpus = split_type(type_)
    for built_in in machine.rows_or_none("accelerators"):
        gpu, gpus = built_in.text("guestAcceleratorType"), int(built_in.number("guestAcceleratorCount"))
    usual, memory = GPUS.get(gpu, (gpu, 0))
    return Offer(
        provider=provider,
        type=type_,
        region=zone.rpartition("-")[0],
        zone=zone,
        market=market,
        gpu=usual,
        gpus=gpus,
        gpu_memory_gb=memory,
        cpus=int(machine.number("guestCpus")),
        memory_gb=int(machine.number("memoryMb")) // 1024,
        arch="aarch64" if machine.text("architecture", "") == "ARM64" else "x86_64",
    )


def rented_of(instance: Body) -> Rented:
    """A machine as Google lists it."""
    name, status = instance.text("name"), instance.text("status")
    node, marked, token = name.rpartition("--")
    cluster = instance.piece_or_empty("labels").text(CLUSTER_LABEL, "") if marked else ""
    spot = instance.piece_or_empty("scheduling").text("provisioningModel", "") == "SPOT"
    zone = last_part(instance.text("zone"))
    public = private = ""
    for interface in instance.rows_or_none("networkInterfaces")[:1]:
        private = interface.text("networkIP", "")
        for access in interface.rows_or_none("accessConfigs"):
            public = access.text("natIP", "") or public
    return Rented(
        id=name,
        cluster=cluster,
        node=node if cluster else "",
        token=token if cluster else "",
        state=STATES.get(status, "pending"),
        raw_state=status,
        host=public or private,
        user=USER,
        private_address=private,
        type=_type_of(instance),
        region=zone.rpartition("-")[0],
        zone=zone,
        market="spot" if spot else "on-demand",
        created=instance.time("creationTimestamp"),
        ending=STATES.get(status) == "stopping",
    )


def _type_of(instance: Body) -> str:
    type_ = last_part(instance.text("machineType"))
    if type_.startswith("n1-"):
        for put_in in instance.rows_or_none("guestAccelerators"):
            type_ += f"+{last_part(put_in.text('acceleratorType'))}:{int(put_in.number('acceleratorCount'))}"
    return type_


def last_part(url: str) -> str:
    """`us-central1-b` of `https://…/zones/us-central1-b`."""
    return url.rpartition("/")[2]


def operation_errors(operation: Body) -> list[Error]:
    """What an operation that has ended complains about."""
    errors = operation.piece_or_empty("error").rows_or_none("errors")
    return [(error.text("code", ""), error.text("message", "")) for error in errors]


def created_count(operation: Body) -> int:
    """So many machines a bulkInsert that has ended says to have made."""
    places = operation.piece_or_empty("instancesBulkInsertOperationMetadata").piece_or_empty("perLocationStatus")
    return sum(int(one.number("createdVmCount", 0) - one.number("deletedVmCount", 0)) for _, one in places.items())


def understand(status: int, data: Any) -> Refusal | None:
    """What an answer with an error status says; a 403 of Google's has four meanings that differ."""
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        return None
    message = str(error.get("message", ""))
    said = [one for part in ("details", "errors") for one in error.get(part) or [] if isinstance(one, dict)]
    reasons = {str(one.get("reason", "")) for one in said}
    for reason in TROUBLES:
        if reason in reasons:
            return Refusal(TROUBLES[reason], _scope(TROUBLES[reason], message), message)
    return None


def outcome_of(errors: Sequence[Error]) -> Outcome:
    """The one of several errors that says most. A code that nobody told us of leaves open what was made."""
    known = [one for code in TROUBLES for one in errors if one[0] == code]
    code, message = next(iter([*known, *errors]), ("", "the order ended without a machine and without a reason"))
    trouble = TROUBLES.get(code, Trouble.AMBIGUOUS)
    return Outcome(trouble=trouble, scope=_scope(trouble, message), message=f"{code}: {message}".strip(": "))


def _scope(trouble: Trouble, message: str) -> Scope:
    if trouble in (Trouble.AUTH, Trouble.BALANCE, Trouble.RATE):
        return "provider"
    if trouble is Trouble.QUOTA:
        return "provider" if "GPUS_ALL_REGIONS" in message else "region"
    return "offer"
