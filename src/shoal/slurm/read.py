"""Slurm's configuration files, read back: to compare what is in force, and to keep the line of a silent host.

Only text that Shoal rendered is read. A file made by hand may say anything: includes, defaults, several keys a line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from shoal.hostlist import expand
from shoal.slurm.model import GpuLine, Node

HEADER = "# Written by shoal; changes here are lost.\n"


def is_ours(text: str) -> bool:
    """Whether Shoal wrote this file. One made by hand may say anything, so nothing is read out of it."""
    return text.startswith(HEADER)


@dataclass(frozen=True)
class Read:
    """A slurm.conf taken apart: its settings, by key in lower case, and its lines of nodes and of partitions."""

    settings: Mapping[str, str]
    nodes: tuple[str, ...]
    partitions: tuple[str, ...]

    def node_names(self) -> set[str]:
        return {name for line in self.nodes for name in expand(_values(line)["nodename"])}

    def partitions_of_nodes(self) -> dict[str, tuple[str, ...]]:
        """The partitions of every node, by its name."""
        inside: dict[str, tuple[str, ...]] = {}
        for line in self.partitions:
            values = _values(line)
            for node in expand(values.get("nodes", "")):
                inside[node] = (*inside.get(node, ()), values["partitionname"])
        return inside


def read(slurm_conf: str) -> Read:
    """A slurm.conf, taken apart."""
    settings: dict[str, str] = {}
    lines: dict[str, list[str]] = {"nodename": [], "partitionname": []}
    for line in _lines(slurm_conf):
        key, _, value = line.partition("=")
        if key.lower() in lines:
            lines[key.lower()].append(line)
        else:
            settings[key.lower()] = value
    return Read(settings, tuple(lines["nodename"]), tuple(lines["partitionname"]))


def known_nodes(slurm_conf: str, gres_conf: str) -> dict[str, Node]:
    """Every node of a slurm.conf that Shoal rendered, by name, in its order; none of one that it did not."""
    if not is_ours(slurm_conf):
        return {}
    gpus = _gpus(gres_conf)
    return {node.name: node for line in read(slurm_conf).nodes for node in _nodes(_values(line), gpus)}


def switches_of_nodes(topology_conf: str) -> dict[str, str]:
    """The switch of every node, by its name, in a topology.conf that Shoal rendered."""
    if not is_ours(topology_conf):
        return {}
    lines = [_values(line) for line in _lines(topology_conf)]
    return {node: values["switchname"] for values in lines for node in expand(values.get("nodes", ""))}


def _nodes(values: Mapping[str, str], gpus: Mapping[str, tuple[GpuLine, ...]]) -> Iterator[Node]:
    names = expand(values["nodename"])
    hostnames = expand(values.get("nodehostname", values["nodename"]))
    addresses = expand(values.get("nodeaddr", values["nodename"]))
    for name, hostname, address in zip(names, hostnames, addresses, strict=True):
        yield Node(
            name=name,
            hostname=hostname,
            address=address,
            cpus=int(values.get("cpus", 1)),
            sockets=int(values.get("sockets", 1)),
            cores_per_socket=int(values.get("corespersocket", 1)),
            threads_per_core=int(values.get("threadspercore", 1)),
            memory_mb=0,
            real_memory=int(values.get("realmemory", 1)),
            gpus=gpus.get(name, ()),
            features=tuple(part for part in values.get("feature", "").split(",") if part),
            weight=int(values.get("weight", 1)),
            cloud=values.get("state") == "CLOUD",
            port=int(values["port"]) if "port" in values else None,
        )


def _gpus(gres_conf: str) -> dict[str, tuple[GpuLine, ...]]:
    found: dict[str, tuple[GpuLine, ...]] = {}
    for line in _lines(gres_conf):
        values = _values(line)
        if values.get("name") != "gpu" or "nodename" not in values or "file" not in values:
            continue
        lines = tuple(GpuLine(type=values.get("type", ""), device=device) for device in expand(values["file"]))
        for name in expand(values["nodename"]):
            found[name] = found.get(name, ()) + lines
    return found


def _lines(text: str) -> Iterator[str]:
    for line in text.splitlines():
        line = line.partition("#")[0].strip()
        if line:
            yield line


def _values(line: str) -> dict[str, str]:
    """The `Key=value` pairs of a line, by key in lower case."""
    pairs = (part.split("=", 1) for part in line.split() if "=" in part)
    return {key.lower(): value for key, value in pairs}
