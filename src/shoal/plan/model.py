"""A plan: what differs between the spec and the hosts, frozen. What is shown is what is applied."""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass, field, replace
from enum import IntEnum

from shoal.agent.document import Document
from shoal.errors import HostError
from shoal.plan.shapes import words
from shoal.providers.api import Request
from shoal.roles.part import Kept
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding


class Cost(IntEnum):
    """What a change costs those who use the cluster, from least to most."""

    NOTHING = 0
    RESTART = 1
    DRAIN = 2
    JOBS = 3

    @property
    def words(self) -> str:
        return {0: "nothing", 1: "daemon restart", 2: "node drained", 3: "jobs lost"}[self.value]


@dataclass(frozen=True)
class Change:
    """One difference on one host."""

    host: str
    what: str
    """`file /etc/slurm/slurm.conf`"""
    action: str
    """What will be done: `create`, `install`, `restart` …"""
    cost: Cost = Cost.NOTHING
    diff: str = ""


@dataclass(frozen=True)
class HostPlan:
    """What one host is to become, stage by stage, and how that differs from what it is."""

    name: str
    stages: tuple[tuple[Stage, Document], ...]
    changes: tuple[Change, ...] = ()

    def document(self, stage: Stage) -> Document:
        return next((document for at, document in self.stages if at is stage), ())

    def at_cost(self, cost: Cost, keys: Container[str]) -> HostPlan:
        """The same, where changes of these items cost that."""
        changes = (replace(change, cost=cost) if change.what in keys else change for change in self.changes)
        return replace(self, changes=tuple(changes))


@dataclass(frozen=True)
class Plan:
    """All changes to a cluster."""

    cluster: str
    create: tuple[tuple[str, Request], ...] = ()
    """Hosts to be made, each with the name of its provider. What they need shows once they are there."""
    drain: tuple[str, ...] = ()
    """Nodes that leave: drained, waited for, then taken out."""
    delete: tuple[tuple[str, str], ...] = ()
    """Instances to be removed, as (provider, name)."""
    unasked: tuple[str, ...] = ()
    """Those of them that another controller ran: this one cannot say which jobs end with them."""
    prepare: tuple[Change, ...] = ()
    """What hosts must be first; what the rest changes on them may be more once they are."""
    hosts: tuple[HostPlan, ...] = ()
    after_drain: tuple[HostPlan, ...] = ()
    """The hosts once the drained nodes are out of the configuration, and what that changes."""
    loses: tuple[str, ...] = ()
    """Jobs that the changes would end."""
    kept: Mapping[str, Kept] = field(default_factory=dict)
    """Where the secrets are that hosts share."""
    given: Mapping[str, str] = field(default_factory=dict)
    """Where the user keeps secrets that hosts need: references, never values."""
    findings: tuple[Finding, ...] = ()
    unreached: Mapping[str, HostError] = field(default_factory=dict)
    """Hosts that could not be looked at, with the cause and the fix."""

    @property
    def changes(self) -> tuple[Change, ...]:
        made = tuple(
            Change(request.name, "host", f"create on {provider}: {words(request.shape)}")
            for provider, request in self.create
        )
        drained = tuple(Change(name, "node", "drain, then remove", Cost.DRAIN) for name in self.drain)
        deleted = tuple(
            Change(name, "host", f"delete from {provider}", self._cost_of_deleting(name))
            for provider, name in self.delete
        )
        on_hosts = tuple(change for host in (*self.hosts, *self.after_drain) for change in host.changes)
        return made + self.prepare + drained + on_hosts + deleted

    @property
    def cost(self) -> Cost:
        return max((change.cost for change in self.changes), default=Cost.NOTHING)

    @property
    def empty(self) -> bool:
        return not self.changes

    def _cost_of_deleting(self, name: str) -> Cost:
        if name in self.unasked:
            return Cost.JOBS
        return Cost.DRAIN if name in self.drain else Cost.NOTHING
