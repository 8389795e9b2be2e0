"""The contract of a provider that rents machines out: what can be had, for how much, and what we have there.

A renter talks to one HTTP API and knows nothing of Slurm, of the ledger or of money limits. What it can do is data
(`Abilities`): code asks for an ability, never for a provider's name.

    offers ──▶ Offer ──▶ Order (an offer, for one node, with our token) ──create──▶ Outcome
                                                               rented ──▶ Rented      delete ──▶ Outcome

Nothing here retries a create. An answer that leaves open whether a machine was made is the outcome `AMBIGUOUS`: the
caller looks for the order's token in `rented` before it orders again.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

Market = Literal["on-demand", "spot"]
State = Literal["pending", "up", "stopping", "stopped", "error"]
"""`up` says that the provider thinks so; whether the node can be used shows over SSH. What is gone is not listed."""


class Trouble(Enum):
    """Why an order was not filled, as far as it decides what to do next."""

    CAPACITY = "capacity"
    """None to be had there now: try the next place, this one later."""
    QUOTA = "quota"
    """Our account may not have more of it there."""
    BALANCE = "balance"
    """The account has no money left: nothing more from this provider until somebody acts."""
    AUTH = "auth"
    """The key is not accepted: nothing from this provider until somebody acts."""
    RATE = "rate"
    """Asked too often: nothing was made, wait `retry_after` and ask again."""
    INVALID = "invalid"
    """The provider does not take such an order; asking again changes nothing."""
    CONFLICT = "conflict"
    """There is one of that name already."""
    AMBIGUOUS = "ambiguous"
    """The answer got lost or was an error of theirs: a machine may have been made. Look before ordering again."""
    TRANSIENT = "transient"
    """Nothing was made and nothing is wrong with the order: ask again a little later."""


Scope = Literal["offer", "zone", "region", "provider"]
"""How much of a provider the trouble concerns."""


@dataclass(frozen=True)
class Billing:
    """How a provider turns time into money: in whole steps, of which every one begun counts."""

    step: int = 1
    """Seconds: 60 bills by the minute, 3600 by the started hour."""
    least: int = 0
    """So many seconds are billed at least."""
    from_up: bool = False
    """From when the provider calls the machine up; else from the order."""

    def seconds(self, elapsed: float) -> int:
        """What is billed for a machine that was there so long."""
        whole = round(max(0.0, elapsed), 3)  # clocks differ by less than anybody bills
        return max(self.least, math.ceil(whole / self.step) * self.step)


@dataclass(frozen=True)
class Abilities:
    """What a provider's machines and its API can do."""

    container: bool = False
    """Its machines are containers without systemd, TUN, mounts or UDP; else whole virtual machines."""
    user: str = "root"
    """Whom to log in as."""
    notice_seconds: int = 0
    """How long before the end a spot machine is told."""
    idempotent: Literal["token", "name", "none"] = "none"
    """What keeps the same order from being filled twice, on the provider's side."""
    at_once: int = 1
    """So many machines in one call of the API."""
    create_interval: float = 0.0
    """Seconds between two creates that the provider asks for. Whoever orders waits."""
    billing: Billing = Billing()
    boots_with: Literal["user_data", "args", "script", "none"] = "user_data"
    """How our boot script gets there. With `none` nothing but the service ends a machine that never became a node."""
    boot_seconds: int = 600
    """From the order until the node must have joined: Slurm's ResumeTimeout."""
    grace_seconds: int = 300
    """A machine that nothing asks for is left alone so long after its order: lists lag."""


@dataclass(frozen=True)
class Query:
    """Which offers are wanted. Empty fields admit everything."""

    gpu: str = ""
    """Part of a GPU's name, in any case: `h100`."""
    gpus: int = 0
    """At least so many in one machine."""
    types: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    market: Market | None = None

    def admits(self, offer: Offer) -> bool:
        """Whether an offer is one of those. Providers may list more than they are asked for."""
        return (
            self.gpu.lower() in offer.gpu.lower()
            and offer.gpus >= self.gpus
            and (not self.types or offer.type in self.types)
            and (not self.regions or offer.region in self.regions)
            and (not self.zones or offer.zone in self.zones)
            and self.market in (None, offer.market)
        )


