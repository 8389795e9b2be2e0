"""Rented machines, as the file says them: accounts at providers, what to rent there, and how much it may cost."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from shoal.spec.closed import Closed
from shoal.spec.secret import SecretReference
from shoal.spec.words import Duration, choice, refusal, seconds, size_mb

if TYPE_CHECKING:
    from shoal.spec.model import NodeSet, Spec

KINDS = ("gcp", "lambda", "paperspace", "runpod", "sandbox")
"""The providers that come with Shoal. A package that is installed beside it may add more, by entry point."""
GROUP = "shoal.renters"
SANDBOX = "sandbox"
MARKETS = ("on-demand", "spot")
MOST = 1000
"""So many nodes a rented nodeset may have."""
IDLE = "10m"
LIFETIME = "24h"

_ACCOUNT = re.compile(r"[a-z]([a-z0-9-]{0,30}[a-z0-9])?")
_VERSIONS = r"(===?|[<>!~]=|[<>])[A-Za-z0-9.*+!_-]+"
_PACKAGE = re.compile(rf"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?(\[[A-Za-z0-9._,-]+\])?({_VERSIONS}(,{_VERSIONS})*)?")
_PLACE = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._:/+()-]{0,127}")


def kinds() -> tuple[str, ...]:
    """Every kind of provider there is: ours, and those of installed packages."""
    return (*KINDS, *sorted({one.name for one in entry_points(group=GROUP)} - {*KINDS}))


def _account(value: object) -> str:
    if not isinstance(value, str) or not _ACCOUNT.fullmatch(value):
        fix = "use a lower-case letter, then lower-case letters, digits and `-`, at most 32"
        raise refusal("not a name for an account at a provider", fix)
    return value


def _kind(value: object) -> str:
    known = kinds()
    if not isinstance(value, str) or value not in known:
        raise refusal("unknown kind of provider", f"choose one of {', '.join(known)}")
    return value


def _url(value: object) -> str:
    if isinstance(value, str) and "@" in value:
        raise refusal("an address with a password in it", "leave it out, and give `key`", "(hidden)")
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]{1,500}", value):
        raise refusal("not the address of an API", "write it like http://10.0.0.1:8080")
    return value.rstrip("/")


def _word_of(what: str, example: str) -> BeforeValidator:
    """A check for a word of the provider's own: it is theirs to know it, ours that it needs no quoting."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not _PLACE.fullmatch(value):
            raise refusal(f"not {what}", f"write it as the provider does, such as {example}")
        return value

    return BeforeValidator(check)


def money(value: object) -> float:
    """An amount of US dollars."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        raise refusal("not an amount of money", "give US dollars as a number, such as 2.49")
    if not 0 < value <= 10_000_000:
        raise refusal("out of range", "give an amount above 0, in US dollars")
    return float(value)


def _package(value: object) -> str:
    if not isinstance(value, str) or not _PACKAGE.fullmatch(value):
        raise refusal("not a package", "name it as pip does, without blanks: shoal-mine>=1.2")
    return value


def _setting(value: object) -> str:
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str) or not text.isprintable() or not 0 < len(text) <= 500:
        raise refusal("not a setting", "write a plain word or number")
    return text


def _text(title: str) -> WithJsonSchema:
    return WithJsonSchema({"type": "string", "title": title})


AccountName = Annotated[
    str,
    BeforeValidator(_account),
    WithJsonSchema({"type": "string", "title": "name", "pattern": f"^{_ACCOUNT.pattern}$"}),
]
ProviderKind = Annotated[str, BeforeValidator(_kind), _text("kind")]
ApiUrl = Annotated[str, BeforeValidator(_url), _text("URL")]
MachineType = Annotated[str, _word_of("a type of machine", "gpu_1x_a10"), _text("type")]
Region = Annotated[str, _word_of("a region", "us-west-1"), _text("region")]
Zone = Annotated[str, _word_of("a zone", "us-central1-b"), _text("zone")]
Package = Annotated[str, BeforeValidator(_package), _text("package")]
Setting = Annotated[str, BeforeValidator(_setting), WithJsonSchema({"type": ["string", "integer"], "title": "text"})]
MarketName = Annotated[Literal["on-demand", "spot"], BeforeValidator(choice("market", MARKETS))]
Money = Annotated[
    float, BeforeValidator(money), WithJsonSchema({"type": "number", "title": "US dollars", "exclusiveMinimum": 0})
]


class ProviderAccount(Closed):
    """Access to a provider that rents machines out, by the name that nodesets call it."""

    kind: ProviderKind | None = None
    """Which provider it is: `lambda`, `runpod`, `paperspace`, `gcp`, `sandbox`. Without it, its name says so."""
    package: Package | None = None
    """For a kind that does not come with Shoal: the package that has it, which `shoal up` puts on the controller."""
    key: SecretReference | None = None
    """The API key, or the file with a service account's: `env:NAME` or `file:PATH` on your machine."""
    url: ApiUrl | None = None
    """Another address of the API than the usual one: a simulator's."""
    project: Setting | None = None
    """Google Cloud: the project that pays."""
    settings: dict[str, Setting] = Field(default_factory=dict)
    """What else the provider's API needs: `{network: default}`."""


