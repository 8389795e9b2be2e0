"""The items that a host gets from a cluster, by key. They are `Any`, because the key says the kind."""

from dataclasses import replace
from typing import Any

from shoal.agent.facts import Facts, FileFact
from shoal.network.addresses import hosts_block
from shoal.roles.component import Cluster, Component, Stage
from shoal.roles.current_conf import CGROUP_CONF, GRES_CONF, HOSTS, SLURM_CONF, TOPOLOGY_CONF
from shoal.roles.documents import documents
from shoal.slurm.conf import cgroup_conf, gres_conf, slurm_conf, topology_conf
from shoal.spec.members import Member


def member_of(cluster: Cluster, name: str) -> Member:
    return next(member for member in cluster.members if member.name == name)


def items_of(cluster: Cluster, name: str, part: Component | None = None, *stages: Stage) -> dict[str, Any]:
    """All items of the host; with a component its items, with stages those of them."""
    found = (part.documents if part else documents)(cluster, member_of(cluster, name))
    return {item.key: item for stage in stages or Stage for item in found.get(stage, ())}


def text_of(cluster: Cluster, name: str, path: str, part: Component | None = None) -> str:
    """The content of a file of the host; empty where the file is to be absent."""
    return str(items_of(cluster, name, part)[f"file {path}"].content or "")


def in_force(cluster: Cluster) -> Facts:
    """The controller's facts once this cluster was applied."""
    conf = cluster.conf
    texts = {
        **{SLURM_CONF: slurm_conf(conf), GRES_CONF: gres_conf(conf), CGROUP_CONF: cgroup_conf(conf)},
        TOPOLOGY_CONF: topology_conf(conf),
        HOSTS: f"127.0.0.1 localhost\n# BEGIN shoal members\n{hosts_block(cluster.addresses)}# END shoal members\n",
    }
    facts = cluster.facts[cluster.controller.name]
    return replace(facts, files={**facts.files, **{path: FileFact(text=text) for path, text in texts.items()}})
