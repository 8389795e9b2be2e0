"""The machines of a simulated cloud: what there is, what was ordered, and what became of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from shoal.providers.rental import Billing
from shoal.providers.rental import Market as Buying

Phase = Literal["pending", "up", "stopping", "error", "gone"]


@dataclass(frozen=True)
class MachineType:
    """A kind of machine that the cloud has."""

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
    """Zone or region -> how many there are; none there is listed without capacity."""


@dataclass(frozen=True)
class Profile:
    """How long things take in this cloud, and what its machines are."""

    user: str = "root"
    boot_seconds: float = 60.0
    address_seconds: float = 0.0
    """From the order until the address is known."""
    stop_seconds: float = 5.0
    notice_seconds: float = 0.0
    unique_names: bool = False
    container: bool = False
    billing: Billing = field(default_factory=Billing)


@dataclass(frozen=True)
class Wanted:
    """A machine as it was ordered."""

    name: str
    type: str
    region: str
    zone: str = ""
    market: Buying = "on-demand"
    public_keys: tuple[str, ...] = ()
    """Lines for the login user's authorized_keys."""
    user_data: str = ""
    """A script that it runs when it boots."""
    marks: Mapping[str, Any] = field(default_factory=dict)
    """What the API echoes: tags, labels, env."""
    lifetime: float = 0.0
    """Seconds after which the cloud ends it; 0 is never."""

    @property
    def place(self) -> str:
        return self.zone or self.region


@dataclass
class Machine:
    """A machine that somebody pays for, until it is gone."""

    id: str
    wanted: Wanted
    usd_hour: float
    ordered: float
    boot_seconds: float
    name: str = ""
    """A name that was given to it later."""
    phase: Phase = "pending"
    up: float | None = None
    stopping: float | None = None
    """When it was given back, or taken away."""
    ended: float | None = None
    """When the bill for it ends."""
    takes_away: float | None = None
    """When the cloud will take it away, which it has said."""
    preempted: bool = False
    fate: str = ""
    """`dies`, `preempt` or nothing: what happens to it `fate_after` seconds after it is up."""
    fate_after: float = 0.0
    unseen_until: float = 0.0
    """Lists do not show it before."""
    shown_until: float = 0.0
    """Lists show it so long after it is gone."""
    reachable: bool = True
    gpu_works: bool = True
    host: str = ""
    port: int = 22
    private_address: str = ""

    @property
    def live(self) -> bool:
        return self.phase in ("pending", "up", "error")
