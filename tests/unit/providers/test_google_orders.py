"""What Google Compute Engine is asked for: machines and images."""

from dataclasses import replace
from typing import Any

from tests.contract.rental_providers import CASES, PUBLIC_KEY, Trial
from tests.support.cases import cases

from shoal.cloud.providers import google_orders
from shoal.cloud.providers.api import FailureKind, Offer, Query, RentalOrder

CASE = CASES["gcp"]
SPOT = RentalOrder(
    "reef", "gpu1", "t0ken1", replace(CASE.offer, gpus=1), PUBLIC_KEY, user_data="#!/bin/sh\ntrue\n", lifetime=3600
)
CPU = replace(SPOT, offer=Offer("acme", "e2-standard-2", "us-east1", "us-east1-b"), lifetime=0, user_data="")


def ordered(order: RentalOrder, settings: dict[str, str]) -> Any:
    """The request for one machine."""
    return google_orders.bulk_insert(["gpu1--t0ken1"], order, settings)["instanceProperties"]


def test_spot_order_has_all_fields() -> None:
    assert google_orders.bulk_insert(["gpu1--t0ken1", "gpu2--t0ken2"], SPOT, {}) == {
        "count": "2",
        "minCount": "1",
        "perInstanceProperties": {"gpu1--t0ken1": {}, "gpu2--t0ken2": {}},
        "instanceProperties": {
            "machineType": "a3-highgpu-1g",
            "disks": [
                {
                    "boot": True,
                    "autoDelete": True,
                    "initializeParams": {
                        "sourceImage": google_orders.GPU_IMAGE,
                        "diskSizeGb": "100",
                        "diskType": "pd-balanced",
                    },
                }
            ],
            "networkInterfaces": [
                {
                    "network": "global/networks/default",
                    "accessConfigs": [{"type": "ONE_TO_ONE_NAT", "name": "External NAT"}],
                }
            ],
            "scheduling": {
                "provisioningModel": "SPOT",
                "onHostMaintenance": "TERMINATE",
                "automaticRestart": False,
                "instanceTerminationAction": "DELETE",
                "maxRunDuration": {"seconds": "3600"},
                "preemptionNoticeDuration": {"seconds": "120"},
            },
            "labels": {"shoal-cluster": "reef"},
            "tags": {"items": ["shoal", "shoal-reef"]},
            "metadata": {
                "items": [
                    {"key": "ssh-keys", "value": f"ubuntu:{PUBLIC_KEY}"},
                    {"key": "enable-oslogin", "value": "FALSE"},
                    {"key": "startup-script", "value": "#!/bin/sh\ntrue\n"},
                ]
            },
        },
    }


def test_machine_without_gpus_migrates_and_has_no_termination_action() -> None:
    properties = ordered(CPU, {})
    assert properties["scheduling"] == {
        "provisioningModel": "STANDARD",
        "onHostMaintenance": "MIGRATE",
        "automaticRestart": False,
    }
    assert properties["disks"][0]["initializeParams"]["sourceImage"] == google_orders.IMAGE
    arm = replace(CPU, offer=replace(CPU.offer, arch="aarch64"))
    disk = ordered(arm, {})["disks"][0]
    assert disk["initializeParams"]["sourceImage"] == google_orders.ARM_IMAGE


def test_on_demand_order_with_a_lifetime_is_deleted_at_its_end() -> None:
    scheduling = ordered(replace(CPU, lifetime=60), {})["scheduling"]
    assert scheduling["instanceTerminationAction"] == "DELETE"
    assert scheduling["maxRunDuration"] == {"seconds": "60"}


def test_settings_choose_network_address_and_image() -> None:
    settings = {"subnetwork": "regions/us-east1/subnetworks/lab", "external_address": "no", "image": "global/images/my"}
    properties = ordered(SPOT, settings)
    assert properties["networkInterfaces"] == [{"subnetwork": "regions/us-east1/subnetworks/lab"}]
    assert properties["disks"][0]["initializeParams"]["sourceImage"] == "global/images/my"
    own = ordered(replace(SPOT, image="global/images/own"), settings)
    assert own["disks"][0]["initializeParams"]["sourceImage"] == "global/images/own"


