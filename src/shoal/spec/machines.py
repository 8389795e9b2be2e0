"""What hosts of the file have in common: how to log in, what the sandbox makes, and what is rented for good."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, StrictBool

from shoal.spec import values
from shoal.spec.checks import choice
from shoal.spec.rental import SANDBOX, ImageName, MachineType, Money, ProviderName, Region, Zone
from shoal.spec.values import Between, FilePath, Port, ShortForm, SpecModel, UserName

IMAGES = ("debian11", "debian12", "debian13", "sid")
DEFAULT_IMAGE = "debian12"
ENGINES = ("podman", "docker")
SANDBOX_KINDS = ("container", "vm", *ENGINES)


class LoginFields(SpecModel):
    """How to log in to hosts that exist already."""

    user: UserName | None = None
    """The user to log in as, for every host here without its own."""
    port: Port | None = None
    """The port of the SSH daemon, for every host here without its own."""
    identity: FilePath | None = None
    """The private key to log in with, for every host here without its own."""


SandboxKind = Annotated[Literal["container", "vm", "podman", "docker"], BeforeValidator(choice("kind", SANDBOX_KINDS))]


class Sandbox(ShortForm):
    """The hosts that the sandbox makes, for those that say nothing themselves.

    In the file it is a word (`sandbox: vm`) or a mapping: `{kind: vm}`.
    """

    short_schema: ClassVar = {"type": "string", "enum": [*SANDBOX_KINDS]}
    refusal = ("not a kind of sandbox host", f"choose one of {', '.join(SANDBOX_KINDS)}, or write {{kind: vm}}")

    kind: SandboxKind = "container"
    """`container`: quick, needs root. `vm`: has its own kernel, under QEMU. `podman`, `docker`: run by that engine."""

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return {"kind": value} if isinstance(value, str) else None


class MachineFields(SpecModel):
    """The hosts that a provider makes."""

    provider: ProviderName | None = None
    """Who makes the hosts. `sandbox` makes real Debian hosts on this machine; else an account under `providers`."""
    kind: SandboxKind | None = None
    """`container`, `vm`, `podman` or `docker`; without it, as the file's `sandbox` says."""
    image: ImageName = DEFAULT_IMAGE
    """The sandbox's: `debian11`, `debian12`, `debian13` or `sid`. Rented: the provider's; without it, the default."""
    cpus: Annotated[int, Between(1, 1024)] | None = None
    """CPUs of each host."""
    memory: values.Memory | None = None
    """Memory of each host, at least 256M."""
    disk: values.Disk | None = None
    """Disk space of each host. Without it, 100G where it is rented, else whatever this machine has."""
    gpus: Annotated[int, Between(0, 16)] = 0
    """Simulated GPUs of each host."""
    cgroups: StrictBool = False
    """Give the hosts writable cgroup controllers, so that Slurm confines jobs. With cgroup v1, only with debian12."""


class HasSite(SpecModel):
    """Where hosts are."""

    site: values.SiteName = "a"
    """Their site. Hosts of a site reach each other directly; a job stays on one site unless it asks for more."""


class RentedHostFields(MachineFields):
    """The controller and login hosts may be rented: `shoal up` orders them, `shoal down` releases them."""

    type: MachineType | None = None
    """Rented: the provider's name of the machine, `e2-standard-2`."""
    region: Region | None = None
    """Rented: the region; without it, the cheapest."""
    zone: Zone | None = None
    """Rented: the zone; without it, any."""
    address: StrictBool = True
    """Rented: reserve its external address, so that it survives a stop. `false`: it may get another one then."""
    usd_hour: Money | None = None
    """Rented: its price in US dollars an hour, where Shoal does not know it."""

    @property
    def is_rented(self) -> bool:
        """Whether it is meant to be rented, even where a field for that is missing."""
        return "provider" in self.invalid or self.provider not in (None, SANDBOX)


RENTED_FIELDS = tuple(RentedHostFields.__annotations__)
"""The fields that only a rented host has."""
