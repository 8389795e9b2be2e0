"""The contract of a provider that rents machines: what it offers, at what price, and what we have there.

A rental provider talks to one HTTP API. It knows nothing of Slurm, the ledger or budgets. What it can do is data
(`Abilities`): code asks for an ability, never for a provider's name.

    offers ──▶ Offer ──▶ RentalOrder (an offer, for one node, with our token) ──create──▶ RequestOutcome
    instances ──▶ RentedInstance ──delete──▶ RequestOutcome

Nothing here retries a create. An answer that leaves open whether a machine was made is the failure `AMBIGUOUS`: the
caller looks for the order's token in `instances` before it orders again.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

Market = Literal["on-demand", "spot"]
InstanceState = Literal["pending", "up", "stopping", "stopped", "error"]
"""`up` is the provider's view; only SSH shows whether the machine works. Machines that are gone are not listed."""


class FailureKind(Enum):
    """Why a request failed, as far as it decides what to do next."""

    CAPACITY = "capacity"
    """None available there now: try the next place, and this one later."""
    QUOTA = "quota"
    """The account's quota there is used up."""
    BALANCE = "balance"
    """The account has no money left: order nothing more from this provider until a person acts."""
    AUTH = "auth"
    """The key is rejected: ask this provider nothing more until a person acts."""
    RATE = "rate"
    """Too many requests: nothing was made. Wait for `retry_after` and try again."""
    INVALID = "invalid"
    """The provider rejects such an order; retrying does not help."""
    CONFLICT = "conflict"
    """The name is taken."""
    AMBIGUOUS = "ambiguous"
    """The answer was lost or a server error: a machine may have been made. List before ordering again."""
    TRANSIENT = "transient"
    """Nothing was made and the order is fine: try again a little later."""


Scope = Literal["offer", "zone", "region", "provider"]
"""How much of a provider a failure concerns."""


@dataclass(frozen=True)
class Billing:
    """How a provider bills time: in whole steps, and every step begun counts."""

    step: int = 1
    """Seconds: 60 bills by the minute, 3600 by the started hour."""
    least: int = 0
    """The minimum that is billed, in seconds."""
    from_up: bool = False
    """Billing starts when the machine is up; else with the order."""

    def seconds(self, elapsed: float) -> int:
        """The billed seconds of a machine that existed for `elapsed` seconds."""
        whole = round(max(0.0, elapsed), 3)  # clocks differ by less than any billing step
        return max(self.least, math.ceil(whole / self.step) * self.step)


@dataclass(frozen=True)
class System:
    """A distribution and its release, as /etc/os-release names them."""

    id: str
    version: str

    def __str__(self) -> str:
        return f"{self.id.capitalize()} {self.version}"


@dataclass(frozen=True)
class Abilities:
    """What a provider's machines and its API can do."""

    container: bool = False
    """Its machines are containers without systemd, TUN, mounts or UDP; else whole virtual machines."""
    user: str = "root"
    """The user to log in as."""
    system: System | None = None
    """The system of its default images; None if unknown."""
    notice_s: int = 0
    """How long before its end a spot machine gets notice."""
    notice_url: str = ""
    """Where a machine reads its notice, from inside: the answer becomes TRUE. Empty: only the API tells."""
    idempotent: Literal["token", "name", "none"] = "none"
    """What keeps the provider from filling the same order twice."""
    at_once: int = 1
    """The most machines that one API call can order."""
    create_interval: float = 0.0
    """Seconds that the provider requires between two creates. The caller waits."""
    end_program: tuple[str, ...] = ()
    """A program of `shoal.remote` that ends the bill of a machine from inside, if it may, and its arguments.

    The first argument is the API's address; an account's own `url` takes its place.
    """
    billing: Billing = Billing()
    boots_with: Literal["user_data", "args", "script", "none"] = "user_data"
    """How the boot script reaches the machine. With `none`, only the service ends a machine that never joins."""
    address_timeout_s: int = 0
    """After this time a machine without an address is deleted: it gets none. 0: it is waited for like the join."""
    boot_s: int = 600
    """The time from the order until the node must have joined: Slurm's ResumeTimeout."""
    grace_s: int = 300
    """How long lists may lag: a machine without a rental is left alone for this time."""


