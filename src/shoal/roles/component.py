"""The interface of a component: a part of the cluster beside Slurm itself, such as storage, users or the network.

`registry.py` lists them all. A component that the spec does not ask for removes what an earlier spec asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Literal

from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.roles.cluster import Cluster
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

FileQuery = Literal["hash", "text", "there"]
"""What to ask a host about a file: its digest, its text, or whether it exists."""


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

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """Problems that the user must solve."""
        return ()
