"""What `shoal.yaml` may say, as frozen models: Spec has every section of the file.

A host is either there already (`hosts`, reached by SSH), made by a provider (`provider` with `count`), or rented from
one when a job needs it (`provider` with `max`). `Spec.problems` checks the rules between fields, when a Spec is built
and when a file is loaded; the rules of a section are beside its model.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Field, StrictBool, ValidationInfo, model_validator
from pydantic_core import PydanticCustomError

from shoal.spec.accounting import Accounting, accounting_problems, unless_false
from shoal.spec.checks import choice
from shoal.spec.containers import Containers, container_problems
from shoal.spec.environments import Environment, EnvironmentName, Proxy, environment_problems
from shoal.spec.files import Destination, ShippedFile, file_problems
from shoal.spec.finding import Problem
from shoal.spec.health import Health
from shoal.spec.hosts import Controller, Login, NodeSet, host_problems, located_members, rental_names
from shoal.spec.machines import Sandbox
from shoal.spec.network import Network, network_problems
from shoal.spec.partitions import Partition, partition_account_problems, partition_problems
from shoal.spec.rental import SANDBOX, Budget, ProviderAccount, ProviderName
from shoal.spec.rental_rules import hub_problems, lan_problems, rental_problems
from shoal.spec.rented_hosts import located_sets, rented_host_problems
from shoal.spec.slurm_options import SlurmOptions, option_problems, source_problems
from shoal.spec.storage import SharedDirectory, SharePath, storage_problems
from shoal.spec.tracking import Tracking, tracking_problems
from shoal.spec.users import ClusterUser, UserName, user_problems
from shoal.spec.values import ClusterName, NodesetName, PartitionName, SpecModel

UNCHECKED = "unchecked"
"""The validation context of the loader, which asks for the problems itself, the warnings too."""


class Spec(SpecModel):
    """The whole file."""

    cluster: ClusterName
    """The cluster's name: Slurm's ClusterName, and the name under which Shoal stores host keys."""
    network: Network = Field(default_factory=lambda: Network(kind="lan"))
    """How the hosts reach each other: `lan`, `wireguard`, `tailscale`, or a mapping. Without it, `lan`."""
    controller: Controller
    """The host that runs slurmctld."""
    login: Login | None = None
    """Hosts to submit from. The controller works too."""
    nodesets: dict[NodesetName, NodeSet] = Field(default_factory=dict)
    """The hosts that run jobs, by the name of their set."""
    sandbox: Sandbox = Field(default_factory=Sandbox)
    """What the sandbox's hosts are: `container`, `vm` (with a kernel of their own), `podman` or `docker`."""
    partitions: dict[PartitionName, Partition] = Field(default_factory=dict)
    """The queues, by name. Without any, `main` with every nodeset, and the controller if it computes."""
    providers: dict[ProviderName, ProviderAccount] = Field(default_factory=dict)
    """Accounts at providers that rent machines out, by name: `{lambda: {key: env:LAMBDA_API_KEY}}`."""
    budget: Budget | None = None
    """What all rented machines together may cost."""
    firewall: StrictBool = True
    """Open Slurm's ports to the cluster's hosts only (nftables). `false` leaves the hosts' firewalls alone."""
    auth: Annotated[Literal["munge", "slurm"], BeforeValidator(choice("auth", ("munge", "slurm")))] = "munge"
    """What authenticates Slurm's daemons: `munge`, or, from Slurm 24.05 on, `slurm`; `from: shoal` needs `slurm`."""
    accounting: Annotated[Accounting | None, BeforeValidator(unless_false)] = None
    """Job records in a database: `true`, or a mapping with accounts, users and limits."""
    storage: dict[SharePath, SharedDirectory] = Field(default_factory=dict)
    """Directories that all hosts share, by their mount path: `{/data: {kind: nfs}}`."""
    users: dict[UserName, ClusterUser] = Field(default_factory=dict)
    """Users that log in and run jobs, by name; the same on all hosts."""
    environments: dict[EnvironmentName, Environment] = Field(default_factory=dict)
    """Python environments for jobs, by name: `shoal env build` makes them, `shoal run --env NAME` uses one."""
    containers: Containers | None = None
    """The engine that runs jobs in images: `oci` or `pyxis`. `shoal run --image` needs `oci`."""
    mpi: Annotated[Literal["openmpi"], BeforeValidator(choice("MPI", ("openmpi",)))] | None = None
    """The MPI of the hosts that run jobs: `openmpi`. They also get the tools that `shoal validate` measures with."""
    proxy: Proxy | None = None
    """The proxies through which hosts get packages."""
    tracking: Tracking | None = None
    """The server that training jobs report to: `mlflow`, or a mapping."""
    time: Annotated[Literal["chrony", "none"], BeforeValidator(choice("time service", ("chrony", "none")))] = "chrony"
    """Synchronizes the hosts' clocks: `chrony`, or `none` for your own service. Containers use their host's clock."""
    files: dict[Destination, ShippedFile] = Field(default_factory=dict)
    """Your files on the hosts, by their path there: `{/etc/slurm/prolog.sh: scripts/prolog.sh}`."""
    health: Health = Field(default_factory=Health)
    """What the health program on the nodes does: `drain`, `warn`, `off`, or a mapping."""
    slurm: SlurmOptions = Field(default_factory=lambda: SlurmOptions.model_validate({}))
    """Which Slurm the hosts get, and further keys of slurm.conf."""

    @model_validator(mode="before")
    @classmethod
    def _choose_auth(cls, data: Any) -> Any:
        """Shoal's own Slurm authenticates its daemons itself, without a line in the file."""
        slurm = data.get("slurm") if isinstance(data, dict) else None
        if isinstance(slurm, dict) and slurm.get("from") == "shoal" and "auth" not in data:
            return {**data, "auth": "slurm"}
        return data

    @model_validator(mode="after")
    def _check_rules(self, info: ValidationInfo) -> Self:
        if info.context == UNCHECKED:
            return self
        errors = [problem for problem in self.problems() if problem.level == "error"]
        if errors:
            raise PydanticCustomError("rules", "{text}", {"text": "; ".join(map(str, errors))})
        return self

    def problems(self) -> list[Problem]:
        """Every rule between fields that does not hold. Works on a partial spec too: see `loader.partial`."""
        members = [member for _, member in located_members(self.controller, self.login, self.nodesets)]
        hosts = [member.name for member in members]
        controller = next((member.name for member in members if "controller" in member.roles), None)
        all_known = "nodesets" not in self.invalid
        computes = self.controller is not None and self.controller.compute
        listable = [*(name for name in self.nodesets if name != "controller"), *(["controller"] if computes else [])]
        sets = (self.controller, self.login, *self.nodesets.values())
        rented = [entry.provider for _, entry in located_sets(self.controller, self.login)]
        has_sandbox = any(entry is not None and entry.provider == SANDBOX for entry in sets)
        return [
            *host_problems(self.controller, self.login, self.nodesets, all_known=all_known),
            *partition_problems(self.partitions, listable, all_known=all_known),
            *partition_account_problems(self.partitions, self.accounting, valid="accounting" not in self.invalid),
            *option_problems(self.slurm.options, accounting=self.accounting is not None),
            *source_problems(self.slurm, self.auth if "auth" in self.model_fields_set else "slurm"),
            *network_problems(self.network, hosts, rentals=len(list(rental_names(self.nodesets)))),
            *accounting_problems(self.accounting, hosts, self.slurm.options),
            *environment_problems(self.environments, self.proxy),
            *tracking_problems(self.tracking, self.storage, hosts),
            *storage_problems(self.storage, hosts, has_sandbox=has_sandbox),
            *user_problems(self.users),
            *container_problems(self.containers, self.tracking, hosts),
            *file_problems(self.files, self.nodesets, self.storage, self.slurm.options),
            *rental_problems(self.providers, self.nodesets, self.partitions, self.budget, rented),
            *rented_host_problems(self.controller, self.login, self.providers, self.network),
            *hub_problems(self.network, controller, self.nodesets),
            *lan_problems(self.network, self.controller, self.providers, self.nodesets),
        ]
