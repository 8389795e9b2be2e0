"""A plan: what differs between the spec and the hosts, frozen. What is shown is what is applied."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import IntEnum

from shoal.agent.document import Document
from shoal.errors import HostError
from shoal.providers.api import Request
from shoal.roles.documents import Stage
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
    hosts: tuple[HostPlan, ...] = ()
    after_drain: tuple[HostPlan, ...] = ()
    """The controller and login hosts once the drained nodes are out of the configuration."""
    loses: tuple[str, ...] = ()
    """Jobs that the changes would end."""
    findings: tuple[Finding, ...] = ()
    unreached: Mapping[str, HostError] = field(default_factory=dict)
    """Hosts that could not be looked at, with the cause and the fix."""

    @property
    def changes(self) -> tuple[Change, ...]:
        made = tuple(
            Change(request.name, "host", f"create on {provider}: {_shape(request)}")
            for provider, request in self.create
        )
        drained = tuple(Change(name, "node", "drain, then remove", Cost.DRAIN) for name in self.drain)
        deleted = tuple(Change(name, "host", f"delete from {provider}") for provider, name in self.delete)
        return made + drained + tuple(change for host in self.hosts for change in host.changes) + deleted

    @property
    def cost(self) -> Cost:
        return max((change.cost for change in self.changes), default=Cost.NOTHING)

    @property
    def empty(self) -> bool:
        return not self.changes


def _shape(request: Request) -> str:
    shape = request.shape
    parts = [shape.image]
    if shape.cpus:
        parts.append(f"{shape.cpus} CPUs")
    if shape.memory_mb:
        parts.append(f"{shape.memory_mb} MB")
    if shape.gpus:
        parts.append(f"{shape.gpus} simulated GPUs")
    if shape.site != "a":
        parts.append(f"site {shape.site}")
    return ", ".join(parts)
