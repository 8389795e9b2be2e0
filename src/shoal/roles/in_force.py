"""The configuration in force, read back from the controller, so that a host that does not answer keeps its place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shoal.agent.facts import Facts
from shoal.network.names import addresses_in
from shoal.roles.confinement import Confinement
from shoal.slurm.model import CgroupPlugin, Node
from shoal.slurm.read import is_ours, known_nodes, read, switches_of_nodes
from shoal.slurm.spanning import SCRIPT

SLURM_CONF = "/etc/slurm/slurm.conf"
GRES_CONF = "/etc/slurm/gres.conf"
CGROUP_CONF = "/etc/slurm/cgroup.conf"
TOPOLOGY_CONF = "/etc/slurm/topology.conf"
JOB_SUBMIT = f"/etc/slurm/{SCRIPT}"
CONF_FILES = (SLURM_CONF, GRES_CONF, CGROUP_CONF, TOPOLOGY_CONF)
HOSTS = "/etc/hosts"
HOSTS_BLOCK = "members"

PLUGINS: tuple[CgroupPlugin, ...] = ("autodetect", "cgroup/v1", "cgroup/v2", "disabled")


@dataclass(frozen=True)
class InForce:
    """What an earlier run configured. Empty on a controller that is new to us."""

    nodes: Mapping[str, Node] = field(default_factory=dict)
    partitions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The partitions of every node."""
    addresses: Mapping[str, str] = field(default_factory=dict)
    confinement: Confinement | None = None
    sites: Mapping[str, str] = field(default_factory=dict)
    """The site of every node, where jobs are kept inside one."""
    pmix: bool = False
    one_address: bool = False
    """Whether Slurm listens at one address of a host alone."""


def in_force(controller: Facts | None) -> InForce:
    """What the controller's files say."""
    conf = _text(controller, SLURM_CONF)
    if not is_ours(conf):
        return InForce()  # none, or one that somebody else wrote: its nodes are not ours to drain
    return InForce(
        nodes=known_nodes(conf, _text(controller, GRES_CONF)),
        partitions=read(conf).partitions_of_nodes(),
        addresses=addresses_in(_text(controller, HOSTS), HOSTS_BLOCK),
        confinement=_confinement(conf, _text(controller, CGROUP_CONF)),
        sites=switches_of_nodes(_text(controller, TOPOLOGY_CONF)),
        pmix=read(conf).settings.get("mpidefault") == "pmix",
        one_address="NoInAddrAny" in read(conf).settings.get("communicationparameters", ""),
    )


def _text(controller: Facts | None, path: str) -> str:
    fact = controller.files.get(path) if controller else None
    return (fact.text if fact else None) or ""


def _confinement(conf: str, cgroup: str) -> Confinement | None:
    lines = {*conf.splitlines(), *cgroup.splitlines()}
    plugin = next((name for name in PLUGINS if f"CgroupPlugin={name}" in lines), None)
    if plugin is None:
        return None
    return Confinement(
        tracked="ProctrackType=proctrack/cgroup" in lines,
        devices="ConstrainDevices=yes" in lines,
        cores="ConstrainCores=yes" in lines,
        memory="ConstrainRAMSpace=yes" in lines,
        plugin=plugin,
    )
