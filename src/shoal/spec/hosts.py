"""The hosts of the file: the controller, login hosts and nodesets, the members they stand for, and their rules."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, StrictBool, model_validator

from shoal import hostlist
from shoal.spec import values
from shoal.spec.accounting import Price
from shoal.spec.checks import choice, refusal, size_mb
from shoal.spec.drivers import HasDriver, driver_problems
from shoal.spec.finding import Level, Problem, path_text, show
from shoal.spec.finding import Path as FilePlace
from shoal.spec.machines import (
    DEFAULT_IMAGE,
    ENGINES,
    IMAGES,
    RENTED_FIELDS,
    HasSite,
    LoginFields,
    MachineFields,
    RentedHostFields,
    Sandbox,
)
from shoal.spec.member import Member, RentedMachine, Role, Shape
from shoal.spec.network import Endpoint
from shoal.spec.rental import (
    DISK_GB,
    MAX_NODES,
    SANDBOX,
    Budget,
    ImageName,
    MachineType,
    MarketName,
    Money,
    OfferChoice,
    ProviderName,
    Region,
    Zone,
)
from shoal.spec.values import Between, Duration, FilePath, Port, ShortForm, SpecModel, UserName

_HOST_TEXT = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>.*?)(?::(?P<port>[^:\[\]]*))?", re.DOTALL)


class HostEntry(ShortForm):
    """A host that exists already, or several as a hostlist.

    In the file it is a name (`gpu01`), a hostlist (`gpu[01-16]`), either of them with a user and a port
    (`ubuntu@gpu01:2222`), or a mapping of the fields below. Inside `[...]` YAML needs quotes around a hostlist:
    `hosts: ["gpu[01-16]"]`.
    """

    short_schema: ClassVar = {
        "type": "string",
        "description": "A name, a hostlist such as gpu[01-16], or user@name:port.",
    }
    refusal = ("not a host", "write its name, or {name: node1, address: 10.0.0.1}")

    name: values.HostNames
    """The host's name in Shoal and Slurm. Without `address`, SSH looks it up in `~/.ssh/config`."""
    address: values.Address | None = None
    """Its IP address or DNS name, if that is not its name."""
    port: Port | None = None
    """The port of its SSH daemon."""
    user: UserName | None = None
    """The user to log in as: root, or a user with sudo without a password."""
    identity: FilePath | None = None
    """The private key to log in with, a file on your machine."""
    endpoint: Endpoint | None = None
    """WireGuard: where other sites reach it, `address` or `address:port`, when a router forwards that to it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every host this entry stands for."""
        return tuple(hostlist.expand(self.name or ""))  # a partial model may have no name

    @classmethod
    def from_short(cls, value: object) -> dict[str, Any] | None:
        return parse_host(value) if isinstance(value, str) else None

    @model_validator(mode="after")
    def _one_address_one_host(self) -> Self:
        if self.address is not None and len(self.names) != 1:
            raise refusal("one address for several hosts", "write one entry a host", self.name)
        return self


def parse_host(text: str) -> dict[str, Any]:
    """`user@name:port` as a mapping. Only takes the text apart: the fields check what they are given."""
    match = _HOST_TEXT.fullmatch(text)
    assert match is not None
    if text.count(":") > 1:  # an IPv6 address, whole; the field says what to do about it
        user, at, name = text.rpartition("@")
        return {"name": name, "user": user} if at else {"name": name}
    fields: dict[str, Any] = {key: value for key, value in match.groupdict().items() if value is not None}
    if "port" in fields:
        port = fields["port"]
        fields["port"] = int(port) if re.fullmatch("[0-9]{1,9}", port) else port
    return fields


class Controller(HasSite, HasDriver, LoginFields, RentedHostFields):
    """The host that runs slurmctld. Either `host` or `provider`."""

    host: HostEntry | None = None
    """The host, if it exists already."""
    compute: StrictBool = False
    """Run jobs on it as well. Partitions then may list `controller` among their nodesets."""


