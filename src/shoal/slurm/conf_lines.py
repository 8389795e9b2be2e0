"""The lines of slurm.conf about nodes and partitions, and the checks that every value passes before it is written."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from shoal.hostlist import compress, expand, fold
from shoal.slurm.model import Node, NodeGpu, PartitionConf

_WORD = re.compile(r"[!$-<>-\[\]-~]+")  # printable ASCII without blank, quote, `#`, `=` and `\`
_VALUE = re.compile(r"[!$-\[\]-~]+")


def node_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """One line for each run of like nodes whose names, host names and addresses all count up together."""
    by_name = {node.name: node for node in nodes}
    run: list[Node] = []
    attributes = ""
    for name in expand(compress(by_name)):
        node = by_name[name]
        own = _attributes(node)
        if run and (own != attributes or not _follows(run[-1], node)):
            yield _node_line(run, attributes)
            run = []
        attributes = own
        run.append(node)
    if run:
        yield _node_line(run, attributes)


def partition_line(partition: PartitionConf, memory: Mapping[str, int]) -> str:
    parts = [f"PartitionName={checked_word('the name of a partition', partition.name)}"]
    unknown = [name for name in partition.nodes if name not in memory]
    if unknown:
        raise ValueError(f"partition {partition.name} names {compress(unknown)}, which the cluster does not have")
    if partition.nodes:
        parts.append(f"Nodes={checked_names(partition.nodes)}")
        # Without it a job that does not say takes all the memory of its nodes, and nothing runs beside it.
        parts.append(f"DefMemPerCPU={max(1, min(memory[name] for name in partition.nodes))}")
    if partition.default:
        parts.append("Default=YES")
    parts.append(f"MaxTime={checked_word('the MaxTime of a partition', partition.max_time or 'UNLIMITED')}")
    if partition.default_time is not None:
        parts.append(f"DefaultTime={checked_word('the DefaultTime of a partition', partition.default_time)}")
    if partition.max_nodes is not None:
        parts.append(f"MaxNodes={partition.max_nodes:d}")
    if partition.priority is not None:
        parts.append(f"PriorityTier={partition.priority:d}")
    parts.append(f"GraceTime={partition.grace:d}")
    if not partition.preemptable:
        parts.append("PreemptMode=OFF")
    if partition.suspend_time is not None:
        parts.append(f"SuspendTime={partition.suspend_time:d}")
    return " ".join([*parts, "State=UP"])


def real_memory(memory_mb: int) -> int:
    """The RealMemory to configure: 95 % of what the host has, less a reserve for the system of up to 512 MB.

    slurmd reports the machine's physical memory; a node that reports less than RealMemory is drained. The physical
    memory varies by a little from boot to boot (kernel, firmware, crash kernel), so the configured value stays below.
    """
    return max(1, memory_mb * 95 // 100 - min(512, memory_mb // 32))


def _node_line(run: list[Node], attributes: str) -> str:
    names = [checked_word("the name of a node", node.name) for node in run]
    hostnames = [checked_word("the host name of a node", node.hostname or node.name) for node in run]
    addresses = [checked_word("the address of a node", node.address or node.name) for node in run]
    line = f"NodeName={fold(names)}"
    if hostnames != names:
        line += f" NodeHostname={fold(hostnames)}"
    if addresses != names:
        line += f" NodeAddr={fold(addresses)}"
    return f"{line} {attributes}"


def _attributes(node: Node) -> str:
    text = (
        f"CPUs={node.cpus:d} Sockets={node.sockets:d} CoresPerSocket={node.cores_per_socket:d}"
        f" ThreadsPerCore={node.threads_per_core:d} RealMemory={memory_of(node):d}"
    )
    if node.gpus:
        text += f" Gres={_gres(node.gpus)}"
    if node.features:
        text += f" Feature={','.join(checked_word('a feature', feature) for feature in node.features)}"
    text += f" Port={node.port:d}" if node.port else ""
    text += f" Weight={node.weight:d}"
    return f"{text} State=CLOUD" if node.cloud else text


def _gres(gpus: Iterable[NodeGpu]) -> str:
    counts = Counter(f"gpu:{checked_word('the type of a GPU', gpu.type)}" if gpu.type else "gpu" for gpu in gpus)
    return ",".join(f"{kind}:{count}" for kind, count in counts.items())


def memory_of(node: Node) -> int:
    return real_memory(node.memory_mb) if node.real_memory is None else node.real_memory


def _follows(node: Node, following: Node) -> bool:
    return all(_next(getattr(node, key)) == getattr(following, key) for key in ("name", "hostname", "address"))


def _next(text: str) -> str | None:
    """The text that counts one further: gpu10 after gpu09."""
    prefix = text.rstrip("0123456789")
    digits = text[len(prefix) :]
    return f"{prefix}{int(digits) + 1:0{len(digits)}}" if digits else None


def checked_names(names: Iterable[str]) -> str:
    return compress(checked_word("the name of a node", name) for name in names)


def checked_word(what: str, text: str) -> str:
    """A part of a line; rejected when Slurm could read it as more than one."""
    if not _WORD.fullmatch(text):
        raise ValueError(f"{what} may not be {text!r}: Slurm's files take no blanks, quotes, `#`, `=` or `\\` there")
    return text


def checked_value(key: str, text: str) -> str:
    if not _VALUE.fullmatch(text):
        raise ValueError(f"{key} may not be {text!r}: slurm.conf takes no blanks, quotes, `#` or `\\` there")
    return text
