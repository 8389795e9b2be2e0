"""A part of the cluster beside Slurm itself: what each host has to be for it, and what others must know of that.

`parts.py` lists them all. A part that the spec does not ask for still has its say: it takes away what an earlier spec
had asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.roles.stage import Stage
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

How = Literal["hash", "text", "there"]


@dataclass(frozen=True)
class Kept:
    """A secret that one host makes and keeps, and from which others get a copy."""

    host: str
    path: str
    length: int
    text: bool = True
    """Hexadecimal digits; else bytes."""


class Part:
    """What a part of the cluster may say. Each method has an answer for a part that has nothing to say there."""

    files: Mapping[str, How] = {}
    """Files to ask every host about, as far as their names are always the same."""
    services: tuple[str, ...] = ()
    """All services that its documents name, so that an agent asks systemd once."""
    by_members = False
    """Whether what it wants of a host that is there, of its services, changes as other members come and go."""
    in_containers = False
    """Whether a container that only a tunnel leads into has this part as other hosts have it; else it goes without."""

    def packages(self, spec: Spec, member: Member, facts: Facts | None) -> tuple[str, ...]:
        """Packages the member needs. `facts` is None while the host has not been looked at."""
        return ()

    def facts_files(self, spec: Spec) -> Mapping[str, How]:
        """Further files to ask every host about."""
        return {}

    def filesystems(self, spec: Spec) -> tuple[str, ...]:
        """Kinds of file systems to ask every host's kernel about."""
        return ()

    def ports(self, spec: Spec, member: Member) -> tuple[str, ...]:
        """TCP ports on the member that cluster members reach, and nobody else."""
        return ()

    def kept(self, spec: Spec) -> Mapping[str, Kept]:
        """Secrets that the cluster makes for itself and several hosts share, by the name a SecretRef has."""
        return {}

    def given(self, spec: Spec) -> Mapping[str, str]:
        """Secrets that the user has, by the name a SecretRef has: `env:NAME`, `file:PATH`, or Shoal itself."""
        return {}

    def prepare(self, spec: Spec, member: Member, facts: Facts) -> Document:
        """What a host must be before the cluster can be put together at all: its key for the network, for one."""
        return ()

    def prepare_for(self, spec: Spec, member: Member, everyone: Mapping[str, Facts]) -> Document:
        """The same because of what other hosts are."""
        return ()

    def documents(self, cluster: Cluster, member: Member) -> Mapping[Stage, Document]:
        """What the member should be, stage by stage."""
        return {}

    def farewell(self) -> Document:
        """What a host is brought to when it leaves, before Slurm goes."""
        return ()

    def findings(self, cluster: Cluster) -> tuple[Finding, ...]:
        """What stands in the way and is not ours to change."""
        return ()
