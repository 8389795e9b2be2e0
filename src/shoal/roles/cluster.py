"""The cluster as one value, from which every role says what a host should be. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

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
        if user and group and not _taken(user.id, name, users) and not _taken(group.id, name, groups):
            return AccountIds(uid=user.id, gid=group.id)
    number = first_choice
    while _taken(number, name, users) or _taken(number, name, groups):
        number -= 1
    return AccountIds(uid=number, gid=number)


def _taken(number: int, name: str, tables: list[Mapping[str, UnixIds]]) -> bool:
    """Whether another name has this id on any host."""
    return any(account.id == number and other != name for table in tables for other, account in table.items())
