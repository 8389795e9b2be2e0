"""Machines of a simulated cloud: their types, orders, life and faults."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from shoal.cloud.providers.api import Billing, Offer
from shoal.cloud.providers.api import Market as PricingModel
from shoal.errors import UsageError

REAL_HOST_STOP_S = 1.0
"""Stop time beside that of the real host."""

Phase = Literal["pending", "up", "stopped", "stopping", "error", "gone"]


@dataclass(frozen=True)
class MachineType:
    """A type of machine that the cloud offers."""

    name: str
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gb: int = 0
    cpus: int = 1
    memory_gb: int = 1
    usd_hour: float = 1.0
    spot_usd_hour: float | None = None
    arch: str = "x86_64"
    places: Mapping[str, int] = field(default_factory=dict)
    """Zone or region -> capacity. With 0 it is listed without capacity."""

    @classmethod
    def of(cls, row: Offer, **more: Any) -> MachineType:
        """A type as our table of prices has it. A machine without a price there costs 1 USD an hour."""
        shape = (row.gpu, row.gpus, row.gpu_memory_gb, row.cpus, row.memory_gb, row.usd_hour or 1.0)
        return replace(cls(row.type, *shape, arch=row.arch), **more)


@dataclass(frozen=True)
class Profile:
    """Delays of this cloud, and properties of its machines."""

    user: str = "root"
    boot_s: float = 60.0
    address_s: float = 0.0
    """From the order until the API shows an address."""
    stop_s: float = 5.0
    notice_s: float = 0.0
    notice_shuts_down: bool = False
    """The notice is that the machine's system is told to shut down, and has `notice_s` for it."""
    unique_names: bool = False
    container: bool = False
    restarts: bool = False
    """The cloud starts a machine again whose first process ends; the bill goes on."""
    billing: Billing = field(default_factory=Billing)

    def adjusted(self, *, real_hosts: bool, boot_s: float | None) -> Profile:
        """With real hosts, those hosts' delays in place of the provider's; `boot_s` overrides both."""
        boot = boot_s if boot_s is not None else 0.0 if real_hosts else self.boot_s
        stop = min(self.stop_s, REAL_HOST_STOP_S) if real_hosts else self.stop_s
        address = min(self.address_s, boot / 4)
        return replace(self, boot_s=boot, address_s=address, stop_s=stop)


@dataclass(frozen=True)
class InstanceOrder:
    """An order for one machine."""

    name: str
    type: str
    region: str
    zone: str = ""
    market: PricingModel = "on-demand"
    public_keys: tuple[str, ...] = ()
    """Lines for the login user's authorized_keys."""
    user_data: str = ""
    """The script that it runs at boot."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """Data that the API echoes: tags, labels, env."""
    lifetime: float = 0.0
    """Seconds until the cloud ends it; 0 is never."""
    notice_s: float | None = None
    """The notice that was ordered; None for the cloud's own."""
    image: str = ""
    """The image's name: the system of a real host follows it."""

    @property
    def place(self) -> str:
        return self.zone or self.region


def read_cloud_config(text: str) -> tuple[tuple[str, ...], str]:
    """The keys and the script of a `#cloud-config`: the files that its commands run."""
    config = json.loads(text.partition("\n")[2])
    files = {file["path"]: file["content"] for file in config.get("write_files", [])}
    return tuple(config["ssh_authorized_keys"]), "".join(files[command[-1]] for command in config.get("runcmd", []))


@dataclass
class SimulatedInstance:
    """A machine from its order to the end of its bill."""

    id: str
    order: InstanceOrder
    usd_hour: float
    ordered: float
    boot_seconds: float
    name: str = ""
    """Its name after a rename."""
    phase: Phase = "pending"
    up: float | None = None
    first_up: float | None = None
    """When it was up for the first time; `up` is that after its last start."""
    stopping: float | None = None
    """When it was deleted or preempted."""
    ended: float | None = None
    """When the bill for it ends."""
    takes_away: float | None = None
    """When the announced preemption happens."""
    preempted: bool = False
    fate: str = ""
    """`dies`, `preempt` or empty: its fault, `fate_after` seconds after it is up."""
    fate_after: float = 0.0
    unseen_until: float = 0.0
    """Lists show it from then on."""
    shown_until: float = 0.0
    """Lists show it until then although it is gone."""
    reachable: bool = True
    gpu_works: bool = True
    late_address_s: float = 0.0
    """The API shows its address so much later."""
    runs_user_data: bool = True
    """Without it the machine shows a host key of its own."""
    host: str = ""
    port: int = 22
    private_address: str = ""
    external_address: str = ""
    """The reserved address that it has; lists then show no other."""
    stopped_at: float | None = None
    """Since when it is stopped, and not billed."""
    unbilled_s: float = 0.0
    """How long it was stopped before."""
    started_at: float | None = None
    """When it was last started after a stop."""

    @property
    def live(self) -> bool:
        return self.phase in ("pending", "up", "stopped", "error")


def numeric_id(id: str) -> int:
    """An id as a number, where an API has numbers; that of a machine made twice by a fault is hexadecimal."""
    return int(id) if id.isdigit() else int(id, 16)


KINDS = (
    "stockout", "quota", "rate", "error-after-create", "error-before-create", "slow-boot", "never-reachable", "dies",
    "preempt", "lagging-list", "duplicate-name", "price-change", "bad-gpu", "list-fails", "balance", "auth",
    "other-host-key", "late-address",
)  # fmt: skip
DEFAULT_DELAYS_S = {"slow-boot": 600.0, "dies": 5.0, "preempt": 5.0, "lagging-list": 30.0, "late-address": 120.0}
"""Default duration of a fault: extra boot time, twice time after boot, time missing from lists or without address."""


@dataclass(frozen=True)
class Fault:
    """A fault that the simulator shows on purpose."""

    kind: str
    times: int = 1
    """How often; -1 is always."""
    type: str = ""
    region: str = ""
    seconds: float | None = None

    @property
    def after(self) -> float:
        return DEFAULT_DELAYS_S.get(self.kind, 0.0) if self.seconds is None else self.seconds

    def concerns(self, type: str, place: Iterable[str]) -> bool:
        return self.type in ("", type) and (not self.region or self.region in set(place))


def read_faults(data: Any) -> list[Fault]:
    """Faults from JSON. Raises ValueError that names the wrong fault."""
    if not isinstance(data, list):
        raise ValueError("faults must be a list of objects")
    faults = []
    for count, entry in enumerate(data):
        unknown = set(entry) - set(Fault.__dataclass_fields__) if isinstance(entry, dict) else {"?"}
        if unknown or entry.get("kind") not in KINDS:
            known = ", ".join(KINDS)
            raise ValueError(f"fault {count}: kind must be one of {known}; other keys are times, type, region, seconds")
        if not isinstance(entry.get("times", 1), int) or not isinstance(entry.get("seconds", 0), int | float):
            raise ValueError(f"fault {count}: times must be a whole number (-1 for always), seconds a number")
        faults.append(Fault(**entry))
    return faults


def read_fault_file(path: Path) -> list[Fault]:
    """The faults in a JSON file. Raises UsageError."""
    try:
        return read_faults(json.loads(path.read_text()))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise UsageError(f"{path}: {error}", hint='write it like [{"kind": "stockout", "times": -1}]') from None
