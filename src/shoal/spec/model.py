"""What `shoal.yaml` may say, as frozen models.

    Spec
    ├── network: Network             how the hosts reach each other; `lan` without it
    ├── controller: Controller       the host that runs slurmctld
    ├── login: Login                 hosts to submit from; optional
    ├── nodesets: NodeSet ...        the hosts that compute
    ├── partitions: Partition ...    the queues over the nodesets; optional
    ├── providers: ProviderAccount . who rents machines out to rented nodesets; optional
    ├── budget: Budget               how much rented machines may cost; optional
    ├── accounting: Accounting       job records in a database, accounts and limits; optional
    ├── environments: Environment .. Python environments for jobs; optional
    ├── storage: SharedDirectory ... directories that all hosts have; optional
    ├── users: ClusterUser ...       who logs in, the same on all hosts; optional
    ├── tracking: Tracking           the server that jobs report to; optional
    └── slurm: SlurmOptions          more of slurm.conf; optional

A host is either there already (`hosts`, reached by SSH), made by a provider (`provider` with `count`), or rented from
one when a job needs it (`provider` with `max`). What holds between several fields is checked in `rules.py`, both here
and when a file is loaded.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    GetJsonSchemaHandler,
    StrictBool,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema, PydanticCustomError

from shoal import hostlist
from shoal.spec import rules
from shoal.spec.accounting import Accounting, Price, unless_false
from shoal.spec.closed import Closed as Closed
from shoal.spec.environments import Environment, EnvironmentName, Proxy
from shoal.spec.network import Endpoint, Network
from shoal.spec.rented import KINDS as RENTERS
from shoal.spec.rented import (
    MOST,
    SANDBOX,
    Budget,
    MachineType,
    MarketName,
    Money,
    OfferChoice,
    ProviderAccount,
    Region,
    Zone,
)
from shoal.spec.rented import AccountName as ProviderName
from shoal.spec.slurm_options import SlurmOptions
from shoal.spec.storage import SharedDirectory, SharePath
from shoal.spec.tracking import Tracking
from shoal.spec.users import AccountName, ClusterUser
from shoal.spec.words import (
    Address,
    Between,
    ClusterName,
    Disk,
    Duration,
    FeatureName,
    FilePath,
    HostNames,
    Memory,
    NodesetName,
    PartitionName,
    Port,
    SetName,
    SiteName,
    SlurmTime,
    UserName,
    choice,
    refusal,
)
from shoal.train.contract import GRACE_SECONDS

IMAGES = ("debian12", "debian13", "sid")

_HOST_TEXT = re.compile(r"(?:(?P<user>[^@]*)@)?(?P<name>.*?)(?::(?P<port>[^:\[\]]*))?", re.DOTALL)


class HostEntry(Closed):
    """One host that is there already, or several written as a hostlist.

    In the file it is a name (`gpu01`), a hostlist (`gpu[01-16]`), either of them with a user and a port
    (`ubuntu@gpu01:2222`), or a mapping of the fields below. Inside `[...]` YAML wants quotes around a hostlist:
    `hosts: ["gpu[01-16]"]`.
    """

    name: HostNames
    """The name Shoal and Slurm know the host by. Without `address`, also the name SSH looks up in `~/.ssh/config`."""
    address: Address | None = None
    """The IP address or DNS name to reach it at, where that is not its name."""
    port: Port | None = None
    """The port of its SSH daemon."""
    user: UserName | None = None
    """The user to log in as: root, or one who may use sudo without a password."""
    identity: FilePath | None = None
    """The private key to log in with, a file on your machine."""
    endpoint: Endpoint | None = None
    """WireGuard: where other sites reach it, `address` or `address:port`, when a router forwards that to it."""

    @property
    def names(self) -> tuple[str, ...]:
        """Every host this entry stands for."""
        return tuple(hostlist.expand(self.name))

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | HostEntry):
            raise refusal("not a host", "write its name, or {name: node1, address: 10.0.0.1}")
        return parse_host(value) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _one_address_one_host(self) -> Self:
        if self.address is not None and len(self.names) != 1:
            raise refusal("one address for several hosts", "write one entry a host", self.name)
        return self

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        text = {"type": "string", "description": "A name, a hostlist such as gpu[01-16], or user@name:port."}
        return {"anyOf": [text, {**mapping}], "description": mapping["description"]}


def parse_host(text: str) -> dict[str, Any]:
    """`user@name:port` as a mapping. Only takes the text apart: the fields check what they are given."""
    match = _HOST_TEXT.fullmatch(text)
    assert match is not None
    if text.count(":") > 1:  # an IPv6 address, whole; the field says what to do about it
        user, at, name = text.rpartition("@")
        return {"name": name, "user": user} if at else {"name": name}
    parts: dict[str, Any] = {key: value for key, value in match.groupdict().items() if value is not None}
    if "port" in parts:
        port = parts["port"]
        parts["port"] = int(port) if re.fullmatch("[0-9]{1,9}", port) else port
    return parts


class Reach(Closed):
    """How to log in to hosts that are there already."""

    user: UserName | None = None
    """The user to log in as, for every host here that does not say otherwise."""
    port: Port | None = None
    """The port of the SSH daemon, for every host here that does not say otherwise."""
    identity: FilePath | None = None
    """The private key to log in with, for every host here that does not say otherwise."""


def _maker(value: object) -> str:
    if isinstance(value, str) and value in RENTERS and value != SANDBOX:
        raise refusal("only nodesets are rented", "use `host`, or `provider: sandbox`")
    return choice("provider", (SANDBOX,))(value)


class Machine(Closed):
    """What a provider is asked to make."""

    provider: Annotated[str, BeforeValidator(_maker), WithJsonSchema({"type": "string", "const": "sandbox"})] | None = (
        None
    )
    """Who makes the hosts. `sandbox` makes real Debian hosts as light containers on this machine."""
    image: Annotated[Literal["debian12", "debian13", "sid"], BeforeValidator(choice("image", IMAGES))] = "debian12"
    """The system on the host; it decides the Slurm version: 22.05, 24.11 or 26.05."""
    cpus: Annotated[int, Between(1, 1024)] | None = None
    """CPUs of each host."""
    memory: Memory | None = None
    """Memory of each host, at least 256M."""
    disk: Disk | None = None
    """Disk space of each host; without it, whatever this machine has."""
    gpus: Annotated[int, Between(0, 16)] = 0
    """Simulated GPUs of each host."""
    cgroups: StrictBool = False
    """Give the hosts writable cgroup controllers, so that Slurm confines jobs. With cgroup v1, only with debian12."""


class Placed(Closed):
    """Where hosts are."""

    site: SiteName = "a"
    """Where they are. Hosts of one site see each other directly; a job stays on one unless it asks for more."""


class Controller(Placed, Reach, Machine):
    """The host that runs slurmctld. Either `host` or `provider`."""

    host: HostEntry | None = None
    """The host, when it is there already."""
    compute: StrictBool = False
    """Run jobs on it as well. Partitions then may list `controller` among their nodesets."""


class HostSet(Placed, Reach, Machine):
    """Hosts of one kind. Either `hosts` or `provider`."""

    hosts: tuple[HostEntry, ...] = ()
    """Hosts that are there already."""
    count: Annotated[int, Between(1, 64)] | None = None
    """How many hosts the provider makes. They are called after the set: `fish1`, `fish2`."""


class Login(HostSet):
    """Hosts that users log in to, to submit jobs from. They run no jobs. Either `hosts` or `provider`."""


class NodeSet(HostSet):
    """Hosts of one kind that run jobs. Either `hosts` or `provider`; with `max` they are rented when jobs need them."""

    provider: ProviderName | None = None
    """Who makes the hosts: `sandbox`, or with `max` the name of an account under `providers`."""
    max: Annotated[int, Between(1, MOST)] | None = None
    """Rented: how many nodes there may be at most. They are called after the set: `cloud1`, `cloud2`."""
    type: MachineType | None = None
    """Rented: the provider's name of the machine, `gpu_8x_h100_sxm5`."""
    region: Region | None = None
    """Rented: the region; without it, any."""
    zone: Zone | None = None
    """Rented: the zone, where the provider has zones; without it, any."""
    market: MarketName = "on-demand"
    """Rented: `on-demand`, or `spot`: cheaper, and the provider may take it back."""
    offers: tuple[OfferChoice, ...] = ()
    """Rented: several places to rent from, in place of `provider`, `type`, `region`, `zone` and `market`."""
    prefer: Annotated[Literal["listed", "cheapest"], BeforeValidator(choice("order", ("listed", "cheapest")))] = (
        "listed"
    )
    """Rented: try the offers as they are listed, or the cheapest first."""
    idle: Duration | None = None
    """Rented: how long a node waits for another job before it is given back. Without it, 10m."""
    lifetime: Duration | None = None
    """Rented: after this a machine is given back whatever it does. Without it, 24h."""
    max_price: Money | None = None
    """Rented: what one machine may cost an hour at most."""
    budget: Budget | None = None
    """Rented: what the whole set may cost, beside the cluster's own `budget`."""
    features: tuple[FeatureName, ...] = ()
    """Slurm features, for `--constraint`."""
    weight: Annotated[int, Between(1, 1_000_000)] = 1
    """Slurm gives a job the nodes of lowest weight that do."""
    price: Price | None = None
    """What an hour of one of its GPUs costs, in your currency; `shoal usage` reckons with it."""


