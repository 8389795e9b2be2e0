"""A member of the cluster: a host that the spec names, with its roles. Needs no pydantic, which takes 0.3 s to load."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

Role = Literal["controller", "login", "compute"]
WIREGUARD_SUBNET = "10.77.0.0/16"
WIREGUARD_PORT = 51820
"""The private network, where the file says nothing else."""


@dataclass(frozen=True)
class Shape:
    """The machine a provider is asked to make."""

    image: str = "debian12"
    cpus: int | None = None
    memory_mb: int | None = None
    disk_mb: int | None = None
    gpus: int = 0
    site: str = "a"
    cgroups: bool = False
    container: bool = False
    """A container without systemd, TUN, mounts and open ports, as some providers rent out; else a whole machine."""
    vm: bool = False
    """A virtual machine with a kernel of its own; else a container on the kernel of this machine."""
    engine: str = ""
    """The container engine that runs it, `podman` or `docker`; empty for a host that Shoal runs itself."""


@dataclass(frozen=True)
class RentedMachine:
    """The machine that a provider account is to rent out for a member that is always there."""

    type: str
    region: str = ""
    zone: str = ""
    image: str = ""
    """The provider's name of the image; empty for its default."""
    disk_gb: int = 100
    keep_address: bool = True
    """Its external address is reserved, and survives a stop."""
    usd_hour: float | None = None
    """Its price, where the file gives one."""


@dataclass(frozen=True)
class Placement:
    """Where a rented host is, and how to log in."""

    address: str
    user: str
    port: int = 22
    identity: Path | None = None


@dataclass(frozen=True)
class Member:
    """One host of the cluster."""

    name: str
    roles: frozenset[Role]
    nodeset: str
    """The nodeset it belongs to; `controller` and `login` for those two."""
    address: str | None = None
    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    provider: str | None = None
    """The provider that makes it, or the provider account to rent it from; None for a host that is there already."""
    shape: Shape = field(default_factory=Shape)
    features: tuple[str, ...] = ()
    weight: int = 1
    endpoint: str | None = None
    """Where hosts of other sites reach its WireGuard port, where that cannot be found out."""
    rented: bool = False
    """It comes when a job needs it and goes again: the controller makes it, not who runs `shoal up`."""
    shards: int = 0
    mps: int = 0
    """How many parts each of its GPUs has, for jobs that share one."""
    driver: str = ""
    """`nvidia`: the driver of its GPUs is installed where it has none."""
    machine: RentedMachine | None = None
    """What `shoal up` rents for it; None where it is no rented member."""

    @property
    def site(self) -> str:
        """Where it is: hosts of one site see each other directly."""
        return self.shape.site
