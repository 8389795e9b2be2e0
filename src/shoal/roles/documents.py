"""From roles to documents: what one host is asked to be, in the order in which the cluster comes up."""

from __future__ import annotations

from collections.abc import Mapping

from shoal.agent.document import Block, Command, DeviceRule, Document, File, Service
from shoal.roles.base import MUNGE_KEY, MUNGE_KEY_NEXT, base, neighbours, without_firewall
from shoal.roles.cluster import FIREWALLD, Cluster
from shoal.roles.compute import DEFAULTS, DEVICE_RULE, DROP_IN, LEFTOVERS, compute, login
from shoal.roles.controller import ROTATION, controller
from shoal.roles.in_force import CONF_FILES, HOSTS, HOSTS_BLOCK, JOB_SUBMIT
from shoal.roles.own_address import DROP_INS
from shoal.roles.own_name import CLOUD_INIT, SERVICE, UNIT, names_left, own_name_back
from shoal.roles.part import How
from shoal.roles.parts import PARTS, part_files, part_services, parts_of
from shoal.roles.pmix import pmix_files
from shoal.roles.reduced import reduced_compute
from shoal.roles.spanning import spanning_files
from shoal.roles.stage import Stage
from shoal.spec.member import Member
from shoal.spec.model import Spec


def fact_services() -> tuple[str, ...]:
    """All that documents name, so that an agent asks systemd once."""
    return ("munge", "slurmctld", "slurmd", "shoal-firewall", FIREWALLD, SERVICE, *part_services())


def fact_files(spec: Spec) -> Mapping[str, How]:
    """The files from which is read what an earlier run did."""
    return {
        MUNGE_KEY: "hash",
        **dict.fromkeys((*CONF_FILES, HOSTS), "text"),
        **dict.fromkeys((*pmix_files(), *spanning_files(), CLOUD_INIT, UNIT), "there"),
        **part_files(spec),
    }


def documents(cluster: Cluster, member: Member) -> dict[Stage, Document]:
    """What the member should be, stage by stage."""
    stages: dict[Stage, Document] = {Stage.BASE: base(cluster, member)}
    if "controller" in member.roles:
        stages[Stage.CONTROLLER] = controller(cluster)
    nodes: Document = login(cluster) if "login" in member.roles else ()
    if "compute" in member.roles:
        nodes = reduced_compute(cluster, member) if member.name in cluster.tunnels else compute(cluster, member)
    elif not any(node.name == member.name for node in cluster.conf.nodes):
        # A host that computed once does so no more; while it is leaving its slurmd still has jobs.
        nodes += (Service("slurmd", enabled=False, running=False),)
    nodes += names_left(cluster, member)
    if nodes:
        stages[Stage.NODES] = nodes
    for part in parts_of(cluster.spec, cluster.facts[member.name]):
        for stage, document in part.documents(cluster, member).items():
            stages[stage] = (*stages.get(stage, ()), *document)
    return {stage: document for stage, document in sorted(stages.items()) if document}


def membership(cluster: Cluster, member: Member) -> Document:
    """What changes on a host when others come and go: names, the firewall, the network, who may mount its shares."""
    parts = (part for part in PARTS if part.by_members)
    services = [part.documents(cluster, member).get(Stage.SERVICES, ()) for part in parts]
    return (*neighbours(cluster, member), *(item for document in services for item in document))


def farewell() -> Document:
    """What a host is brought to when it leaves: nothing of ours runs or is configured; packages stay."""
    return (
        *[item for part in reversed(PARTS) for item in part.farewell()],
        Service("slurmd", enabled=False, running=False),
        Service("slurmctld", enabled=False, running=False),
        *[File(path) for path in (*CONF_FILES, DEFAULTS, DROP_IN, LEFTOVERS, ROTATION)],
        *[File(DROP_INS[daemon]) for daemon in ("slurmctld", "slurmd")],
        Command("jobs and sites", ("rm", JOB_SUBMIT), unless=("sh", "-c", f"! grep -qs 'by shoal' {JOB_SUBMIT}")),
        DeviceRule(DEVICE_RULE, ""),
        *without_firewall(),
        Service("munge", enabled=False, running=False),
        File(MUNGE_KEY),
        File(MUNGE_KEY_NEXT),
        Block(HOSTS, HOSTS_BLOCK, ""),
        *own_name_back(),
    )
