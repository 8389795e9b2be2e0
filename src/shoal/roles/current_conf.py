"""The current configuration, read from the controller, so that a host that does not answer keeps its place in it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from shoal.agent.facts import NO_FACTS, Facts
from shoal.network.addresses import addresses_in
from shoal.slurm.conf import LUA_SCRIPT
from shoal.slurm.model import CgroupPlugin, Confinement, Node
from shoal.slurm.parsed_conf import is_written_by_shoal, nodes_in_conf, parse_conf, switches_of_nodes
from shoal.slurm.versions import Version, all_support

SLURM_CONF = "/etc/slurm/slurm.conf"
GRES_CONF = "/etc/slurm/gres.conf"
CGROUP_CONF = "/etc/slurm/cgroup.conf"
TOPOLOGY_CONF = "/etc/slurm/topology.conf"
OCI_CONF = "/etc/slurm/oci.conf"
MPI_CONF = "/etc/slurm/mpi.conf"
JOB_SUBMIT = f"/etc/slurm/{LUA_SCRIPT}"
CONF_FILES = (SLURM_CONF, GRES_CONF, CGROUP_CONF, TOPOLOGY_CONF)
HOSTS = "/etc/hosts"
HOSTS_BLOCK = "members"

CGROUP_PLUGINS: tuple[CgroupPlugin, ...] = ("autodetect", "cgroup/v1", "cgroup/v2", "disabled")


@dataclass(frozen=True)
class CurrentConf:
    """What an earlier run configured. Empty on a new controller."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    partitions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The partitions of every node."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    confinement: Confinement | None = None
    sites: Mapping[str, str] = field(default_factory=dict)
    """The site of every node, where there are several."""
    pmix: bool = False
    one_address: bool = False
    """Whether Slurm's daemons listen at one address of their host only."""


def read_current_conf(controller: Facts | None) -> CurrentConf:
    """Parse the controller's files."""
    controller = controller or NO_FACTS
    conf = controller.text(SLURM_CONF)
    if not is_written_by_shoal(conf):
        return CurrentConf()  # none, or one that Shoal did not write: its nodes are not ours to drain
    settings = parse_conf(conf).settings
    return CurrentConf(
        nodes=nodes_in_conf(conf, controller.text(GRES_CONF)),
        partitions=parse_conf(conf).partitions_of_nodes(),
        addresses=addresses_in(controller.text(HOSTS), HOSTS_BLOCK),
        confinement=_confinement(conf, controller.text(CGROUP_CONF)),
        sites=switches_of_nodes(controller.text(TOPOLOGY_CONF)),
        pmix=settings.get("mpidefault") == "pmix",
        one_address="NoInAddrAny" in settings.get("communicationparameters", ""),
    )


def _confinement(conf: str, cgroup: str) -> Confinement | None:
    lines = {*conf.splitlines(), *cgroup.splitlines()}
    plugin = next((name for name in CGROUP_PLUGINS if f"CgroupPlugin={name}" in lines), None)
    if plugin is None:
        return None
    return Confinement(
        tracked="ProctrackType=proctrack/cgroup" in lines,
        devices="ConstrainDevices=yes" in lines,
        cores="ConstrainCores=yes" in lines,
        memory="ConstrainRAMSpace=yes" in lines,
        plugin=plugin,
    )


def confinement(computes: Sequence[Facts], versions: Iterable[Version]) -> Confinement:
    """The confinement of jobs that the cgroups of all these hosts support.

    Without the memory controller a job's memory is scheduled and not limited. Slurm could poll and kill instead, but it
    counts shared memory once for each process, and would kill healthy jobs.
    """
    uniform = len({fact.cgroup.version for fact in computes}) == 1
    version = computes[0].cgroup.version if uniform else 0
    shared = set.intersection(*(set(fact.cgroup.writable) for fact in computes)) if uniform else set()
    if ("cpuset" if version == 2 else "freezer") in shared:
        return Confinement(True, "devices" in shared, "cpuset" in shared, "memory" in shared)
    # Without a plugin, slurmd starts on any host, also on a rented one with other cgroups than these. An old slurmd
    # requires one; naming v1 keeps it from searching for a cgroup file system.
    if all_support("cgroup_disabled", versions):
        return Confinement(plugin="disabled")
    return Confinement(plugin="autodetect" if version == 1 else "cgroup/v1")


def limit_confinement(possible: Confinement, before: Confinement) -> Confinement:
    """No more than the current confinement: a host that does not answer may have no cgroups."""
    if not possible.tracked:
        return before if not before.tracked else possible
    return Confinement(
        tracked=before.tracked,
        devices=possible.devices and before.devices,
        cores=possible.cores and before.cores,
        memory=possible.memory and before.memory,
        plugin=before.plugin,
    )
