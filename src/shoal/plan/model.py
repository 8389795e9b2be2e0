"""A plan: all differences between the spec and the hosts, frozen. What is shown is what is applied."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import IntEnum

from shoal.agent.document import Document
from shoal.errors import HostError
from shoal.hostlist import compress
from shoal.hosts.provider import HostQuote, Request
from shoal.roles.component import SharedSecret, Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member, Shape


class Cost(IntEnum):
    """What a change costs those who use the cluster, from least to most."""

    NOTHING = 0
    RESTART = 1
    DRAIN = 2
    JOBS = 3

    @property
    def label(self) -> str:
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
        return next((document for document_stage, document in self.stages if document_stage is stage), ())

    def with_cost(self, cost: Cost, keys: Container[str]) -> HostPlan:
        """The same plan with this cost for changes of these items."""
        changes = (replace(change, cost=cost) if change.what in keys else change for change in self.changes)
        return replace(self, changes=tuple(changes))


@dataclass(frozen=True)
class Plan:
    """All changes to a cluster."""

    cluster: str
    create: tuple[tuple[str, Request], ...] = ()
    """Hosts to create, each with the name of its provider. Their changes are known once they exist."""
    rent: tuple[HostQuote, ...] = ()
    """What those of `create` cost that are rented."""
    drain: tuple[str, ...] = ()
    """Nodes that leave: drained, waited for, then removed."""
    delete: tuple[tuple[str, str], ...] = ()
    """Instances to delete, as (provider, name)."""
    foreign: tuple[str, ...] = ()
    """Those of `delete` that belong to another controller: their jobs are not known here."""
    take_over: tuple[Change, ...] = ()
    """Hosts that other clusters have, and lose."""
    prepare: tuple[Change, ...] = ()
    """Changes that come first; afterwards a host may need more than `hosts` shows."""
    hosts: tuple[HostPlan, ...] = ()
    after_drain: tuple[HostPlan, ...] = ()
    """The hosts once the drained nodes are removed from the configuration, and what that changes."""
    lost_jobs: tuple[str, ...] = ()
    """Jobs that the changes would end."""
    shared_secrets: Mapping[str, SharedSecret] = field(default_factory=dict)
    """Where the secrets that hosts share are kept."""
    user_secrets: Mapping[str, str] = field(default_factory=dict)
    """References to the user's secrets that hosts need; never values."""
    findings: tuple[Finding, ...] = ()
    unreached: Mapping[str, HostError] = field(default_factory=dict)
    """Hosts that could not be observed, with the cause and the fix."""

    @property
    def changes(self) -> tuple[Change, ...]:
        quotes = {quote.name: f"rent from {quote.provider}: {quote}" for quote in self.rent}
        create_changes = tuple(
            Change(request.name, "host", quotes.get(request.name) or _creation(provider, request))
            for provider, request in self.create
        )
        drain_changes = tuple(Change(name, "node", "drain, then remove", Cost.DRAIN) for name in self.drain)
        costs = {**dict.fromkeys(self.drain, Cost.DRAIN), **dict.fromkeys(self.foreign, Cost.JOBS)}
        delete_changes = tuple(
            # A sentence, and no SQL.
            Change(name, "host", f"delete from {provider}", costs.get(name, Cost.NOTHING))  # nosec B608
            for provider, name in self.delete
        )
        host_changes = tuple(change for host in (*self.hosts, *self.after_drain) for change in host.changes)
        return create_changes + self.take_over + self.prepare + drain_changes + host_changes + delete_changes

    @property
    def cost(self) -> Cost:
        return max((change.cost for change in self.changes), default=Cost.NOTHING)

    @property
    def empty(self) -> bool:
        return not self.changes


def _creation(provider: str, request: Request) -> str:
    if request.machine is not None:  # rented before, and stopped
        return f"start {request.machine.type} at {provider}"
    return f"create on {provider}: {describe_shape(request.shape)}"


def describe_shape(shape: Shape) -> str:
    """The shape in short: `debian12, 2 CPUs, 2 simulated GPUs`."""
    texts = [shape.image, *(["virtual machine"] if shape.vm else [shape.engine] if shape.engine else [])]
    if shape.cpus:
        texts.append("1 CPU" if shape.cpus == 1 else f"{shape.cpus} CPUs")
    if shape.memory_mb:
        texts.append(f"{shape.memory_mb} MB")
    if shape.gpus:
        texts.append("1 simulated GPU" if shape.gpus == 1 else f"{shape.gpus} simulated GPUs")
    if shape.site != "a":
        texts.append(f"site {shape.site}")
    return ", ".join(texts)


def shape_findings(members: Iterable[Member], made: Mapping[str, Shape]) -> list[Finding]:
    """Hosts that were created in another shape than the spec now has: only creating them again changes that."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for member in (member for member in members if member.machine is None):
        current_shape = made.get(member.name, member.shape)
        names = [field.name for field in fields(Shape)]
        changed_fields = [name for name in names if getattr(current_shape, name) != getattr(member.shape, name)]
        if changed_fields:
            old, new = (
                ", ".join(_describe_field(shape, name) for name in changed_fields)
                for shape in (current_shape, member.shape)
            )
            groups.setdefault((old, new, _remake_fix(member)), []).append(member.name)
    return [
        Finding("warning", f"was made with {old}; the file now says {new}", fix=fix, host=compress(names))
        for (old, new, fix), names in groups.items()
    ]


def _describe_field(shape: Shape, name: str) -> str:
    """One field of a shape."""
    value = getattr(shape, name)
    gpus = f"{value} GPU" if value == 1 else f"{value} GPUs"
    return {
        "image": f"image {value}",
        "cpus": f"{value} CPUs" if value else "all CPUs",
        "memory_mb": f"{value} MB of memory" if value else "memory without a limit",
        "disk_mb": f"a disk of {value} MB" if value else "no disk of its own",
        "gpus": gpus if value else "no GPU",
        "site": f"site {value}",
        "cgroups": "cgroups" if value else "no cgroups",
        "vm": "a virtual machine" if value else "a container",
        "engine": f"a container of {value}" if value else "no container engine",
        "container": "no init system and one open port" if value else "a whole machine",
    }.get(name, f"{name} {value}")


def _remake_fix(member: Member) -> str:
    if "controller" in member.roles:
        return "`shoal down` and `shoal up` remake it"
    if "compute" in member.roles:
        return "`shoal node remove` it, put it back into the file and run `shoal up` to remake it"
    return "take it out of the file and run `shoal up`, then put it back and run `shoal up` to remake it"
