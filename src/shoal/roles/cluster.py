"""The cluster as one value: what the spec wants and what the hosts are, put together. Everything here is pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.agent.facts import Facts
from shoal.network.addresses import lan_addresses
from shoal.roles.ids import Ids, choose_ids
from shoal.slurm.conf import gpu_type
from shoal.slurm.model import CgroupPlugin, ClusterConf, GpuLine, Node, Partition
from shoal.slurm.versions import Version, known_to_all, packaged
from shoal.spec.finding import Finding
from shoal.spec.member import Member
from shoal.spec.members import members as members_of
from shoal.spec.members import partitions as partitions_of
from shoal.spec.model import Spec

SLURM_PACKAGES = ("slurmctld", "slurmd", "slurm-client")


@dataclass(frozen=True)
class Cluster:
    """All that a role needs to know to say what a host should be."""

    spec: Spec
    members: tuple[Member, ...]
    facts: Mapping[str, Facts]
    addresses: Mapping[str, str]
    versions: Mapping[str, Version]
    ids: Ids
    conf: ClusterConf
    findings: tuple[Finding, ...] = field(default=())

    @property
    def controller(self) -> Member:
        return self.members[0]


def assemble(
    spec: Spec,
    facts: Mapping[str, Facts],
    reached: Mapping[str, str],
    known: Mapping[str, Node] | None = None,
    leaving: Mapping[str, tuple[str, ...]] | None = None,
) -> Cluster:
    """Put spec and facts together.

    `known` holds the nodes of the configuration that is in force: a host that does not answer just now keeps its line,
    and so does one that is `leaving` (with the partitions it is in) until its jobs have ended.
    """
    known = known or {}
    leaving = leaving or {}
    members = members_of(spec)
    addresses = _addresses(members, facts, reached, known, leaving)
    versions = {m.name: v for m in members if m.name in facts and (v := slurm_version(facts[m.name])) is not None}
    nodes = [node for m in members if "compute" in m.roles and (node := _node(m, facts, addresses, known)) is not None]
    stay = tuple(known[name] for name in leaving if name in known)
    controller = members[0]
    jobs = confinement([facts[m.name] for m in members if "compute" in m.roles and m.name in facts], versions)
    conf = ClusterConf(
        name=spec.cluster,
        controller=controller.name,
        controller_address=addresses.get(controller.name, ""),
        controller_hostname=facts[controller.name].hostname if controller.name in facts else None,
        versions=tuple(versions.values()),
        nodes=(*nodes, *stay),
        partitions=_partitions(spec, members, {node.name for node in nodes}, leaving),
        switches=(),
        options={key: str(value) for key, value in spec.slurm.options.items()},
        proctrack_cgroup=jobs.tracked,
        constrain_cores=jobs.cores,
        constrain_devices=jobs.devices,
        cgroup_plugin=jobs.plugin,
    )
    return Cluster(
        spec=spec,
        members=members,
        facts=facts,
        addresses=addresses,
        versions=versions,
        ids=choose_ids(controller.name, facts),
        conf=conf,
    )


def slurm_version(facts: Facts) -> Version | None:
    """The Slurm a host has, or the one its package manager would install."""
    for choice in ("installed", "candidate"):
        for name in SLURM_PACKAGES:
            package = facts.packages.get(name)
            text = package and getattr(package, choice)
            if text:
                return Version.parse(text)
    return packaged(facts.os_id, facts.os_version or facts.os_codename)


def _addresses(
    members: tuple[Member, ...],
    facts: Mapping[str, Facts],
    reached: Mapping[str, str],
    known: Mapping[str, Node],
    leaving: Mapping[str, tuple[str, ...]],
) -> dict[str, str]:
    chosen = lan_addresses({m.name: facts[m.name] for m in members if m.name in facts}, reached)
    names = [*(m.name for m in members), *leaving]
    for name in names:
        if name not in chosen and name in known:
            chosen[name] = known[name].address
    return {name: chosen[name] for name in names if chosen.get(name)}


def _node(
    member: Member, facts: Mapping[str, Facts], addresses: Mapping[str, str], known: Mapping[str, Node]
) -> Node | None:
    if member.name not in facts:
        return known.get(member.name)
    fact = facts[member.name]
    return Node(
        name=member.name,
        hostname=fact.hostname,
        address=addresses[member.name],
        cpus=fact.cpu.cpus,
        sockets=fact.cpu.sockets,
        cores_per_socket=fact.cpu.cores_per_socket,
        threads_per_core=fact.cpu.threads_per_core,
        memory_mb=fact.memory_mb,
        gpus=tuple(GpuLine(type=gpu_type(gpu.name), device=gpu.device) for gpu in fact.gpus),
        features=(member.nodeset, *member.features),
        weight=member.weight,
    )


def _partitions(
    spec: Spec, members: tuple[Member, ...], present: set[str], leaving: Mapping[str, tuple[str, ...]]
) -> tuple[Partition, ...]:
    lines = []
    for name, partition in partitions_of(spec).items():
        nodes = (
            *(m.name for m in members if m.nodeset in partition.nodesets and m.name in present),
            *(node for node, inside in leaving.items() if name in inside),
        )
        lines.append(
            Partition(
                name=name,
                nodes=nodes,
                default=partition.default,
                max_time=partition.max_time,
                default_time=partition.default_time,
                max_nodes=partition.max_nodes,
                priority=partition.priority,
            )
        )
    return tuple(lines)


@dataclass(frozen=True)
class Confinement:
    """How jobs are tracked and confined. The settings are the whole cluster's, so the weakest host decides."""

    tracked: bool
    """Slurm can keep a job's processes in a cgroup of their own."""
    devices: bool
    cores: bool
    plugin: CgroupPlugin


def confinement(computes: list[Facts], versions: Mapping[str, Version]) -> Confinement:
    """What the cgroups of these hosts allow. Memory is left to Slurm's own watch: few hosts give that controller away."""
    same = len({fact.cgroup.version for fact in computes}) == 1
    version = computes[0].cgroup.version if same else 0
    shared = set.intersection(*(set(fact.cgroup.writable) for fact in computes)) if same else set()
    if version == 2 and "cpuset" in shared:
        # On the unified hierarchy devices are confined by a program, not by a controller.
        return Confinement(tracked=True, devices=True, cores=True, plugin="autodetect")
    if version == 1 and "freezer" in shared:
        return Confinement(True, "devices" in shared, "cpuset" in shared, "autodetect")
    if version == 1:
        return Confinement(False, False, False, "autodetect")
    # Naming the old plugin keeps a slurmd that cannot do without one from looking for a file system that is not there.
    plugin: CgroupPlugin = "disabled" if known_to_all("cgroup_disabled", versions.values()) else "cgroup/v1"
    return Confinement(False, False, False, plugin)
