"""Rented machines in the file: accounts at providers, offers and budgets."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from shoal.spec.checks import choice, matching, refusal, seconds, web_address
from shoal.spec.values import Duration, SecretReference, SpecModel, text_schema

KINDS = ("aws", "digitalocean", "gcp", "lambda", "nebius", "paperspace", "runpod", "sandbox", "vast")
"""The providers that come with Shoal. A package that is installed beside it may add more, by entry point."""
GROUP = "shoal.renters"
SANDBOX = "sandbox"
MARKETS = ("on-demand", "spot")
SETTINGS = {
    "aws": (
        "capacity_block",
        "create_interval",
        "image",
        "profile",
        "regions",
        "security_group",
        "ssh_from",
        "subnets",
    ),
    "digitalocean": ("image", "network"),
    "gcp": (
        *("disk_type", "external_address", "image", "min_cpu_platform", "network", "placement", "project"),
        *("provisioning", "reservation", "service_account", "sources", "subnetwork"),
    ),
    "lambda": ("create_interval", "filesystems"),
    "nebius": ("gpu_cluster", "image", "project", "security_groups", "subnet"),
    "paperspace": ("network", "template"),
    "runpod": ("cloud", "cuda", "image"),
    "sandbox": ("project",),  # without effect: it stands in for any provider
    "vast": ("disk_gb", "image", "reliability"),
}
"""The `settings` that the providers of Shoal use. Those of other packages are unknown here."""
INTERVAL_SETTINGS = ("request_interval", "timeout", "create_interval")
"""Seconds; all providers have the first two."""
SETTING_CHOICES = {
    ("gcp", "external_address"): ("yes", "no"),
    ("gcp", "provisioning"): ("standard", "flex-start", "reservation-bound"),
    ("runpod", "cloud"): ("secure", "community"),
}
PRIVATE_NETWORKS = {
    "aws": ("subnets",),
    "digitalocean": ("network",),
    "gcp": ("network", "subnetwork"),
    "lambda": (),
    "nebius": ("subnet",),
    "paperspace": ("network",),
}
"""The providers that put machines behind addresses of their own, with the settings that choose a private network there.

Machines of the others are containers: a tunnel of the controller reaches them in any network.
"""
MAX_NODES = 1000
"""The most nodes of a rented nodeset."""
DEFAULT_IDLE_TIME = "10m"
LIFETIME = "24h"

_ACCOUNT = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_VERSIONS = r"(===?|[<>!~]=|[<>])[A-Za-z0-9.*+!_-]+"
_PACKAGE = re.compile(rf"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9._,-]+\])?({_VERSIONS}(,{_VERSIONS})*)?")
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/+()-]{0,127}")
_IMAGE = re.compile(r"[A-Za-z0-9/][A-Za-z0-9 ._:/@+()-]{0,254}")


def kinds() -> tuple[str, ...]:
    """Every kind of provider there is: ours, and those of installed packages."""
    return (*KINDS, *sorted({entry.name for entry in entry_points(group=GROUP)} - {*KINDS}))


_account = matching(
    _ACCOUNT,
    "not a name for an account at a provider",
    "use a lower-case letter, then lower-case letters, digits and `-`, at most 32",
)
_url = web_address("an API", "http://10.0.0.1:8080", "leave it out, and give `key`")
_package = matching(_PACKAGE, "not a package", "name it as pip does, without blanks: shoal-mine>=1.2")


def _kind(value: object) -> str:
    return choice("kind of provider", kinds())(value)


def _word_of(what: str, example: str, pattern: re.Pattern[str] = _PLACE) -> BeforeValidator:
    """A check for a word of the provider's own: it is theirs to know it, ours that it needs no quoting."""
    return BeforeValidator(matching(pattern, f"not {what}", f"write it as the provider does, such as {example}"))