class HostSet(HasSite, LoginFields, MachineFields):
    """Hosts of one kind. Either `hosts` or `provider`."""

    hosts: tuple[HostEntry, ...] = ()
    """Hosts that exist already."""
    count: Annotated[int, Between(1, 64)] | None = None
    """How many hosts the provider makes. Their names begin with the set's: `fish1`, `fish2`."""


class Login(HostSet, RentedHostFields):
    """Hosts that users log in to, to submit jobs from. They run no jobs. Either `hosts` or `provider`."""


class NodeSet(HasDriver, HostSet):
    """Hosts of one kind that run jobs. Either `hosts` or `provider`; with `max` they are rented when jobs need them."""

    provider: ProviderName | None = None
    """Who makes the hosts: `sandbox`, or with `max` the name of an account under `providers`."""
    max: Annotated[int, Between(1, MAX_NODES)] | None = None
    """Rented: the most nodes. Their names begin with the set's: `cloud1`, `cloud2`."""
    type: MachineType | None = None
    """Rented: the provider's name of the machine, `gpu_8x_h100_sxm5`."""
    region: Region | None = None
    """Rented: the region; without it, any."""
    zone: Zone | None = None
    """Rented: the zone, where the provider has zones; without it, any."""
    market: MarketName = "on-demand"
    """Rented: `on-demand`, or `spot`: cheaper, and the provider may preempt it."""
    image: ImageName = DEFAULT_IMAGE
    """The sandbox's: `debian12`, `debian13` or `sid`. Rented: the provider's image; without it, the default."""
    offers: tuple[OfferChoice, ...] = ()
    """Rented: several places to rent from, in place of `provider`, `type`, `region`, `zone`, `market` and `image`."""
    prefer: Annotated[Literal["listed", "cheapest"], BeforeValidator(choice("order", ("listed", "cheapest")))] = (
        "listed"
    )
    """Rented: try the offers as they are listed, or the cheapest first."""
    idle: Duration | None = None
    """Rented: how long a node waits for another job before it is released. Without it, 10m."""
    lifetime: Duration | None = None
    """Rented: a machine is released after this time, even with a job on it. Without it, 24h."""
    max_price: Money | None = None
    """Rented: the highest price of a machine an hour."""
    budget: Budget | None = None
    """Rented: what the whole set may cost, beside the cluster's own `budget`."""
    features: tuple[values.FeatureName, ...] = ()
    """Slurm features, for `--constraint`."""
    weight: Annotated[int, Between(1, 1_000_000)] = 1
    """Slurm prefers nodes of lower weight."""
    shards: Annotated[int, Between(0, 1024)] = 0
    """How many jobs may share one GPU, each asking for `--gres=shard:1` (gres/shard)."""
    mps: Annotated[int, Between(0, 1024)] = 0
    """The parts of one GPU for jobs that share it through CUDA's MPS, with `--gres=mps:20` (gres/mps)."""
    price: Price | None = None
    """The price of a GPU hour, in your currency, for `shoal usage`."""

    @property
    def is_rental(self) -> bool:
        """Whether its machines are meant to be rented, even where a field for that is missing."""
        other_provider = "provider" in self.invalid or self.provider not in (None, SANDBOX)
        return self.is_set("max") or self.is_set("offers") or other_provider


NodeSets = Mapping[str, NodeSet | None]
"""None stands for an entry of the file that is not a nodeset."""


def located_members(
    controller: Controller | None, login: Login | None, nodesets: NodeSets, sandbox: Sandbox | None = None
) -> Iterator[tuple[FilePlace, Member]]:
    """Every host that is always there, with its place in the file: the controller, login hosts, then the nodesets."""
    kind = sandbox.kind if sandbox is not None else "container"
    if controller is not None:
        roles: frozenset[Role] = frozenset({"controller", "compute"} if controller.compute else {"controller"})
        if controller.host is not None:
            for member in _existing_members("controller", roles, controller.host, controller):
                yield ("controller", "host"), member
        elif controller.provider is not None:
            yield ("controller",), _made_member("controller", "controller", roles, controller, kind)
    if login is not None:
        yield from _set_members(("login",), frozenset({"login"}), login, kind)
    for name, nodeset in nodesets.items():
        if nodeset is not None:
            yield from _set_members(("nodesets", name), frozenset({"compute"}), nodeset, kind)


