"""All parts of a cluster beside Slurm, in the order in which they come up within a stage."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.roles.accounting import AccountingPart
from shoal.roles.auth import Auth
from shoal.roles.environments import Environments
from shoal.roles.links import Links
from shoal.roles.part import How, Kept, Part
from shoal.roles.storage import Storage
from shoal.roles.tailscale import TailscalePart
from shoal.roles.time import Time
from shoal.roles.tracking import TrackingPart
from shoal.roles.users import Users
from shoal.roles.wireguard import WireGuard
from shoal.spec.member import Member
from shoal.spec.model import Spec

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
)


def part_packages(spec: Spec, member: Member, facts: Facts | None = None) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for part in PARTS for name in part.packages(spec, member, facts)))


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


def preparation(spec: Spec, member: Member, facts: Facts) -> Document:
    """What the host must be before the cluster can be put together."""
    return tuple(item for part in PARTS for item in part.prepare(spec, member, facts))
