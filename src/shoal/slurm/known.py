"""The nodes of a configuration that is in force, read back, so that a host that does not answer keeps its line."""

from __future__ import annotations

from shoal.hostlist import expand
from shoal.slurm.conf import is_ours
from shoal.slurm.model import GpuLine, Node


def known_nodes(slurm_conf: str, gres_conf: str) -> dict[str, Node]:
    """Every node of a slurm.conf that Shoal rendered, by name; none of one that it did not."""
    if not is_ours(slurm_conf):
        return {}
    gpus = _gpus(gres_conf)
    nodes: dict[str, Node] = {}
    for line in slurm_conf.splitlines():
        if not line.startswith("NodeName=") or line.startswith("NodeName=DEFAULT"):
            continue
        values = dict(part.split("=", 1) for part in line.split() if "=" in part)
        names = expand(values["NodeName"])
        hostnames = expand(values.get("NodeHostname", values["NodeName"]))
        addresses = expand(values.get("NodeAddr", values["NodeName"]))
        for name, hostname, address in zip(names, hostnames, addresses, strict=True):
            nodes[name] = Node(
                name=name,
                hostname=hostname,
                address=address,
                cpus=int(values.get("CPUs", 1)),
                sockets=int(values.get("Sockets", 1)),
                cores_per_socket=int(values.get("CoresPerSocket", 1)),
                threads_per_core=int(values.get("ThreadsPerCore", 1)),
                memory_mb=0,
                real_memory=int(values.get("RealMemory", 1)),
                gpus=gpus.get(name, ()),
                features=tuple(part for part in values.get("Feature", "").split(",") if part),
                weight=int(values.get("Weight", 1)),
            )
    return nodes


def _gpus(gres_conf: str) -> dict[str, tuple[GpuLine, ...]]:
    found: dict[str, tuple[GpuLine, ...]] = {}
    for line in gres_conf.splitlines():
        values = dict(part.split("=", 1) for part in line.split() if "=" in part)
        if values.get("Name") != "gpu" or "NodeName" not in values or "File" not in values:
            continue
        lines = tuple(GpuLine(type=values.get("Type", ""), device=device) for device in expand(values["File"]))
        for name in expand(values["NodeName"]):
            found[name] = found.get(name, ()) + lines
    return found
