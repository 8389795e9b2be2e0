"""The machines that the simulated Google Compute Engine has: those of our table of prices, and a few without GPUs."""

from __future__ import annotations

from shoal.providers.prices import Prices, shipped
from shoal.simulators.machines import MachineType

ZONES = ("us-central1-a", "us-central1-b", "us-central1-c", "us-east1-b", "us-west1-b", "europe-west4-b")
REGION = "us-central1"
MANY = 1000
GPUS = {
    ("L4", 24): "nvidia-l4",
    ("A100", 40): "nvidia-tesla-a100",
    ("A100", 80): "nvidia-a100-80gb",
    ("H100", 80): "nvidia-h100-80gb",
    ("H200", 141): "nvidia-h200-141gb",
    ("B200", 180): "nvidia-b200",
}
"""A GPU and its memory -> Google's name of it."""
UNPRICED = 1.0
"""What a machine costs here whose price the table does not know."""


def _types() -> tuple[MachineType, ...]:
    table = Prices(shipped())
    rows = {row.type: row for row in table if row.kind == "gcp"}
    made = []
    for name, row in rows.items():
        asked, spot = table.find("gcp", name, REGION, "on-demand"), table.find("gcp", name, REGION, "spot")
        made.append(
            MachineType(
                name,
                GPUS[row.gpu, row.gpu_memory_gb],
                row.gpus,
                row.gpu_memory_gb,
                row.cpus,
                row.memory_gb,
                usd_hour=(asked and asked.usd_hour) or UNPRICED,
                spot_usd_hour=(spot and spot.usd_hour) or UNPRICED,
                arch=row.arch,
                places={zone: MANY for zone in ZONES if _costs_the_same(table, name, zone)},
            )
        )
    return (
        MachineType("e2-standard-2", cpus=2, memory_gb=8, usd_hour=0.067, places=dict.fromkeys(ZONES, MANY)),
        MachineType("n1-standard-4", cpus=4, memory_gb=15, usd_hour=0.19, places=dict.fromkeys(ZONES, MANY)),
        MachineType("n1-standard-4+nvidia-tesla-t4:1", "nvidia-tesla-t4", 1, 16, 4, 15, 0.54, places={ZONES[0]: MANY}),
        *made,
    )


def _costs_the_same(table: Prices, name: str, zone: str) -> bool:
    """A simulated cloud has one price for a type: it is had where the table has that one."""
    there, here = (table.find("gcp", name, region, "on-demand") for region in (zone.rpartition("-")[0], REGION))
    return (there and there.usd_hour) == (here and here.usd_hour)


TYPES = _types()