class Budget(Closed):
    """How much may be spent, in US dollars. What would go beyond it is not rented."""

    per_hour: Money | None = None
    """What all machines together may cost an hour."""
    per_day: Money | None = None
    """What may be spent on one day, by UTC."""
    per_month: Money | None = None
    """What may be spent in one calendar month, by UTC."""
    then: Annotated[Literal["refuse", "end"], BeforeValidator(choice("end of a budget", ("refuse", "end")))] = "refuse"
    """When a day's or a month's is spent: `refuse` lets running jobs finish on their nodes, `end` gives these back."""
    after: Duration | None = None
    """With `then: end`: so long after it is spent. Without it nodes go a little before, and it is never exceeded."""

    @property
    def end_after(self) -> int | None:
        """Seconds from when it is spent until machines are gone; None where they may stay."""
        if self.then != "end":
            return None
        return seconds(self.after) if self.after else 0


class OfferChoice(Closed):
    """One place to rent from: a type of machine at an account, in one place or wherever there is one."""

    provider: AccountName
    """The account, by its name under `providers`."""
    type: MachineType | None = None
    """The provider's name of the machine: `gpu_8x_h100_sxm5`."""
    region: Region | None = None
    """The region; without it, any."""
    zone: Zone | None = None
    """The zone, where the provider has zones; without it, any."""
    market: MarketName = "on-demand"
    """`on-demand`, or `spot`: cheaper, and the provider may take it back."""


@dataclass(frozen=True)
class RentedSet:
    """A nodeset whose machines are rented, with its defaults filled in."""

    name: str
    offers: tuple[OfferChoice, ...]
    """Where its machines may come from, in the order of the file; at least one."""
    prefer: Literal["listed", "cheapest"]
    max: int
    idle: int
    """Seconds that a node waits for a job before it is given back."""
    lifetime: int
    """Seconds after which a machine is given back whatever it does."""
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


def is_rented(nodeset: NodeSet) -> bool:
    """Whether its machines are rented when a job needs them; else they are always there."""
    return nodeset.max is not None


def rented_sets(spec: Spec) -> dict[str, RentedSet]:
    """The rented nodesets, by name, in the order of the file."""
    return {name: _rented_set(name, nodeset) for name, nodeset in spec.nodesets.items() if is_rented(nodeset)}


def accounts(spec: Spec) -> dict[str, ProviderAccount]:
    """The accounts at providers, each with its kind filled in."""
    return {name: account.model_copy(update={"kind": account.kind or name}) for name, account in spec.providers.items()}


def account_settings(account: ProviderAccount) -> Mapping[str, str]:
    """What the provider's API needs beside the key."""
    return {**({"project": account.project} if account.project else {}), **account.settings}


def _rented_set(name: str, nodeset: NodeSet) -> RentedSet:
    assert nodeset.max is not None
    offers = nodeset.offers
    if not offers:
        assert nodeset.provider is not None
        offers = (
            OfferChoice(
                provider=nodeset.provider,
                type=nodeset.type,
                region=nodeset.region,
                zone=nodeset.zone,
                market=nodeset.market,
            ),
        )
    return RentedSet(
        name=name,
        offers=offers,
        prefer=nodeset.prefer,
        max=nodeset.max,
        idle=seconds(nodeset.idle or IDLE),
        lifetime=seconds(nodeset.lifetime or LIFETIME),
        max_price=nodeset.max_price,
        budget=nodeset.budget,
        cpus=nodeset.cpus,
        memory_mb=size_mb(nodeset.memory) if nodeset.memory else None,
        gpus=nodeset.gpus or None,
        disk_gb=-(-size_mb(nodeset.disk) // 1024) if nodeset.disk else DISK_GB,
        features=nodeset.features,
        weight=nodeset.weight,
        site=nodeset.site,
    )