@dataclass(frozen=True)
class Query:
    """Which offers to list. Empty fields match everything."""

    gpu: str = ""
    """Part of a GPU's name, case-insensitive: `h100`."""
    gpus: int = 0
    """The minimum number of GPUs in one machine."""
    types: tuple[str, ...] = ()
    regions: tuple[str, ...] = ()
    zones: tuple[str, ...] = ()
    market: Market | None = None
    unfit_machines: frozenset[str] = frozenset()
    """Physical machines that are not rented again, by `RentedInstance.machine_id`: for clients that set it."""

    def admits(self, offer: Offer) -> bool:
        """Whether an offer matches. Providers may list more than they are asked for."""
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
    """One machine type in one place at one price."""

    provider: str
    """The provider account, as the spec names it."""
    type: str
    region: str
    zone: str = ""
    market: Market = "on-demand"
    usd_hour: float | None = None
    """None if neither the API nor our table has it; such an offer is never ordered under a budget."""
    gpu: str = ""
    gpus: int = 0
    gpu_memory_gb: int = 0
    cpus: int = 0
    memory_gb: int = 0
    arch: str = "x86_64"
    available: Literal["yes", "low", "no", "unknown"] = "unknown"
    as_of: str = ""
    """The date of a price from our table; empty for a price from the API."""
    note: str = ""
    """Why it is not sold like this, and how it is."""

    @property
    def place(self) -> str:
        """The zone, or the region where the provider has no zones."""
        return self.zone or self.region

    @property
    def identity(self) -> tuple[str, ...]:
        """Equal for all offers of the same type in the same place, whatever the price."""
        return self.provider, self.type, self.region, self.zone, self.market


USER_DATA = "/run/shoal-user-data"
"""Where cloud-init puts an order's script on the machine, for root alone; gone after the next boot."""


@dataclass(frozen=True)
class RentalOrder:
    """An order for one machine, for one node."""

    cluster: str
    node: str
    token: str
    """Unique to this order: the machine is found again by it."""
    offer: Offer
    public_key: str
    """The controller's SSH key, as a line of authorized_keys."""
    key_name: str = ""
    """What `ensure_key` returned."""
    user_data: str = field(default="", repr=False)
    """A shell script that the machine runs when it boots. It has the machine's first host key: never log it."""
    image: str = ""
    """The provider's name of the image; empty for the default."""
    disk_gb: int = 100
    cpus: int = 0
    memory_mb: int = 0
    """What the node must have at least, where the provider can be asked; 0 for the offer's own."""
    ports: tuple[str, ...] = ()
    """What the provider's firewall must admit: `tcp:22`, `udp:51820`."""
    lifetime: int = 0
    """Seconds after which the provider itself ends it, where it can; 0 for never."""
    permanent: bool = False
    """It stays when it is shut down, with its disk and its address; for a provider that `KeepsMachines`."""
    address: str = ""
    """The reserved external address of a permanent machine, where the order must name it."""
    unfit_machines: frozenset[str] = frozenset()
    """As in `Query`."""

    def cloud_config(self) -> str:
        """What cloud-init reads: the key for the image's own user, and the script."""
        config: dict[str, Any] = {"ssh_authorized_keys": [self.public_key.strip()]}
        if self.user_data:
            # as a file: every user of the machine can read the arguments of a process
            config["write_files"] = [{"path": USER_DATA, "permissions": "0600", "content": self.user_data}]
            config["runcmd"] = [["sh", USER_DATA]]
        return f"#cloud-config\n{json.dumps(config)}\n"  # JSON is YAML, too


@dataclass(frozen=True)
class RequestOutcome:
    """The result of one order or one delete."""

    id: str = ""
    """The machine's id, if there is one."""
    failure: FailureKind | None = None
    scope: Scope = "offer"
    retry_after: float = 0.0
    message: str = ""
    """The provider's message, without secrets."""
    usd_hour: float | None = None
    """The price, where the answer has it."""

    @property
    def ok(self) -> bool:
        return self.failure is None


