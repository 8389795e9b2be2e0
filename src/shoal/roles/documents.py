"""The documents of a host, from all roles and components, in the order in which the cluster comes up."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from shoal.agent.document import Block, Command, DeviceRule, Document, File, Service
from shoal.roles import host_address
from shoal.roles.assembly import FIREWALLD
from shoal.roles.base import MUNGE_KEY, MUNGE_KEY_NEXT, base, firewall_removal, neighbour_items
from shoal.roles.component import Cluster, Component, FileQuery, Stage
from shoal.roles.compute import DEFAULTS, DEVICE_RULE, DROP_IN, TMPFILES, compute, login
from shoal.roles.containers import container_compute
from shoal.roles.controller import ROTATION, controller
from shoal.roles.current_conf import CONF_FILES, HOSTS, HOSTS_BLOCK, JOB_SUBMIT, MPI_CONF, OCI_CONF
from shoal.roles.host_record import HOST_RECORD, RECORD_FILES, STATE_OWNER
from shoal.roles.node_logins import neighbour_key_items
from shoal.roles.plugins import pmix_files, spanning_files
from shoal.roles.registry import COMPONENTS, component_files, components_of
from shoal.roles.slurm_source import SOURCE_FILES, last_items, mask_removal
from shoal.roles.slurm_tree import tree_fact_files, tree_removal
from shoal.spec.member import Member
from shoal.spec.model import Spec


def fact_services() -> tuple[str, ...]:
    """All services in documents, so that an agent asks systemd once."""
    base_services = ("munge", "slurmctld", "slurmd", "shoal-firewall", FIREWALLD, host_address.NAMES_SERVICE)
    return (*base_services, *(name for component in COMPONENTS for name in component.services))


def fact_files(spec: Spec) -> Mapping[str, FileQuery]:
    """The files that tell what an earlier run did."""
    return {
        MUNGE_KEY: "hash",
        **dict.fromkeys((*CONF_FILES, MPI_CONF, OCI_CONF, HOSTS, STATE_OWNER), "text"),
        **RECORD_FILES,
        **dict.fromkeys((*pmix_files(), *spanning_files(), host_address.CLOUD_INIT, host_address.NAMES_UNIT), "there"),
        **tree_fact_files(spec),
        **SOURCE_FILES,
        **component_files(spec),
    }


def documents(cluster: Cluster, member: Member) -> dict[Stage, Document]:
    """What the member should be, stage by stage."""
    stages: dict[Stage, Document] = {Stage.BASE: base(cluster, member)}
    if "controller" in member.roles:
        stages[Stage.CONTROLLER] = controller(cluster)
    nodes: Document = login(cluster) if "login" in member.roles else ()
    if "compute" in member.roles:
        nodes = container_compute(cluster, member) if member.name in cluster.tunnels else compute(cluster, member)
    elif not any(node.name == member.name for node in cluster.conf.nodes):
        # A former compute node. While it is leaving, its slurmd still has jobs.
        nodes += (Service("slurmd", enabled=False, running=False),)
    nodes += host_address.leftover_host_names(cluster, member)
    if nodes:
        stages[Stage.NODES] = nodes
    for component in components_of(cluster.spec, cluster.facts[member.name]):
        for stage, document in component.documents(cluster, member).items():
            before = stages.get(stage, ())
            first = stage is Stage.NODES and component.precedes_slurmd and member.rented
            stages[stage] = (*document, *before) if first else (*before, *document)
    stages[Stage.NODES] = (*stages.get(Stage.NODES, ()), *last_items(cluster))
    return {stage: document for stage, document in sorted(stages.items()) if document}


def membership(cluster: Cluster, member: Member) -> Document:
    """What changes on a host when others join or leave: names, the firewall, the network, access to shares.

    Nothing does in a container behind a tunnel, which knows only the controller.
    """
    if member.name in cluster.tunnels:
        return ()
    components = (component for component in COMPONENTS if component.changes_with_members)
    return _membership(cluster, member, components)


def permanent_membership(cluster: Cluster, member: Member) -> Document:
    """The same on a permanent host, when rented nodes come or go: names, the firewall, access to shares.

    Its WireGuard peers stay: it reaches rented nodes through the hub, which is the controller.
    """
    return _membership(cluster, member, (component for component in COMPONENTS if component.changes_with_rentals))


def _membership(cluster: Cluster, member: Member, components: Iterable[Component]) -> Document:
    services = [component.documents(cluster, member).get(Stage.SERVICES, ()) for component in components]
    keys = neighbour_key_items(cluster, member)
    return (*neighbour_items(cluster, member), *keys, *(item for document in services for item in document))


def removal() -> Document:
    """Removes all of Shoal's services and files from a host that leaves; packages stay."""
    return (
        *[item for component in reversed(COMPONENTS) for item in component.removal()],
        *(Service(daemon, enabled=False, running=False) for daemon in ("slurmd", "slurmctld")),
        *map(File, (*CONF_FILES, DEFAULTS, DROP_IN, TMPFILES, ROTATION)),
        *(File(host_address.DROP_INS[daemon]) for daemon in ("slurmctld", "slurmd")),
        _removal_of_ours("containers", OCI_CONF),
        _removal_of_ours("MPI", MPI_CONF),
        *tree_removal(),
        *mask_removal(),
        _removal_of_ours("jobs and sites", JOB_SUBMIT),
        DeviceRule(DEVICE_RULE, ""),
        *firewall_removal(),
        Service("munge", enabled=False, running=False),
        *map(File, (MUNGE_KEY, MUNGE_KEY_NEXT)),
        Block(HOSTS, HOSTS_BLOCK, ""),
        *host_address.host_name_removal(),
        File(HOST_RECORD),
    )


def _removal_of_ours(name: str, path: str) -> Command:
    """Removes a file that Shoal wrote; one of the operator's own stays."""
    return Command(name, ("rm", path), unless=("sh", "-c", f"! grep -qs 'by shoal' {path}"))
