"""The cluster as one value, and the interface of a component: a part beside Slurm itself, such as storage or users.

`registry.py` lists all components. One that the spec does not ask for removes what an earlier spec asked for. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

from shoal.agent.document import Document
from shoal.agent.facts import NO_FACTS, Facts, UnixIds
from shoal.network.tunnel import Tunnel
from shoal.slurm.model import ClusterConf
from shoal.slurm.versions import Version
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

# Debian's policy gives Slurm this id; munge gets a free one at install time, which differs from host to host.
SLURM_FIRST_CHOICE = 64030
MUNGE_FIRST_CHOICE = 980
PACKAGES_PREFIX = "/usr"
"""Where packages install Slurm's programs."""


@dataclass(frozen=True)
class AccountIds:
    """A user id and the id of the group of the same name."""

    uid: int
    gid: int


@dataclass(frozen=True)
class ServiceIds:
    slurm: AccountIds
    munge: AccountIds


@dataclass(frozen=True)
class Cluster:
    """Everything that a role needs to know about the cluster."""

    spec: Spec
    members: tuple[Member, ...]
    facts: Mapping[str, Facts]
    addresses: Mapping[str, str]
    versions: Mapping[str, Version]
    ids: ServiceIds
    conf: ClusterConf
    findings: tuple[Finding, ...] = ()
    """Problems that the user must solve."""
    tunnels: Mapping[str, Tunnel] = field(default_factory=dict)
    """The tunnels to containers, by name; these have no address in `addresses`."""
    user_ids: Mapping[str, AccountIds] = field(default_factory=dict)
    """The ids of the spec's users on all hosts."""
    slurm_prefix: str = PACKAGES_PREFIX
    """The directory of Slurm's `bin` and `sbin` on all hosts."""

    @property
    def controller(self) -> Member:
        return self.members[0]

    @property
    def controller_facts(self) -> Facts:
        return self.facts_of(self.controller.name)

    def facts_of(self, name: str) -> Facts:
        """The facts of a host; empty ones where it does not answer."""
        return self.facts.get(name, NO_FACTS)


def choose_ids(controller: str, facts: Mapping[str, Facts]) -> ServiceIds:
    """The ids of Slurm's and munge's users on all hosts."""
    return ServiceIds(
        slurm=choose_account_ids("slurm", SLURM_FIRST_CHOICE, controller, facts),
        munge=choose_account_ids("munge", MUNGE_FIRST_CHOICE, controller, facts),
    )


def choose_account_ids(name: str, first_choice: int, controller: str, facts: Mapping[str, Facts]) -> AccountIds:
    """The controller's ids of a user and its group, else another host's, else a number free on every host."""
    ordered = [facts[host] for host in sorted(facts, key=lambda host: host != controller)]
    users, groups = [fact.users for fact in ordered], [fact.groups for fact in ordered]
    for fact in ordered:
        user, group = fact.users.get(name), fact.groups.get(name)
        if user and group and not _is_taken(user.id, name, users) and not _is_taken(group.id, name, groups):
            return AccountIds(uid=user.id, gid=group.id)
    number = first_choice
    while _is_taken(number, name, users) or _is_taken(number, name, groups):
        number -= 1
    return AccountIds(uid=number, gid=number)


def _is_taken(number: int, name: str, tables: list[Mapping[str, UnixIds]]) -> bool:
    """Whether another name has this id on any host."""
    return any(account.id == number and other != name for table in tables for other, account in table.items())


FileQuery = Literal["hash", "text", "there", "program"]
"""What to ask a host about a file: its digest, its text, whether it exists, or whether it can be executed."""


class Stage(IntEnum):
    """All hosts finish a stage before any begins the next: nodes take their configuration from a running controller."""

    BASE = 1
    """Accounts, packages, keys, names, the firewall."""
    SERVICES = 2
    """What slurmctld and the jobs rely on: the network, the database, the server of a share."""
    CONTROLLER = 3
    NODES = 4
    """What relies on a running cluster: slurmd, mounts of shares."""


@dataclass(frozen=True)
class SharedSecret:
    """A secret that one host makes and keeps, and of which other hosts get a copy."""

    host: str
    path: str
    length: int
    text: bool = True
    """Hexadecimal digits; else bytes."""


class Component:
    """What a component may define. Every method has a default for components without that aspect."""

    files: Mapping[str, FileQuery] = {}
    """Files to ask every host about, as far as their names are constant."""
    services: tuple[str, ...] = ()
    """All services that its documents name, so that an agent asks systemd once."""
    changes_with_members = False
    """Whether its services on a host change when other members come or go."""
    changes_with_rentals = False
    """Whether they do on a permanent host when rented nodes come or go."""
    precedes_slurmd = False
    """Whether its part of the stage of nodes comes before slurmd on rented nodes, which get their job at once."""
    in_containers = False
    """Whether containers behind a tunnel have this component as other hosts do; else they go without it."""

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        """Packages the member needs. `facts` is None before the host has been observed."""
        return ()

    def fact_files(self, spec: Spec) -> Mapping[str, FileQuery]:
        """Further files to ask every host about."""
        return {}

    def filesystems(self, spec: Spec) -> tuple[str, ...]:
        """Kinds of file systems to ask every host's kernel about."""
        return ()

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        """TCP ports on the member that the firewall opens to cluster members only."""
        return ()

    def shared_secrets(self, spec: Spec) -> Mapping[str, SharedSecret]:
        """Secrets that the cluster makes for itself and several hosts share, by the name in a SecretRef."""
        return {}

    def user_secrets(self, spec: Spec) -> Mapping[str, str]:
        """Secrets of the user, by the name in a SecretRef: `env:NAME`, `file:PATH`, or Shoal itself."""
        return {}

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """What a host must be before the cluster can be assembled, such as its key for the network."""
        return ()

    def prepare_among(self, spec: Spec, member: Member, everyone: Mapping[str, Facts]) -> Document:
        """The same, where it depends on the facts of other hosts."""
        return ()

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        """What the member should be, stage by stage."""
        return {}

    def removal(self) -> Document:
        """What to remove from a host that leaves, before Slurm is removed."""
        return ()

    def cluster_services(self, facts: Facts) -> tuple[str, ...]:
        """What the other hosts of its cluster need this host for, in words."""
        return ()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """Problems that the user must solve."""
        return ()
