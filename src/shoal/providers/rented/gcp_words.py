"""What is said to Google Compute Engine and what it says, as pure functions: orders, machines, kinds, refusals."""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.providers.rental import Offer, Order, Outcome, Rented, Scope, State, Trouble
from shoal.providers.rented.http import Body, Refusal

USER = "ubuntu"
CLUSTER_LABEL = "shoal-cluster"
HYPERDISK_ONLY = ("a3-ultragpu", "a4", "c4", "g4", "n4")
"""Families that do not boot from a persistent disk."""
IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
ARM_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-arm64"
GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
"""The same Ubuntu with NVIDIA's driver in it."""
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
    "RUNNING": "up",
    "REPAIRING": "error",
    **dict.fromkeys(("PENDING_STOP", "STOPPING", "DEPROVISIONING", "SUSPENDING"), "stopping"),
    **dict.fromkeys(("SUSPENDED", "TERMINATED"), "stopped"),
}
"""All others, those that we do not know too, are of a machine that is not up yet: no reason to give it back."""
WORDS: dict[Trouble, str] = {
    Trouble.CAPACITY: "ZONE_RESOURCE_POOL_EXHAUSTED ZONE_RESOURCE_POOL_EXHAUSTED_WITH_DETAILS STOCKOUT"
    " RESOURCE_NOT_FOUND UNSUPPORTED_OPERATION insufficientCapacity",  # the fifth: taken away while it was made
    Trouble.QUOTA: "QUOTA_EXCEEDED quotaExceeded limitExceeded",
    Trouble.CONFLICT: "RESOURCE_ALREADY_EXISTS alreadyExists",
    Trouble.RATE: "RESOURCE_OPERATION_RATE_EXCEEDED rateLimitExceeded userRateLimitExceeded",
    Trouble.TRANSIENT: "RESOURCE_NOT_READY resourceNotReady",
    Trouble.BALANCE: "BILLING_DISABLED accountDisabled",
    Trouble.AUTH: "PERMISSIONS_ERROR authError forbidden accessNotConfigured insufficientPermissions",
    Trouble.INVALID: "INVALID_USAGE INVALID_FIELD_VALUE required invalid notFound badRequest",
}
"""The codes of operations that failed, and the reasons in answers that refuse at once."""
TROUBLES = {word: trouble for trouble, words in WORDS.items() for word in words.split()}
TROUBLES["VM_MIN_COUNT_NOT_REACHED"] = Trouble.CAPACITY  # only a summary: what else is said comes first
"""Of several the one that stands first here is told."""

Error = tuple[str, str]
"""Google's code or reason, and its words."""


def name_of(order: Order) -> str:
    """What the order's machine is called; empty where Google would not take such a name."""
    name = f"{order.node}--{order.token}"
    fits = re.fullmatch(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?", name) and "--" not in order.token
    return name if fits else ""


def unnameable(order: Order) -> Outcome:
    name = f"{order.node}--{order.token}"
    told = f"Google takes no machine called {name!r}: lower case, digits, hyphens, at most 63"
    return Outcome("", Trouble.INVALID, message=told)


def request_id(orders: Sequence[Order]) -> str:
    """The same for the same orders, so that Google fills them once however often they are sent."""
    offer = orders[0].offer
    what = [offer.type, offer.place, offer.market, *sorted(order.token for order in orders)]
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join(what)))


def bulk_insert(orders: Sequence[Order], settings: Mapping[str, str]) -> dict[str, Any]:
    """The body that orders machines alike. One may come without the others: whoever needs all gives the rest back."""
    order, offer = orders[0], orders[0].offer
    machine, accelerator, count = split_type(offer.type)
    gpus = bool(offer.gpus or accelerator)
    metadata = {"ssh-keys": f"{USER}:{order.public_key.strip()}", "enable-oslogin": "FALSE"}
    if order.user_data:
        metadata["startup-script"] = order.user_data
    properties: dict[str, Any] = {
        "machineType": machine,
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": _disk(order, machine, gpus, settings)}],
        "networkInterfaces": [_interface(settings)],
        "scheduling": _scheduling(order, gpus),
        "labels": {CLUSTER_LABEL: order.cluster},
        "tags": {"items": ["shoal"]},
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items()]},
    }
    if accelerator:
        properties["guestAccelerators"] = [{"acceleratorType": accelerator, "acceleratorCount": count}]
    return {
        "count": str(len(orders)),
        "minCount": "1",
        "perInstanceProperties": {name_of(order): {} for order in orders},
        "instanceProperties": properties,
        **({} if offer.zone else {"locationPolicy": {"targetShape": "ANY_SINGLE_ZONE"}}),
    }


def _disk(order: Order, machine: str, gpus: bool, settings: Mapping[str, str]) -> dict[str, str]:
    plain = ARM_IMAGE if order.offer.arch == "aarch64" else IMAGE
    return {
        "sourceImage": order.image or settings.get("image") or (GPU_IMAGE if gpus else plain),
        "diskSizeGb": str(order.disk_gb),
        "diskType": "hyperdisk-balanced" if machine.startswith(HYPERDISK_ONLY) else "pd-balanced",
    }


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


def offer_of(provider: str, machine: Body, type_: str) -> Offer:
    """One kind of machine in one zone, as `machineTypes` lists it."""
    _, gpu, gpus = split_type(type_)
    for built_in in machine.rows_or_none("accelerators"):
        gpu, gpus = built_in.text("guestAcceleratorType"), int(built_in.number("guestAcceleratorCount"))
    usual, memory = GPUS.get(gpu, (gpu, 0))
    zone = last_part(machine.text("zone"))
    return Offer(
        provider=provider,
        type=type_,
        region=zone.rpartition("-")[0],
        zone=zone,
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
    zone, state = last_part(instance.text("zone")), STATES.get(status, "pending")
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
        state=state,
        raw_state=status,
        host=public or private,
        user=USER,
        private_address=private,
        type=_type_of(instance),
        region=zone.rpartition("-")[0],
        zone=zone,
        market="spot" if spot else "on-demand",
        created=instance.time("creationTimestamp"),
        ending=state == "stopping",
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
    return sum(int(one.number("createdVmCount", 0) - one.number("deletedVmCount", 0)) for _, one in places(operation))


def places(operation: Body) -> list[tuple[str, Body]]:
    """Each zone that an order went to, with what became of it there."""
    return operation.piece_or_empty("instancesBulkInsertOperationMetadata").piece_or_empty("perLocationStatus").items()


def understand(status: int, data: Any) -> Refusal | None:
    """What an answer with an error status says; a 403 of Google's has four meanings that differ."""
    error = data.get("error") if isinstance(data, dict) else None
    if not isinstance(error, dict):
        return None
    message = str(error.get("message", ""))
    said = [one for part in ("details", "errors") for one in error.get(part) or [] if isinstance(one, dict)]
    reasons = {str(one.get("reason", "")) for one in said}
    trouble = next((TROUBLES[reason] for reason in TROUBLES if reason in reasons), None)
    return Refusal(trouble, _scope(trouble, message), message) if trouble else None


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