def money(value: object) -> float:
    """An amount of US dollars."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise refusal("not an amount of money", "give US dollars as a number, such as 2.49")
    if not 0 < value <= 10_000_000:
        raise refusal("out of range", "give an amount above 0, in US dollars")
    return float(value)


def _setting(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= 500:
        raise refusal("not a setting", "write a plain word or number")
    return text


ProviderName = Annotated[str, BeforeValidator(_account), text_schema("name", pattern=f"^{_ACCOUNT.pattern}$")]
ProviderKind = Annotated[str, BeforeValidator(_kind), text_schema("kind")]
ApiUrl = Annotated[str, BeforeValidator(_url), text_schema("URL")]
MachineType = Annotated[str, _word_of("a type of machine", "gpu_1x_a10"), text_schema("type")]
Region = Annotated[str, _word_of("a region", "us-west-1"), text_schema("region")]
Zone = Annotated[str, _word_of("a zone", "us-central1-b"), text_schema("zone")]
ImageName = Annotated[str, _word_of("an image", "ubuntu:24.04", _IMAGE), text_schema("image")]
Package = Annotated[str, BeforeValidator(_package), text_schema("package")]
Setting = Annotated[str, BeforeValidator(_setting), WithJsonSchema({"type": ["string", "integer"], "title": "text"})]
MarketName = Annotated[Literal["on-demand", "spot"], BeforeValidator(choice("market", MARKETS))]
Money = Annotated[
    float, BeforeValidator(money), WithJsonSchema({"type": "number", "title": "US dollars", "exclusiveMinimum": 0})
]


class ProviderAccount(SpecModel):
    """An account at a provider, by the name that nodesets use."""

    kind: ProviderKind | None = None
    """The provider, such as `lambda` or `gcp`. Without it, the account's name is the kind."""
    package: Package | None = None
    """For a kind that is not part of Shoal: its package, which `shoal up` installs on the controller."""
    key: SecretReference | None = None
    """The API key, or the file with a service account's: `env:NAME` or `file:PATH` on your machine."""
    url: ApiUrl | None = None
    """The address of the API, if not the provider's own: a simulator's."""
    project: Setting | None = None
    """Google Cloud: the project that pays. Nebius: the projects to rent in, one of each region."""
    settings: dict[str, Setting] = Field(default_factory=dict)
    """Further settings of the provider's API: `{network: default}`."""


class Budget(SpecModel):
    """The most to spend, in US dollars. Shoal rents nothing beyond it."""

    per_hour: Money | None = None
    """The most for all machines together in an hour."""
    per_day: Money | None = None
    """The most for a day, in UTC."""
    per_month: Money | None = None
    """The most for a calendar month, in UTC."""
    then: Annotated[Literal["refuse", "end"], BeforeValidator(choice("end of a budget", ("refuse", "end")))] = "refuse"
    """When a day's or a month's is spent: `refuse` lets running jobs finish, `end` releases their nodes."""
    after: Duration | None = None
    """With `then: end`: the delay after it is spent. Without it, nodes go before that, and it is never exceeded."""

    @property
    def end_after(self) -> int | None:
        """Seconds from when it is spent until machines are gone; None where they may stay."""
        if self.then != "end":
            return None
        return seconds(self.after) if self.after else 0


class OfferChoice(SpecModel):
    """An offer to rent: a type of machine at an account, in one region or in any."""

    provider: ProviderName
    """The account, by its name under `providers`."""
    type: MachineType | None = None
    """The provider's name of the machine: `gpu_8x_h100_sxm5`."""
    region: Region | None = None
    """The region; without it, any."""
    zone: Zone | None = None
    """The zone, where the provider has zones; without it, any."""
    market: MarketName = "on-demand"
    """`on-demand`, or `spot`: cheaper, and the provider may preempt it."""
    image: ImageName | None = None
    """The provider's image: a family or an id, a container, a template's label. Without it, the default."""


@dataclass(frozen=True)
class RentedSet:
    """A nodeset whose machines are rented, with its defaults filled in."""

    name: str
    offers: tuple[OfferChoice, ...]
    """Where its machines may come from, in the order of the file; at least one."""
    prefer: Literal["listed", "cheapest"]
    max: int
    idle: int
    """Seconds that a node waits for a job before it is released."""
    lifetime: int
    """Seconds after which a machine is released whatever it does."""
    max_price: float | None
    """US dollars an hour that one machine may cost at most."""
    budget: Budget | None
    cpus: int | None
    memory_mb: int | None
    gpus: int | None
    """The shape of its machines where the file says it."""
    disk_gb: int
    features: tuple[str, ...]
    weight: int
    site: str
    shards: int = 0
    mps: int = 0
    """How many parts each GPU has, for jobs that share one."""

    @property
    def nodes(self) -> tuple[str, ...]:
        """The nodes it can have: `cloud1`, `cloud2` …"""
        return tuple(f"{self.name}{number}" for number in range(1, self.max + 1))

    @property
    def accounts(self) -> tuple[str, ...]:
        """The accounts it rents from, each once."""
        return tuple(dict.fromkeys(offer.provider for offer in self.offers))


DISK_GB = 100
"""The disk of a rented machine, where the file does not say."""


def account_settings(account: ProviderAccount) -> Mapping[str, str]:
    """What the provider's API needs beside the key."""
    return {**({"project": account.project} if account.project else {}), **account.settings}