@dataclass(frozen=True)
class Offer:
    """One kind of machine in one place at one price."""

    provider: str
    """The account it is an offer of, as the spec names it."""
    type: str
    region: str
    zone: str = ""
    market: Market = "on-demand"
    usd_hour: float | None = None
    """None where neither the API nor our table knows; such an offer is never bought under a budget."""
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gb: int = 0
    cpus: int = 0
    memory_gb: int = 0
    arch: str = "x86_64"
    available: Literal["yes", "low", "no", "unknown"] = "unknown"
    as_of: str = ""
    """The day the price is of, where it comes from our table; empty where the API told it just now."""

    @property
    def place(self) -> str:
        """`us-central1-b` or `us-west-1`: as small as the provider names places."""
        return self.zone or self.region

    @property
    def identity(self) -> tuple[str, ...]:
        """The same for all offers of the same machine in the same place, whatever it costs by now."""
        return self.provider, self.type, self.region, self.zone, self.market


@dataclass(frozen=True)
class Order:
    """One machine that is wanted, for one node."""

    cluster: str
    node: str
    token: str
    """Ours alone, made for this order and no other: by it the machine is found again."""
    offer: Offer
    public_key: str
    """The line that lets the controller in."""
    key_name: str = ""
    """What `ensure_key` returned."""
    user_data: str = ""
    """A shell script that the machine runs when it boots."""
    image: str = ""
    """The provider's name of the system; empty takes the one that suits."""
    disk_gb: int = 100
    lifetime: int = 0
    """Seconds after which the provider itself ends it, where it does such a thing; 0 is never."""


@dataclass(frozen=True)
class Outcome:
    """What became of one order or one delete."""

    id: str = ""
    """The machine's, where there is one."""
    trouble: Trouble | None = None
    scope: Scope = "offer"
    retry_after: float = 0.0
    message: str = ""
    """The provider's own words, without secrets."""
    usd_hour: float | None = None
    """What it costs, where the answer says."""

    @property
    def ok(self) -> bool:
        return self.trouble is None


@dataclass(frozen=True)
class Rented:
    """A machine that we have there, whatever its state."""

    id: str
    cluster: str
    """Empty, as are `node` and `token`, for a machine that carries no mark of ours: it is nobody's to delete."""
    node: str
    token: str
    state: State
    raw_state: str
    """The provider's own word."""
    host: str = ""
    """Where SSH answers; empty while the provider does not know."""
    port: int = 22
    user: str = "root"
    type: str = ""
    region: str = ""
    zone: str = ""
    market: Market = "on-demand"
    usd_hour: float | None = None
    created: float | None = None
    """Seconds since 1970, where the provider tells."""
    ending: bool = False
    """The provider has said that it will take this machine away."""


@dataclass(frozen=True)
class Account:
    """Access to a provider, as the spec gives it, with the secret looked up."""

    name: str
    """What nodesets call it."""
    kind: str
    """Which renter it is: `lambda`, `gcp` …"""
    secret: str = field(repr=False, default="")
    url: str = ""
    """Another address of the API than the usual one: a simulator's."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What else the API needs: a project, a network."""


class Renter(Protocol):
    """Rents machines from one account. Every method raises ProviderError when the API cannot be asked at all."""

    abilities: Abilities

    async def offers(self, query: Query) -> list[Offer]:
        """What can be had, as far as the API tells; prices where it has them, else from our table."""

    async def create(self, orders: Sequence[Order]) -> list[Outcome]:
        """Order machines; one outcome an order, in their order. Never raises for one of them, never orders twice.

        At most `abilities.at_once`, alike in all but node and token. It returns when the provider has taken the order
        or refused it, which is long before a machine is up.
        """

    async def rented(self, cluster: str) -> list[Rented]:
        """Every machine of the cluster, whatever its state, on all pages. An error is an error, never an empty list."""

    async def delete(self, rented: Sequence[Rented]) -> list[Outcome]:
        """Give machines back; one outcome each. One that is gone already is well. `rented` shows when it is done."""

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        """See that the provider knows the key, and return its name there; empty where keys travel with an order."""

    async def close(self) -> None:
        """Let go of connections."""
