"""What Google Compute Engine is asked for: machines, images, quotas and the firewall of the VPC. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.cloud.providers import api, responses

USER, CLUSTER = "ubuntu", "shoal-cluster"
TAG_LENGTH = 55
"""Google's limit is 63, with the names of our rules."""
NAME_LENGTH = 63
NOTICE_S = 120
"""How long before the end a spot machine gets notice. Without the request Google powers it off at once."""
SCOPE = "https://www.googleapis.com/auth/cloud-platform"
RESERVATION_KEY = "compute.googleapis.com/reservation-name"
MODELS = {"standard": "STANDARD", "flex-start": "FLEX_START", "reservation-bound": "RESERVATION_BOUND"}
"""`settings: {provisioning: ...}` -> Google's provisioning model."""
NOT_ON_DEMAND = ("a3-highgpu-1g", "a3-highgpu-2g", "a3-highgpu-4g", "a3-ultragpu", "a4-")
"""Types that are sold as spot, by flex-start or by reservation only (gpuhunt 0.1.34, read on 2026-11-16)."""
HYPERDISK_ONLY = ("a3-ultragpu", "a4", "c4", "g4", "n4")
"""Machine families that do not boot from a persistent disk."""
QUOTAS = {
    "a2-highgpu": "A100",
    "a2-megagpu": "A100",
    "a2-ultragpu": "A100_80GB",
    "a3-highgpu": "H100",
    "a3-edgegpu": "H100",
    "a3-megagpu": "H100_MEGA",
    "a3-ultragpu": "H200",
    "a4-": "B200",
    "g2-": "L4",
    "g4-": "RTX_PRO_6000",
}
"""Machine family -> the name of its GPU in quotas."""
IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-amd64"
ARM_IMAGE = "projects/ubuntu-os-cloud/global/images/family/ubuntu-2404-lts-arm64"
GPU_IMAGE = "projects/deeplearning-platform-release/global/images/family/common-cu129-ubuntu-2404-nvidia-580"
"""The same Ubuntu with NVIDIA's driver."""


def request_id(names: Sequence[str], offer: api.Offer) -> str:
    """Equal for the same machines, so that Google makes them once, even if ordered again."""
    return str(uuid.uuid5(uuid.NAMESPACE_OID, "\n".join([*offer.identity, *sorted(names)])))


def bulk_insert(names: Sequence[str], order: api.RentalOrder, settings: Mapping[str, str]) -> Any:
    """The request for identical machines. Google may make only some; the caller deletes a partial set."""
    offer = order.offer
    image = ARM_IMAGE if offer.arch == "aarch64" else IMAGE
    machine, accelerator, count = split_type(offer.type)
    gpus, spot, subnetwork = bool(offer.gpus or accelerator), offer.market == "spot", settings.get("subnetwork")
    usual_disk = "hyperdisk-balanced" if machine.startswith(HYPERDISK_ONLY) else "pd-balanced"
    model = "SPOT" if spot else MODELS[settings.get("provisioning", "standard").lower()]
    login = f"{USER}:{order.public_key.strip()}"
    metadata = {"ssh-keys": login, "enable-oslogin": "FALSE", "startup-script": order.user_data}
    disk = {
        "sourceImage": image_path(order.image or settings.get("image", "")) or (GPU_IMAGE if gpus else image),
        "diskSizeGb": str(order.disk_gb),
        "diskType": settings.get("disk_type", usual_disk),
    }
    access = [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}]
    interface = {
        "network": None if subnetwork else settings.get("network", "global/networks/default"),
        "subnetwork": subnetwork,
        "accessConfigs": None if settings.get("external_address") == "no" else access,
    }
    scheduling = {
        "provisioningModel": model,
        "onHostMaintenance": "TERMINATE" if gpus or spot else "MIGRATE",
        "automaticRestart": False,
        "instanceTerminationAction": "DELETE" if spot or order.lifetime else None,
        "maxRunDuration": {"seconds": str(order.lifetime)} if order.lifetime else None,
        "preemptionNoticeDuration": {"seconds": str(NOTICE_S)} if spot else None,
    }
    account = {"email": settings.get("service_account", ""), "scopes": [SCOPE]}
    attached = [{"acceleratorType": accelerator, "acceleratorCount": count}]
    properties = {
        "machineType": machine,
        "disks": [{"boot": True, "autoDelete": True, "initializeParams": disk}],
        "guestAccelerators": attached if accelerator else None,
        "networkInterfaces": [interface],
        "scheduling": scheduling,
        "labels": {CLUSTER: order.cluster},
        "tags": {"items": ["shoal", tag_of(order.cluster)]},
        "minCpuPlatform": settings.get("min_cpu_platform"),
        "reservationAffinity": _reservation(settings, model),
        "resourcePolicies": [settings.get("placement")] if settings.get("placement") else None,
        "serviceAccounts": [account] if account["email"] else None,
        "metadata": {"items": [{"key": key, "value": value} for key, value in metadata.items() if value]},
    }
    request = {"count": str(len(names)), "minCount": "1", "perInstanceProperties": {name: {} for name in names}}
    return responses.drop_none({**request, "instanceProperties": properties})


