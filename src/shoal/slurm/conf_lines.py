"""Lines of slurm.conf for nodes and partitions, and the checks of every value in Slurm's files. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from shoal.hostlist import compress, expand, fold
from shoal.slurm.model import Node, PartitionConf

KEY = re.compile(r"[A-Za-z][A-Za-z0-9]*")
_WORD = re.compile(r"[!$-<>-\[\]-~]+")  # printable ASCII without blank, quote, `#`, `=` and `\`
_VALUE = re.compile(r"[!$-\[\]-~]+")
_TEXT = re.compile(r"(?! )[ !$-\[\]-~]+(?<! )")
SHARED_GRES = ("shard", "mps")
"""What a GPU is divided into where several jobs may use it."""


def node_lines(nodes: Iterable[Node]) -> Iterator[str]:
    """One line for each run of like nodes whose names, host names and addresses all count up together."""
    by_name = {node.name: node for node in nodes}
    runs: list[list[Node]] = []
    for name in expand(compress(by_name)):
        node = by_name[name]
        if runs and _attributes(runs[-1][-1]) == _attributes(node) and _follows(runs[-1][-1], node):
            runs[-1].append(node)
        else:
            runs.append([node])
    return map(_node_line, runs)


def partition_line(partition: PartitionConf, memory: Mapping[str, int]) -> str:
    fields = {"PartitionName": checked_word("the name of a partition", partition.name)}
    unknown = [name for name in partition.nodes if name not in memory]
    if unknown:
        raise ValueError(f"partition {partition.name} names {compress(unknown)}, which the cluster does not have")
    keys = {key.lower() for key in partition.options}
    if partition.nodes:
        fields["Nodes"] = checked_names(partition.nodes)
        # Without it a job that does not say takes all the memory of its nodes, and nothing runs beside it.
        if not keys & {"defmempercpu", "defmempernode"}:
            fields["DefMemPerCPU"] = str(max(1, min(memory[name] for name in partition.nodes)))
    if partition.default:
        fields["Default"] = "YES"
    fields["MaxTime"] = checked_word("the MaxTime of a partition", partition.max_time or "UNLIMITED")
    if partition.default_time is not None:
        fields["DefaultTime"] = checked_word("the DefaultTime of a partition", partition.default_time)
    if partition.max_nodes is not None:
        fields["MaxNodes"] = f"{partition.max_nodes:d}"
    if partition.priority is not None:
        fields["PriorityTier"] = f"{partition.priority:d}"
    fields["GraceTime"] = f"{partition.grace:d}"
    if not partition.preemptable:
        fields["PreemptMode"] = "OFF"
    if partition.suspend_time is not None:
        fields["SuspendTime"] = f"{partition.suspend_time:d}"
    if "state" not in keys:
        fields["State"] = "UP"
    for key, value in partition.options.items():
        if not KEY.fullmatch(key) or key.lower() in map(str.lower, fields):
            raise ValueError(f"{key!r} is not an option of partition {partition.name}")
        fields[key] = quoted(key, value)
    return " ".join(f"{key}={value}" for key, value in fields.items())


def real_memory(memory_mb: int) -> int:
    """The RealMemory to configure: 95 % of what the host has, less a reserve for the system of up to 512 MB.

    slurmd reports the machine's physical memory; a node that reports less than RealMemory is drained. The physical
    memory varies by a little from boot to boot (kernel, firmware, crash kernel), so the configured value stays below.
    """
    return max(1, memory_mb * 95 // 100 - min(512, memory_mb // 32))


def _node_line(run: list[Node]) -> str:
    names = [checked_word("the name of a node", node.name) for node in run]
    hostnames = [checked_word("the host name of a node", node.hostname or node.name) for node in run]
    addresses = [checked_word("the address of a node", node.address or node.name) for node in run]
    line = f"NodeName={fold(names)}"
    if hostnames != names:
        line += f" NodeHostname={fold(hostnames)}"
    if addresses != names:
        line += f" NodeAddr={fold(addresses)}"
    return f"{line} {_attributes(run[0])}"


def _attributes(node: Node) -> str:
    text = (
        f"CPUs={node.cpus:d} Sockets={node.sockets:d} CoresPerSocket={node.cores_per_socket:d}"
        f" ThreadsPerCore={node.threads_per_core:d} RealMemory={memory_of(node):d}"
    )
    if node.gpus:
        text += f" Gres={_gres(node)}"
    if node.features:
        text += f" Feature={','.join(checked_word('a feature', feature) for feature in node.features)}"
    text += f" Port={node.port:d}" if node.port else ""
    text += f" Weight={node.weight:d}"
    return f"{text} State=CLOUD" if node.cloud else text


def _gres(node: Node) -> str:
    gpus = (f"gpu:{checked_word('the type of a GPU', gpu.type)}" if gpu.type else "gpu" for gpu in node.gpus)
    counts = {**Counter(gpus), **{name: shared_count(node, name) for name in SHARED_GRES}}
    return ",".join(f"{kind}:{count}" for kind, count in counts.items() if count)


def shared_count(node: Node, name: str) -> int:
    """How many parts of its GPUs a node has, of this kind."""
    return (node.shards if name == "shard" else node.mps) if node.gpus else 0


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


def quoted(key: str, text: str) -> str:
    """A value of the user's: in quotes where it has blanks."""
    if not _TEXT.fullmatch(text):
        raise ValueError(f"{key} may not be {text!r}: slurm.conf takes no quotes, `#` or `\\` there")
    return f'"{text}"' if " " in text else text