def rental_names(nodesets: NodeSets) -> Iterator[tuple[str, str]]:
    """Every node that may be rented, by its nodeset and its name."""
    for name, nodeset in nodesets.items():
        for number in range(1, ((nodeset and nodeset.max) or 0) + 1):
            yield name, f"{name}{number}"


def host_problems(
    controller: Controller | None, login: Login | None, nodesets: NodeSets, *, all_known: bool = True
) -> Iterator[Problem]:
    """Every rule about hosts that does not hold. `all_known` is False where the file's nodesets cannot be read."""
    sets: list[tuple[FilePlace, Controller | HostSet | None]] = [(("controller",), controller), (("login",), login)]
    sets += [(("nodesets", name), nodeset) for name, nodeset in nodesets.items()]
    for path, entry in sets:
        if entry is not None:
            yield from _source_problems(path, entry)
        if entry is not None and entry.provider == SANDBOX and not (isinstance(entry, NodeSet) and entry.is_rental):
            yield from _image_problems(path, entry)
        yield from driver_problems(path, entry, isinstance(entry, NodeSet) and entry.is_rental)
        if isinstance(entry, NodeSet) and entry.shards and entry.mps:
            yield Problem((*path, "mps"), "both `shards` and `mps`", "", "keep one: a GPU is divided in one way")
    yield from _duplicates(controller, login, nodesets)
    if controller is not None and not controller.compute and not nodesets and all_known:
        yield Problem((), "no host runs jobs", "", "add `nodesets`, or set `compute: true` on the controller")


def _image_problems(path: FilePlace, entry: MachineFields) -> Iterator[Problem]:
    if entry.image not in IMAGES and "image" not in entry.invalid:
        yield Problem((*path, "image"), "unknown image", show(entry.image), f"choose one of {', '.join(IMAGES)}")


def _source_problems(path: FilePlace, entry: Controller | HostSet) -> Iterator[Problem]:
    """A set of hosts either exists already or is made by a provider, and has no field of the other kind."""
    key = "host" if isinstance(entry, Controller) else "hosts"
    existing, created = entry.is_set(key), entry.is_set("provider")
    if not existing and isinstance(entry, NodeSet) and entry.is_rental:
        yield from _misplaced_fields(path, entry, LoginFields, key)
    elif not existing and isinstance(entry, RentedHostFields) and entry.is_rented:
        return  # see `rented_hosts`
    elif existing and created:
        fix = "keep the one you mean, delete the other"
        yield Problem((*path, "provider"), f"both `{key}` and `provider`", "", fix)
    elif existing:
        yield from _misplaced_fields(path, entry, MachineFields, "provider")
    elif created:
        yield from _misplaced_fields(path, entry, LoginFields, key)
        for name in entry.set_among(RENTED_FIELDS) if isinstance(entry, RentedHostFields) else ():
            fix = "delete it, or name an account of `providers` to rent from"
            yield Problem((*path, name), f"`{name}` where nothing is rented", "", fix)
        if entry.provider == SANDBOX and isinstance(entry, HostSet) and not entry.is_set("count"):
            yield Problem(path, "missing key `count`", "", "say how many hosts to make: `count: 2`")
    elif "hosts" in entry.model_fields_set:
        yield Problem((*path, key), "an empty list of hosts", "[]", "name at least one host")
    else:
        yield Problem(path, f"neither `{key}` nor `provider`", "", f"add `{key}`, or `provider: sandbox`")


def _misplaced_fields(
    path: FilePlace, entry: Controller | HostSet, fields: type[SpecModel], other: str
) -> Iterator[Problem]:
    names = [name for name in fields.model_fields if name != "provider"]
    if fields is MachineFields and isinstance(entry, RentedHostFields):
        names += RENTED_FIELDS
    if fields is MachineFields and isinstance(entry, HostSet):
        names.insert(0, "count")
    for name in entry.set_among(names):
        # The rental service reads specs in which a rented host is in its place, with its price.
        level: Level = "warning" if name == "usd_hour" else "error"
        yield Problem((*path, name), f"`{name}` without `{other}`", "", f"delete it, or use `{other}`", level)