def insert(name: str, order: api.RentalOrder, settings: Mapping[str, str]) -> Any:
    """The request for one machine that stays: it restarts by itself, and has its reserved address."""
    properties = bulk_insert([name], order, settings)["instanceProperties"]
    zone = f"zones/{order.offer.zone}"
    for disk in properties["disks"]:
        disk["initializeParams"]["diskType"] = f"{zone}/diskTypes/{disk['initializeParams']['diskType']}"
    for gpu in properties.get("guestAccelerators", ()):
        gpu["acceleratorType"] = f"{zone}/acceleratorTypes/{gpu['acceleratorType']}"
    for access in properties["networkInterfaces"][0].get("accessConfigs", ()) if order.address else ():
        access["natIP"] = order.address
    machine = f"{zone}/machineTypes/{properties['machineType']}"
    scheduling = {**properties["scheduling"], "automaticRestart": True}
    return {**properties, "name": name, "machineType": machine, "scheduling": scheduling}


def address_name(cluster: str, node: str) -> str:
    """The name of a member's reserved address. Google allows 63 characters."""
    name = f"shoal-{cluster}--{node}"
    return name if len(name) <= NAME_LENGTH else f"shoal-{uuid.uuid5(uuid.NAMESPACE_OID, name).hex}"


def address_mark(cluster: str, node: str) -> str:
    """The description of a member's reserved address: it tells whose it is, however long the name."""
    return f"{cluster}--{node}--address"


def _reservation(settings: Mapping[str, str], model: str) -> dict[str, Any] | None:
    """Which reservation the machines come from. Google refuses the default for machines of flex-start."""
    if name := settings.get("reservation"):
        return {"consumeReservationType": "SPECIFIC_RESERVATION", "key": RESERVATION_KEY, "values": [name]}
    return {"consumeReservationType": "NO_RESERVATION"} if model == "FLEX_START" else None


def not_sold(type: str, market: api.Market, settings: Mapping[str, str]) -> str:
    """How a type is sold, where Google does not sell it as ordered; empty where it does."""
    reserved = "reservation" in settings or settings.get("provisioning", "standard").lower() != "standard"
    if market == "spot" or reserved or not split_type(type)[0].startswith(NOT_ON_DEMAND):
        return ""
    return (
        f"Google does not sell {type} on demand: use `market: spot`, or for the account `settings: {{provisioning: "
        "flex-start}` or `{reservation: NAME}`"
    )


def tag_of(cluster: str) -> str:
    """The network tag of a cluster's machines."""
    return f"shoal-{cluster}"[:TAG_LENGTH].rstrip("-")


def image_path(image: str) -> str:
    """An image as the API names it. `debian-cloud/debian-12` is a project's family, `mine` a family of our project."""
    if not image or image.startswith(("projects/", "global/", "https://")):
        return image
    project, _, family = image.rpartition("/")
    return f"projects/{project}/global/images/family/{family}" if project else f"global/images/family/{family}"


def quota_metric(offer: api.Offer) -> str:
    """The regional quota of an offer's GPUs; empty without GPUs."""
    machine, accelerator, _ = split_type(offer.type)
    gpu = next((name for family, name in QUOTAS.items() if machine.startswith(family)), "")
    gpu = accelerator.removeprefix("nvidia-").removeprefix("tesla-").upper().replace("-", "_") or gpu
    return f"{'PREEMPTIBLE_' if offer.market == 'spot' else ''}NVIDIA_{gpu}_GPUS" if gpu else ""


def split_type(name: str) -> tuple[str, str, int]:
    """`n1-standard-8+nvidia-tesla-t4:2` has attached GPUs; other families have theirs built in."""
    machine, _, extra = name.partition("+")
    accelerator, _, count = extra.partition(":")
    return machine, accelerator, int(count or 1) if accelerator else 0
