"""All parts of a cluster beside Slurm, in the order in which they come up within a stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.network.tunnel import needs_tunnel
from shoal.roles.accounting import AccountingPart
from shoal.roles.auth import Auth
from shoal.roles.elastic import Elastic
from shoal.roles.environments import Environments
from shoal.roles.links import Links
from shoal.roles.part import How, Kept, Part
from shoal.roles.reduced import Reduced
from shoal.roles.returning import ReturningNodes
from shoal.roles.storage import Storage
from shoal.roles.tailscale import TailscalePart
from shoal.roles.time import Time
from shoal.roles.tracking import TrackingPart
from shoal.roles.users import Users
from shoal.roles.wireguard import WireGuard
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

if TYPE_CHECKING:
    from shoal.roles.cluster import Cluster

PARTS: tuple[Part, ...] = (
    WireGuard(),
    TailscalePart(),
    Links(),
    Storage(),
    Users(),
    Environments(),
    Time(),
    TrackingPart(),
    Auth(),
    AccountingPart(),
    Elastic(),
    Reduced(),
    ReturningNodes(),
)


def parts_of(spec: Spec, facts: Facts | None) -> tuple[Part, ...]:
    """The parts that a host has."""
    if facts is None or not needs_tunnel(spec.network.kind, facts):
        return PARTS
    return tuple(part for part in PARTS if part.in_containers)


def part_packages(spec: Spec, member: Member, facts: Facts | None = None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in parts_of(spec, facts) for name in part.packages(spec, member, facts)))


def part_ports(spec: Spec, member: Member) -> tuple[str, ...]:
    return tuple(dict.fromkeys(port for part in PARTS for port in part.ports(spec, member)))


def part_files(spec: Spec) -> dict[str, How]:
    return {path: how for part in PARTS for path, how in {**part.files, **part.facts_files(spec)}.items()}


def part_filesystems(spec: Spec) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in PARTS for name in part.filesystems(spec)))


def part_services() -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in PARTS for name in part.services))


def kept_secrets(spec: Spec) -> dict[str, Kept]:
    return {name: kept for part in PARTS for name, kept in part.kept(spec).items()}


def given_secrets(spec: Spec) -> Mapping[str, str]:
    return {name: reference for part in PARTS for name, reference in part.given(spec).items()}


def preparation(spec: Spec, member: Member, facts: Facts, everyone: Mapping[str, Facts] | None = None) -> Document:
    """What the host must be before the cluster can be put together, because of itself and of what others are."""
    parts, everyone = parts_of(spec, facts), everyone or {member.name: facts}
    own = [item for part in parts for item in part.prepare(spec, member, facts)]
    return (*own, *(item for part in parts for item in part.prepare_for(spec, member, everyone)))


def part_findings(cluster: Cluster) -> tuple[Finding, ...]:
    """What stands in the way of the parts, each asked about the hosts that have it."""
    whole = {name: facts for name, facts in cluster.facts.items() if name not in cluster.tunnels}
    others = replace(cluster, facts=whole)
    return tuple(finding for part in PARTS for finding in part.findings(cluster if part.in_containers else others))