class Partition(Closed):
    """A queue over some of the nodesets."""

    nodesets: tuple[SetName, ...]
    """The nodesets whose hosts take its jobs; `controller` may be among them when the controller computes."""
    default: StrictBool = False
    """Jobs that name no partition go here. When no partition says so, the first one is it."""
    max_time: SlurmTime | None = None
    """The longest a job may run: minutes, HH:MM:SS, D-HH:MM:SS or `infinite`. Without it, as long as it likes."""
    default_time: SlurmTime | None = None
    """How long a job may run that does not say. Without it, `max_time`."""
    max_nodes: Annotated[int, Between(1, 65533)] | None = None
    """The most nodes one job may have."""
    priority: Annotated[int, Between(1, 65533)] | None = None
    """Slurm's PriorityTier, 1 without it: jobs of a higher tier start first, and preempt running ones of a lower."""
    grace: Annotated[int, Between(0, 65533)] = GRACE_SECONDS
    """Seconds from the warning of a preempted job to its end: to save its work. It is queued again, and goes on."""
    preemptable: StrictBool = True
    """Whether its jobs may be preempted."""


class Spec(Closed):
    """The whole file."""

    cluster: ClusterName
    """The cluster's name: Slurm's ClusterName, and the name Shoal keeps host keys under."""
    network: Network = Field(default_factory=lambda: Network(kind="lan"))
    """How the hosts reach each other: `lan`, `wireguard`, `tailscale`, or a mapping. Without it, `lan`."""
    controller: Controller
    """The host that runs slurmctld."""
    login: Login | None = None
    """Hosts to submit from. The controller serves for that as well."""
    nodesets: dict[NodesetName, NodeSet] = Field(default_factory=dict)
    """The hosts that run jobs, by the name of their set."""
    partitions: dict[PartitionName, Partition] = Field(default_factory=dict)
    """The queues, by name. Without any, one called `main` with every nodeset, and the controller when it computes."""
    providers: dict[ProviderName, ProviderAccount] = Field(default_factory=dict)
    """Accounts at providers that rent machines out, by name: `{lambda: {key: env:LAMBDA_API_KEY}}`."""
    budget: Budget | None = None
    """What all rented machines together may cost."""
    firewall: StrictBool = True
    """Open Slurm's ports to the cluster's hosts only (nftables). `false` leaves the hosts' firewalls alone."""
    auth: Annotated[Literal["munge", "slurm"], BeforeValidator(choice("auth", ("munge", "slurm")))] = "munge"
    """What signs the messages of Slurm's daemons: `munge`, or, from Slurm 24.05 on, `slurm` itself."""
    accounting: Annotated[Accounting | None, BeforeValidator(unless_false)] = None
    """Job records in a database: `true`, or a mapping with accounts, users and limits."""
    storage: dict[SharePath, SharedDirectory] = Field(default_factory=dict)
    """Directories that all hosts have, by the path under which they have them: `{/data: {kind: nfs}}`."""
    users: dict[AccountName, ClusterUser] = Field(default_factory=dict)
    """Who logs in and has jobs run, the same on all hosts, by name."""
    environments: dict[EnvironmentName, Environment] = Field(default_factory=dict)
    """Python environments for jobs, by name: `shoal env build` makes them, `shoal run --env NAME` uses one."""
    proxy: Proxy | None = None
    """The proxies through which hosts get packages."""
    tracking: Tracking | None = None
    """The server that training jobs report to: `mlflow`, or a mapping with more of it."""
    time: Annotated[Literal["chrony", "none"], BeforeValidator(choice("time service", ("chrony", "none")))] = "chrony"
    """What keeps the hosts' clocks together: `chrony`, or `none`, not Shoal. Containers have no clock of their own."""
    slurm: SlurmOptions = Field(default_factory=SlurmOptions)
    """Further keys of slurm.conf."""

    @model_validator(mode="after")
    def _keeps_the_rules(self) -> Self:
        problems = rules.problems(self.model_dump())
        broken = [problem for problem in problems if problem.level == "error"]
        if broken:
            raise PydanticCustomError("rules", "{text}", {"text": "; ".join(map(str, broken))})
        return self
