"""All components of a cluster beside Slurm, in the order in which they come up within a stage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from shoal.agent.document import Document
from shoal.agent.facts import Facts
from shoal.network.tunnel import needs_tunnel
from shoal.roles.accounting import AccountingComponent
from shoal.roles.auth import AuthComponent
from shoal.roles.client import ClientComponent
from shoal.roles.clock import ClockComponent
from shoal.roles.component import Cluster, Component, FileQuery, SharedSecret
from shoal.roles.compute import LinksComponent
from shoal.roles.containers import ContainersComponent
from shoal.roles.controller import ReturnToServiceComponent
from shoal.roles.elastic import ElasticComponent
from shoal.roles.environments import EnvironmentsComponent
from shoal.roles.files import FilesComponent
from shoal.roles.gpu_driver import GpuDriverComponent
from shoal.roles.gpu_tools import GpuToolsComponent
from shoal.roles.image_registry import ImageRegistryComponent
from shoal.roles.images import ImagesComponent
from shoal.roles.job_engines import JobEnginesComponent
from shoal.roles.node_health import HealthComponent
from shoal.roles.node_logins import NodeLoginsComponent
from shoal.roles.plugins import MpiComponent
from shoal.roles.pyxis import PyxisComponent
from shoal.roles.slurm_tree import tree_secrets
from shoal.roles.storage import StorageComponent
from shoal.roles.tailscale import TailscaleComponent
from shoal.roles.tracking import TrackingComponent
from shoal.roles.user_program import UserProgramComponent
from shoal.roles.users import UsersComponent
from shoal.roles.wireguard import WireGuardComponent
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.model import Spec

COMPONENTS: tuple[Component, ...] = (
    WireGuardComponent(),
    TailscaleComponent(),
    LinksComponent(),
    FilesComponent(),
    StorageComponent(),
    UsersComponent(),
    NodeLoginsComponent(),
    EnvironmentsComponent(),
    ImagesComponent(),
    PyxisComponent(),
    ImageRegistryComponent(),
    JobEnginesComponent(),
    MpiComponent(),
    GpuDriverComponent(),
    GpuToolsComponent(),
    ClientComponent(),
    UserProgramComponent(),
    ClockComponent(),
    TrackingComponent(),
    AuthComponent(),
    AccountingComponent(),
    ElasticComponent(),
    ContainersComponent(),
    ReturnToServiceComponent(),
    HealthComponent(),
)


def components_of(spec: Spec, facts: Facts | None) -> tuple[Component, ...]:
    """The components that a host has."""
    if facts is None or not needs_tunnel(spec.network.kind, facts):
        return COMPONENTS
    return tuple(component for component in COMPONENTS if component.in_containers)


def component_packages(spec: Spec, member: Member, facts: Facts | None = None) -> tuple[str, ...]:
    return _unique(component.packages(spec, member, facts) for component in components_of(spec, facts))


def component_ports(spec: Spec, member: Member) -> tuple[str, ...]:
    return _unique(component.ports(spec, member) for component in COMPONENTS)


def component_filesystems(spec: Spec) -> tuple[str, ...]:
    return _unique(component.filesystems(spec) for component in COMPONENTS)


def component_files(spec: Spec) -> dict[str, FileQuery]:
    return {path: query for c in COMPONENTS for path, query in {**c.files, **c.fact_files(spec)}.items()}


def cluster_services(facts: Facts) -> tuple[str, ...]:
    """What the other hosts of its cluster need a host for, in words."""
    return tuple(service for component in COMPONENTS for service in component.cluster_services(facts))


def shared_secrets(spec: Spec) -> dict[str, SharedSecret]:
    return {name: secret for component in COMPONENTS for name, secret in component.shared_secrets(spec).items()}


def user_secrets(spec: Spec) -> dict[str, str]:
    references = (component.user_secrets(spec) for component in COMPONENTS)
    return {name: reference for table in (tree_secrets(spec), *references) for name, reference in table.items()}


def preparation(spec: Spec, member: Member, facts: Facts, everyone: Mapping[str, Facts] | None = None) -> Document:
    """What the host must be before the cluster can be assembled, because of itself and of the other hosts."""
    components, everyone = components_of(spec, facts), everyone or {member.name: facts}
    member_items = [item for component in components for item in component.prepare(spec, member, facts)]
    return (
        *member_items,
        *(item for component in components for item in component.prepare_among(spec, member, everyone)),
    )


def component_findings(cluster: Cluster) -> tuple[Finding, ...]:
    """The findings of all components, each asked about the hosts that have it."""
    without_tunnels = {name: facts for name, facts in cluster.facts.items() if name not in cluster.tunnels}
    others = replace(cluster, facts=without_tunnels)
    clusters = ((component, cluster if component.in_containers else others) for component in COMPONENTS)
    return tuple(finding for component, its_cluster in clusters for finding in component.findings(its_cluster))


def _unique(groups: Iterable[Iterable[str]]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(name for group in groups for name in group))
