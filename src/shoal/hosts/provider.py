"""The contract of a provider."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from shoal import registry
from shoal.hosts.api import Target
from shoal.spec.finding import Finding
from shoal.spec.member import RentedMachine, Shape


@dataclass(frozen=True)
class Request:
    """A host that is wanted."""

    name: str
    shape: Shape
    machine: RentedMachine | None = None
    """What to rent, from a provider account; None where the provider makes hosts of a shape."""


@dataclass(frozen=True)
class HostQuote:
    """What a host is going to cost, before it is rented."""

    name: str
    provider: str
    """The provider account."""
    type: str
    place: str
    disk_gb: int
    keep_address: bool
    usd_hour: float | None
    """Of the machine alone; None where it is not known."""

    def __str__(self) -> str:
        address = " and a reserved address" if self.keep_address else ""
        price = "price unknown" if self.usd_hour is None else f"${self.usd_hour:.4g} an hour"
        return f"{self.type} in {self.place} with a disk of {self.disk_gb} GB{address}: {price}"


@dataclass(frozen=True)
class Instance:
    """A host that a provider has made."""

    name: str
    state: str
    """`running`, `starting` (made, and SSH has not answered yet), `stopped` or `frozen`."""
    target: Target
    shape: Shape = field(default_factory=Shape)
    """What it was made as. It stays so: a host of another shape is another host."""
    type: str = ""
    place: str = ""
    """What was rented, and where; empty for a host that is not rented."""


Progress = Callable[[str, float], None]
"""Told what is being done and how much of it is done, 0 to 1."""


class Provider(Protocol):
    """Makes and removes hosts. After it has made one, everything else goes over SSH."""

    def check(self, requests: Sequence[Request]) -> list[Finding]:
        """What stands in the way of making these hosts on this machine, with what to install. Changes nothing."""

    async def instances(self, cluster: str) -> list[Instance]:
        """Every instance of the cluster, whatever its state. Raises ProviderError when it cannot know.

        Asked of every provider in each run, so that nothing is left running unseen: quick, and without any rights,
        where the cluster has nothing there.
        """

    async def create(self, cluster: str, requests: Sequence[Request], progress: Progress) -> list[Instance]:
        """Make the hosts that are not there yet, start those that are stopped, and return when SSH answers on each.

        Idempotent by name: called again after a kill, it finishes what was begun. A host that fails stops no other;
        the ProviderError raised at the end has its name and the reason in `hosts`.
        """

    async def delete(self, cluster: str, names: Sequence[str], progress: Progress) -> None:
        """Remove these hosts and all they left. A host that is gone already is no error."""

    async def destroy(self, cluster: str, progress: Progress) -> None:
        """Remove every host of the cluster and what the provider made around them."""


PROVIDERS = {"sandbox": "shoal.sandbox.provider:SandboxProvider"}
"""Name -> `module:class`. The module is imported when the provider is asked for."""

GROUP = "shoal.providers"
"""The entry point group by which an installed package adds a provider."""


def names() -> tuple[str, ...]:
    """Every provider: those of the table, and those of installed packages."""
    return tuple(registry.names(PROVIDERS, GROUP))


def provider(name: str) -> Provider:
    """The provider of that name. Raises ProviderError with the names there are."""
    instance: Provider = registry.make(name, PROVIDERS, GROUP)
    return instance
