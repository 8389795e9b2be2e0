"""What some providers can do beside renting machines out: quotas, firewalls, rented hosts.

Code asks `isinstance(client, HasQuotas)`, never for a provider's name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from shoal.cloud.providers.api import Offer, RentedInstance


@dataclass(frozen=True)
class Quota:
    """A limit of the account, and how much of it one machine of an offer takes."""

    name: str
    """As the provider calls it, with its place: `NVIDIA_L4_GPUS in us-central1`."""
    limit: float
    usage: float
    need: float

    @property
    def machines(self) -> int:
        """How many more machines it allows."""
        return int(max(0.0, self.limit - self.usage) // self.need) if self.need else 0


@dataclass(frozen=True)
class FirewallFix:
    """A rule of a provider's firewall that is not as the file says."""

    reason: str
    """How it differs, or why it could not be read or changed."""
    command: str
    """What makes it so, for a shell of someone who may."""


@runtime_checkable
class HasFirewall(Protocol):
    """A provider whose firewall must admit the cluster's ports. `create` makes its rules, where our key may."""

    async def firewall_fixes(self, cluster: str, ports: Sequence[str]) -> list[FirewallFix]:
        """What is to be done by hand, if our key may not. Changes nothing."""


@runtime_checkable
class HasQuotas(Protocol):
    """A provider whose API tells how much of its quotas is left."""

    async def quotas(self, offer: Offer) -> list[Quota]:
        """The quotas that a machine of this offer takes from."""


@dataclass(frozen=True)
class ReservedAddress:
    """An external address that the account keeps, whether a machine has it or not."""

    id: str
    """As the provider names it."""
    address: str
    node: str
    """The member that it is for."""
    region: str
    instance: str = ""
    """The id of the machine that has it."""


@runtime_checkable
class KeepsMachines(Protocol):
    """A provider whose machines can stay for good: a stop keeps their disk, and a reserved address.

    `create` takes one permanent order at a time. All of these raise ProviderError, and all may be repeated.
    """

    async def addresses(self, cluster: str) -> list[ReservedAddress]:
        """Every address that is reserved for a member of the cluster. An error raises; it is never an empty list."""

    async def reserve_address(self, cluster: str, node: str, region: str) -> ReservedAddress:
        """Reserve an address for a member, or return the one it has there."""

    async def attach_address(self, address: ReservedAddress, machine: RentedInstance) -> None:
        """Give a running machine its address, where the order could not."""

    async def release_address(self, address: ReservedAddress) -> None:
        """Give an address back. One that is gone is no error."""

    async def start(self, machine: RentedInstance) -> None:
        """Start a machine that is stopped."""