PERMANENT_TOKEN = "member"  # nosec B105: no secret
"""Begins the tokens of permanent machines. Those of rented nodes are hexadecimal numbers."""

Marks = tuple[str, str, str]
"""Cluster, node and token of a machine; empty for one that is not ours."""


def marks_in_name(name: str) -> Marks:
    """The marks in a name `cluster--node--token`."""
    cluster, node, token = name.split("--") if name.count("--") == 2 else ("", "", "")
    return cluster, node, token


@dataclass(frozen=True)
class RentedInstance:
    """A machine as its provider lists it, in any state."""

    id: str
    cluster: str
    """Empty, like `node` and `token`, for a machine without our mark: it is never deleted."""
    node: str
    token: str
    state: InstanceState
    raw_state: str
    """The provider's own name of the state."""
    host: str = ""
    """The SSH address; empty while unknown."""
    port: int = 22
    user: str = "root"
    type: str = ""
    region: str = ""
    zone: str = ""
    market: Market = "on-demand"
    usd_hour: float | None = None
    created: float | None = None
    """Seconds since 1970, where the provider tells; `started` is when it was last started."""
    started: float | None = None
    ending: bool = False
    """The provider has given notice that it will take this machine away."""
    account: str = ""
    """The provider account, where the machines of several are listed together."""
    machine_id: str = ""
    """The physical machine that it is a part of, where the provider tells: others on it are as good or bad."""
    host_key: str = ""
    """The host key that it must show, filled in by the rental service; empty: trusted on first use."""

    @property
    def permanent(self) -> bool:
        """Whether it is a host that stays, such as the controller. What rents and releases nodes leaves it alone."""
        return self.token.startswith(PERMANENT_TOKEN)

    @classmethod
    def listed(
        cls, id: str, marks: Marks, raw_state: str, states: Mapping[str, InstanceState], **more: Any
    ) -> RentedInstance:
        """A machine as an API lists it. An unknown state counts as pending: it is no reason to delete a machine."""
        return cls(id, *marks, states.get(raw_state, "pending"), raw_state, **more)

    def __str__(self) -> str:
        return f"{self.account} {self.id}"


def api_address(configured: str, default: str) -> str:
    """The base URL of an API. A configured URL without a path gets the default path."""
    parts = urlsplit(configured or default)
    path = parts.path.rstrip("/") or urlsplit(default).path.rstrip("/")
    return f"{parts.scheme}://{parts.netloc}{path}"


@dataclass(frozen=True)
class ProviderLogin:
    """The login of a provider account: its spec, with the secret resolved."""

    name: str
    """The account's name in the spec."""
    kind: str
    """The kind of provider: `lambda`, `gcp` …"""
    secret: str = field(repr=False, default="")
    url: str = ""
    """The address of the API, if not the usual one: a simulator's."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """What else the API needs: a project, a network."""


class RentalProvider(Protocol):
    """Rents machines with one provider account. Every method raises ProviderError when the API cannot be used."""

    abilities: Abilities

    async def offers(self, query: Query) -> list[Offer]:
        """The available offers, as far as the API tells. Prices come from the API, else from our table."""

    async def create(self, orders: Sequence[RentalOrder]) -> list[RequestOutcome]:
        """Order machines; one outcome each, in the same sequence. Never raises for one of them or orders twice.

        At most `abilities.at_once` orders, alike in all but node and token. Returns when the provider has accepted or
        refused the orders, which is long before a machine is up.
        """

    async def instances(self, cluster: str) -> list[RentedInstance]:
        """Every machine of the cluster, in any state, from all pages. An error raises; it is never an empty list."""

    async def delete(self, instances: Sequence[RentedInstance]) -> list[RequestOutcome]:
        """Delete machines; one outcome each. A machine that is already gone counts as deleted."""

    async def ensure_key(self, cluster: str, public_key: str) -> str:
        """Register the key with the provider and return its name there; empty where orders carry the key."""

    async def close(self) -> None:
        """Close connections."""