def _duplicates(controller: Controller | None, login: Login | None, nodesets: NodeSets) -> Iterator[Problem]:
    """Every host is in the file once. Names are compared as DNS does, without regard to case."""
    hosts = [(member.nodeset, path, member.name) for path, member in located_members(controller, login, nodesets)]
    hosts += [(owner, ("nodesets", owner), name) for owner, name in rental_names(nodesets)]
    first_places: dict[str, tuple[str, FilePlace]] = {}
    for owner, path, name in hosts:
        if name.lower() not in first_places:
            first_places[name.lower()] = (owner, path)
            continue
        first, first_path = first_places[name.lower()]
        if first == owner:
            yield Problem(path, "duplicate host", show(name), f"it is named at {path_text(first_path)} already")
        elif first in ("controller", "login"):
            both = "; for a controller that also runs jobs use `controller: {compute: true}`"
            hint = both if first == "controller" and owner != "login" else ""
            yield Problem(path, f"host is already the {first}'s", show(name), f"name it once{hint}")
        else:
            yield Problem(path, "host in two nodesets", show(name), f"it is in `{first}` already; keep one")


def _set_members(
    path: FilePlace, roles: frozenset[Role], entry: HostSet, kind: str
) -> Iterator[tuple[FilePlace, Member]]:
    name = str(path[-1])
    for index, host in enumerate(entry.hosts):
        for member in _existing_members(name, roles, host, entry) if host is not None else ():
            yield (*path, "hosts", index), member
    rented = isinstance(entry, RentedHostFields) and entry.is_rented
    if (entry.provider == SANDBOX or rented) and not entry.hosts:
        for number in range(1, (entry.count or int(rented)) + 1):
            yield path, _made_member(f"{name}{number}", name, roles, entry, kind)


def _existing_members(
    nodeset: str, roles: frozenset[Role], host: HostEntry, login: Controller | HostSet
) -> Iterator[Member]:
    identity = host.identity or login.identity
    for name in host.names:
        yield Member(
            name=name,
            roles=roles,
            nodeset=nodeset,
            address=host.address,
            port=host.port or login.port,
            user=host.user or login.user,
            identity=Path(identity).expanduser() if identity else None,
            endpoint=host.endpoint,
            shape=Shape(site=login.site),
            **_slurm_fields(login),
        )


def _made_member(
    name: str, nodeset: str, roles: frozenset[Role], machine: Controller | HostSet, default_kind: str
) -> Member:
    if isinstance(machine, RentedHostFields) and machine.is_rented:
        return _rented_member(name, nodeset, roles, machine)
    kind = machine.kind or default_kind
    return Member(
        name=name,
        roles=roles,
        nodeset=nodeset,
        provider=machine.provider,
        shape=Shape(
            image=machine.image,
            cpus=machine.cpus,
            memory_mb=size_mb(machine.memory) if machine.memory else None,
            disk_mb=size_mb(machine.disk) if machine.disk else None,
            gpus=machine.gpus,
            site=machine.site,
            cgroups=machine.cgroups,
            vm=kind == "vm",
            engine=kind if kind in ENGINES else "",
        ),
        **_slurm_fields(machine),
    )


def _rented_member(name: str, nodeset: str, roles: frozenset[Role], host: Controller | Login) -> Member:
    return Member(
        name=name,
        roles=roles,
        nodeset=nodeset,
        provider=host.provider,
        identity=Path(host.identity).expanduser() if host.identity else None,
        shape=Shape(site=host.site),
        machine=RentedMachine(
            type=host.type or "",
            region=host.region or "",
            zone=host.zone or "",
            image=host.image if host.is_set("image") else "",
            disk_gb=-(-size_mb(host.disk) // 1024) if host.disk else DISK_GB,
            keep_address=host.address,
            usd_hour=host.usd_hour,
        ),
        **_slurm_fields(host),
    )


def _slurm_fields(entry: Controller | HostSet) -> dict[str, Any]:
    own = ("features", "weight", "shards", "mps") if isinstance(entry, NodeSet) else ()
    return {"driver": getattr(entry, "driver", None) or "", **{name: getattr(entry, name) for name in own}}