@cases(
    "image, path",
    ("debian-cloud/debian-12", "projects/debian-cloud/global/images/family/debian-12"),
    ("my-family", "global/images/family/my-family"),
    ("projects/p/global/images/one", "projects/p/global/images/one"),
)
def test_image_is_a_family_or_a_path(image: str, path: str) -> None:
    disk = ordered(replace(SPOT, image=image), {})["disks"][0]
    assert disk["initializeParams"]["sourceImage"] == path


def test_settings_choose_reservation_placement_platform_account_and_disk() -> None:
    settings = {
        "reservation": "june",
        "placement": "projects/p/regions/r/resourcePolicies/near",
        "min_cpu_platform": "Intel Sapphire Rapids",
        "service_account": "train@p.iam.gserviceaccount.com",
        "disk_type": "pd-ssd",
    }
    properties = ordered(replace(SPOT, offer=replace(SPOT.offer, market="on-demand")), settings)
    assert properties["reservationAffinity"] == {
        "consumeReservationType": "SPECIFIC_RESERVATION",
        "key": "compute.googleapis.com/reservation-name",
        "values": ["june"],
    }
    assert properties["resourcePolicies"] == ["projects/p/regions/r/resourcePolicies/near"]
    assert properties["minCpuPlatform"] == "Intel Sapphire Rapids"
    assert properties["serviceAccounts"][0]["email"] == "train@p.iam.gserviceaccount.com"
    assert properties["disks"][0]["initializeParams"]["diskType"] == "pd-ssd"
    flexible = ordered(replace(CPU, lifetime=60), {"provisioning": "flex-start"})
    assert flexible["scheduling"]["provisioningModel"] == "FLEX_START"
    assert flexible["reservationAffinity"] == {"consumeReservationType": "NO_RESERVATION"}


async def test_type_that_is_not_sold_on_demand_is_not_ordered(it: Trial) -> None:
    order = replace(await it.order(), offer=replace(CASE.offer, market="on-demand"))
    [outcome] = await it.renter.create([order])
    assert outcome.failure is FailureKind.INVALID
    assert "does not sell a3-highgpu-1g on demand: use `market: spot`" in outcome.message
    listed = await it.renter.offers(Query(types=(CASE.offer.type,), market="on-demand"))
    assert {(one.available, bool(one.note)) for one in listed} == {("no", True)}


def test_gpus_are_attached_to_machines_without_gpus() -> None:
    offer = replace(SPOT.offer, type="n1-standard-8+nvidia-tesla-t4:2", gpus=0)
    properties = ordered(replace(SPOT, offer=offer), {})
    assert properties["machineType"] == "n1-standard-8"
    assert properties["guestAccelerators"] == [{"acceleratorType": "nvidia-tesla-t4", "acceleratorCount": 2}]
    assert properties["scheduling"]["onHostMaintenance"] == "TERMINATE"


@cases(
    "type_, disk",
    ("a2-highgpu-1g", "pd-balanced"),
    ("a3-ultragpu-8g", "hyperdisk-balanced"),
    ("a4-highgpu-8g", "hyperdisk-balanced"),
)
def test_newer_families_boot_from_a_hyperdisk(type_: str, disk: str) -> None:
    properties = ordered(replace(SPOT, offer=replace(SPOT.offer, type=type_)), {})
    assert properties["disks"][0]["initializeParams"]["diskType"] == disk


def test_request_id_depends_on_machines_and_zone_but_not_on_order() -> None:
    offer, there = SPOT.offer, replace(SPOT.offer, zone="us-central1-a")
    assert google_orders.request_id(["a", "b"], offer) == google_orders.request_id(
        ["b", "a"], replace(offer, usd_hour=9.0)
    )
    made = {
        google_orders.request_id(names, at)
        for names, at in ((["a"], offer), (["b"], offer), (["a", "b"], offer), (["a"], there))
    }
    assert len(made) == 4
