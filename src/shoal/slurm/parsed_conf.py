"""Slurm's configuration files, parsed: to compare old and new, and to keep the line of a host that does not answer.

Only text that Shoal rendered is parsed. A file made by hand may have includes, defaults, or several keys on a line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from shoal.agent.document import HEADER
from shoal.hostlist import expand
from shoal.slurm.model import Node, NodeGpu

ChangeCost = Literal["none", "reconfigure", "restart"]
_NUMBERS = ("cpus", "sockets", "cores_per_socket", "threads_per_core", "real_memory", "weight")
_PAIR = re.compile(r'([^\s="]+)=("[^"]*"|\S*)')
"""A key and its value, which is in quotes where it has blanks."""
_STATE_KEYS = ("clustername", "statesavelocation", "selecttype", "slurmuser")
"""Settings on which slurmctld's saved state depends."""


def is_written_by_shoal(text: str) -> bool:
    """Whether Shoal wrote this file. A file made by hand is not parsed."""
    return text.startswith(HEADER)


@dataclass(frozen=True)
class ParsedConf:
    """A parsed slurm.conf: its settings, by key in lower case, and its lines of nodes and of partitions."""

    settings: Mapping[str, str]
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]

    def node_names(self) -> set[str]:
        return {name for line in self.nodes for name in expand(_values(line)["nodename"])}

    def partitions_of_nodes(self) -> dict[str, tuple[str, ...]]:
        """The partitions of every node, by its name."""
        partitions: dict[str, tuple[str, ...]] = {}
        for line in self.partitions:
            values = _values(line)
            for node in expand(values.get("nodes", "")):
                partitions[node] = (*partitions.get(node, ()), values["partitionname"])
        return partitions


def parse_conf(slurm_conf: str) -> ParsedConf:
    """Parse a slurm.conf."""
    settings: dict[str, str] = {}
    lines: dict[str, list[str]] = {"nodename": [], "partitionname": []}
    for line in _lines(slurm_conf):
        key, _, value = line.partition("=")
        if key.lower() in lines:
            lines[key.lower()].append(line)
        else:
            settings[key.lower()] = value
    return ParsedConf(settings, tuple(lines["nodename"]), tuple(lines["partitionname"]))


def nodes_in_conf(slurm_conf: str, gres_conf: str) -> dict[str, Node]:
    """Every node of a slurm.conf that Shoal rendered, by name, in its order; none of one that it did not."""
    if not is_written_by_shoal(slurm_conf):
        return {}
    gpus = _gpus(gres_conf)
    return {node.name: node for line in parse_conf(slurm_conf).nodes for node in _nodes(_values(line), gpus)}


def switches_of_nodes(topology_conf: str) -> dict[str, str]:
    """The switch of every node, by its name, in a topology.conf that Shoal rendered."""
    if not is_written_by_shoal(topology_conf):
        return {}
    lines = [_values(line) for line in _lines(topology_conf)]
    return {node: values["switchname"] for values in lines for node in expand(values.get("nodes", ""))}


def _nodes(values: Mapping[str, str], gpus: Mapping[str, tuple[NodeGpu, ...]]) -> Iterator[Node]:
    names = expand(values["nodename"])
    hostnames = expand(values.get("nodehostname", values["nodename"]))
    addresses = expand(values.get("nodeaddr", values["nodename"]))
    numbers = {key: int(values.get(key.replace("_", ""), 1)) for key in _NUMBERS}
    for name, hostname, address in zip(names, hostnames, addresses, strict=True):
        yield Node(
            name=name,
            hostname=hostname,
            address=address,
            **numbers,
            memory_mb=0,
            gpus=gpus.get(name, ()),
            **_shared_counts(values.get("gres", "")),
            features=tuple(part for part in values.get("feature", "").split(",") if part),
            cloud=values.get("state") == "CLOUD",
            port=int(values["port"]) if "port" in values else None,
        )


def _shared_counts(gres: str) -> dict[str, int]:
    """The parts of GPUs in a node's Gres: `gpu:h100:2,shard:8`."""
    counts = dict(part.rpartition(":")[::2] for part in gres.split(",") if part)
    return {field: int(counts[kind]) for kind, field in (("shard", "shards"), ("mps", "mps")) if kind in counts}


def _gpus(gres_conf: str) -> dict[str, tuple[NodeGpu, ...]]:
    gpus: dict[str, tuple[NodeGpu, ...]] = {}
    for line in _lines(gres_conf):
        values = _values(line)
        if values.get("name") != "gpu" or "nodename" not in values or "file" not in values:
            continue
        devices = tuple(NodeGpu(type=values.get("type", ""), device=device) for device in expand(values["file"]))
        for name in expand(values["nodename"]):
            gpus[name] = gpus.get(name, ()) + devices
    return gpus


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            yield line


def _values(line: str) -> dict[str, str]:
    """The `Key=value` pairs of a line, by key in lower case."""
    return {key.lower(): value.strip('"') for key, value in _PAIR.findall(line)}


def change_cost(old: str, new: str) -> ChangeCost:
    """What slurmctld needs to apply a new slurm.conf: "none", "reconfigure" or "restart". Jobs survive both.

    A reconfigure changes partitions. All else needs a restart: 22.05 cannot add nodes without one, and later
    releases restart themselves on a reconfigure anyway.
    """
    if not is_written_by_shoal(old):
        return "restart"
    before, after = parse_conf(old), parse_conf(new)
    if before.settings != after.settings or set(before.nodes) != set(after.nodes):
        return "restart"
    return "none" if set(before.partitions) == set(after.partitions) else "reconfigure"


def loses_jobs(old: str, new: str) -> bool:
    """Whether the change ends running jobs: their node leaves, or slurmctld cannot read its saved state."""
    if not is_written_by_shoal(old):
        return True
    before, after = parse_conf(old), parse_conf(new)
    if any(before.settings.get(key) != after.settings.get(key) for key in _STATE_KEYS):
        return True
    if before.settings.get("authtype") == "auth/slurm" != after.settings.get("authtype"):
        return True  # their messages are signed with a key that no daemon accepts any more
    return not before.node_names() <= after.node_names()
