"""The output of Slurm's commands as data: the commands, and a parser for each.

The layout is the same from 22.05 to 26.05; keys that a release adds or drops are tolerated.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_origin, get_type_hints

from shoal.hostlist import expand

NODES_COMMAND = ("scontrol", "-d", "-o", "show", "node")
PARTITIONS_COMMAND = ("scontrol", "-o", "show", "partition")
CONFIG_COMMAND = ("scontrol", "show", "config")
JOBCOMP = "/var/log/slurm/jobcomp.log"
"""slurmctld records every ended job here, with accounting and without."""

JOB_RECORD, _FIELD = f"\x1e{os.urandom(8).hex()}", "\x1f"
"""ASCII's separators. The job's name comes last: it is the only field with free text. What begins a record differs
from process to process, so that no name can contain a record of another job."""
_JOB_FIELDS = ("%i", "%T", "%u", "%P", "%N", "%r", "%M", "%l", "%D", "%j")
JOBS_COMMAND = ("squeue", "-h", "-o", JOB_RECORD + _FIELD.join(_JOB_FIELDS))

ACTIVE_STATES = frozenset({"RUNNING", "SUSPENDED", "CONFIGURING", "STOPPED", "SIGNALING", "RESIZING"})
"""Jobs that hold nodes and have work to lose. A pending job holds none; a COMPLETING one has done its work."""

IN_SERVICE = frozenset(
    {
        *("IDLE", "ALLOCATED", "MIXED", "COMPLETING", "PLANNED", "RESERVED", "NOT_RESPONDING"),
        *("CLOUD", "DYNAMIC_NORM", "DYNAMIC_FUTURE"),
    }
)
"""A node that has no other flags is not out of service by anybody's decision, and its reason is of an earlier time:
from 24.11 on Slurm keeps it until the next job starts there."""

STATE_NAMES = {
    # sinfo's short and long names, as scontrol has them
    "ALLOC": ("ALLOCATED",),
    "BOOT": ("REBOOT_ISSUED",),
    "COMP": ("COMPLETING",),
    "DRAINED": ("IDLE", "DRAIN"),
    "DRAINING": ("ALLOCATED", "DRAIN"),
    "DRAIN": ("DRAIN",),
    "DRNG": ("ALLOCATED", "DRAIN"),
    "FAILG": ("ALLOCATED", "FAIL"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "FUTR": ("FUTURE",),
    "INVAL": ("INVALID_REG",),
    "MIX": ("MIXED",),
    "NO_RESPOND": ("NOT_RESPONDING",),
    "PLND": ("PLANNED",),
    "POW_DN": ("POWERING_DOWN",),
    "POW_UP": ("POWERING_UP",),
    "RESV": ("RESERVED",),
    "UNK": ("UNKNOWN",),
}

STATE_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}


NOT_RESPONDING_REASON = "Not responding"
"""Slurm's reason for a node that it marked DOWN because it was silent for SlurmdTimeout."""


@dataclass(frozen=True)
class NodeState:
    """A node as slurmctld has it. Annotations name the key of scontrol."""

    name: str
    state: tuple[str, ...]
    """The base state and its flags, as in scontrol: `("IDLE", "DRAIN")`."""
    reason: str = ""
    reason_by: str = ""
    reason_time: str = ""
    address: Annotated[str, "NodeAddr"] = ""
    hostname: Annotated[str, "NodeHostName"] = ""
    version: Annotated[str, "Version"] = ""
    """The version of its slurmd; empty until it has registered."""
    cpus: Annotated[int, "CPUTot"] = 0
    cpus_alloc: Annotated[int, "CPUAlloc"] = 0
    memory_mb: Annotated[int, "RealMemory"] = 0
    memory_alloc_mb: Annotated[int, "AllocMem"] = 0
    gres: Annotated[str, "Gres"] = ""
    gres_used: Annotated[str, "GresUsed"] = ""
    features: Annotated[tuple[str, ...], "ActiveFeatures"] = ()
    partitions: Annotated[tuple[str, ...], "Partitions"] = ()
    boot_time: Annotated[str, "BootTime"] = ""
    slurmd_start_time: Annotated[str, "SlurmdStartTime"] = ""
    declared_features: Annotated[tuple[str, ...], "AvailableFeatures"] = ()
    """Those of slurm.conf. Jobs are kept to nodes with active ones."""

    @property
    def cloud(self) -> bool:
        """Whether it is rented when a job needs it."""
        return "CLOUD" in self.state


@dataclass(frozen=True)
class JobState:
    """A job in the queue."""

    id: str
    """`17`, or `17_3` for a task of an array, or `17_[4-9]` for its pending tasks."""
    state: str
    """As in squeue: PENDING, RUNNING, COMPLETING …"""
    user: str
    partition: str
    nodes: str
    """The hostlist of its nodes; empty while it is pending."""
    reason: str
    """Why it is pending; `None` when it is not."""
    time_used: str
    time_limit: str
    node_count: int
    name: str

    @property
    def node_names(self) -> tuple[str, ...]:
        return tuple(expand(self.nodes))


@dataclass(frozen=True)
class PartitionState:
    """A partition as slurmctld has it. Annotations name the key of scontrol."""

    name: str
    state: Annotated[str, "State"]
    default: bool = False
    nodes: Annotated[str, "Nodes"] = ""
    """The hostlist of its nodes."""
    max_time: Annotated[str, "MaxTime"] = "UNLIMITED"
    default_time: Annotated[str, "DefaultTime"] = "NONE"
    max_nodes: Annotated[str, "MaxNodes"] = "UNLIMITED"
    priority: Annotated[int, "PriorityTier"] = 1
    total_nodes: Annotated[int, "TotalNodes"] = 0
    total_cpus: Annotated[int, "TotalCPUs"] = 0
    grace: Annotated[int, "GraceTime"] = 0
    """In seconds."""
    preempt_mode: Annotated[str, "PreemptMode"] = ""


def parse_nodes(text: str) -> list[NodeState]:
    """Parse the output of NODES_COMMAND."""
    return [_node(record) for record in _records(text, "NodeName=")]


def parse_partitions(text: str) -> list[PartitionState]:
    """Parse the output of PARTITIONS_COMMAND."""
    partitions = map(_pairs, _records(text, "PartitionName="))
    return [
        PartitionState(
            values["PartitionName"], default=values.get("Default") == "YES", **_fields(PartitionState, values)
        )
        for values in partitions
    ]


def parse_jobs(text: str) -> list[JobState]:
    """Parse the output of JOBS_COMMAND."""
    jobs: list[JobState] = []
    for record in text.split(JOB_RECORD)[1:]:
        fields = record.removesuffix("\n").split(_FIELD, 9)
        if len(fields) == 10 and fields[8].isdecimal():
            job_id, state, user, partition, nodes, reason, used, limit, count, name = fields
            jobs.append(JobState(job_id, state, user, partition, nodes, reason, used, limit, int(count), name))
    return jobs


def parse_config(text: str) -> dict[str, str]:
    """Parse the output of CONFIG_COMMAND: the current settings, by key in lower case."""
    settings: dict[str, str] = {}
    for line in text.splitlines():
        key, equals, value = line.partition("=")
        if equals and re.fullmatch(r"[A-Za-z]+\s+", key):
            # The settings of cgroup.conf and of MPI follow those of slurm.conf; the first of a key counts.
            settings.setdefault(key.strip().lower(), "" if value.strip() == "(null)" else value.strip())
    return settings


def parse_state(text: str) -> tuple[str, ...]:
    """Parse a state of scontrol (`IDLE+DRAIN`) or sinfo (`drained*`) into scontrol's names."""
    states: list[str] = []
    for word in text.strip().upper().split("+"):
        flags: list[str] = []
        while word and word[-1] in STATE_SUFFIXES:
            flags.insert(0, STATE_SUFFIXES[word[-1]])
            word = word[:-1]
        states += [*STATE_NAMES.get(word, (word,) if word else ()), *flags]
    return tuple(dict.fromkeys(states))


_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z_]*)=(\S*)")
_REASON = re.compile(r"\sReason=(.*)", re.DOTALL)
_REASON_BY = re.compile(r"(.*?)\s\[([^\s@\]]+)@([0-9T:-]+)\]", re.DOTALL)


def _records(text: str, start: str) -> list[str]:
    """One record for each line; a line that starts otherwise continues the record before it."""
    records: list[str] = []
    for line in text.splitlines():
        if line.startswith(start):
            records.append(line)
        elif records and line.strip():
            records[-1] += "\n" + line
    return records


def _node(record: str) -> NodeState:
    # The reason is free text and comes last: nothing in it may be parsed as a key.
    free = _REASON.search(record)
    values = _pairs(record[: free.start()] if free else record)
    reason, by, when = free[1].strip() if free else "", "", ""
    if match := _REASON_BY.match(reason):
        reason, by, when = match[1], match[2], match[3]
    state = parse_state(values.get("State", "UNKNOWN"))
    if IN_SERVICE.issuperset(state):  # the reason is of an earlier time
        reason, by, when = "", "", ""
    elif not {"DRAIN", "FAIL"} & set(state) and reason.endswith(f" : {NOT_RESPONDING_REASON}"):  # as above, before it
        reason = NOT_RESPONDING_REASON
    return NodeState(values["NodeName"], state, reason, by, when, **_fields(NodeState, values))


def _fields(kind: type, values: dict[str, str]) -> dict[str, Any]:
    """The fields of a record whose annotation names a key: text, a number, or a list."""
    fields: dict[str, Any] = {}
    for name, key, value_type in _keys(kind):
        value = values.get(key, "")
        text = "" if value in ("(null)", "N/A", "None", "Unknown") else value
        if value_type is int:
            fields[name] = int(text) if text.isdecimal() else 0
        else:
            fields[name] = text if value_type is str else tuple(filter(None, text.split(",")))
    return fields


@cache
def _keys(kind: type) -> tuple[tuple[str, str, Any], ...]:
    """Field, key and type of each field whose annotation names a key."""
    hints = get_type_hints(kind, include_extras=True).items()
    return tuple((name, h.__metadata__[0], h.__origin__) for name, h in hints if get_origin(h) is Annotated)


def _pairs(record: str) -> dict[str, str]:
    """The `Key=value` pairs of a record; the first of a key counts."""
    return {key: value for key, value in reversed(_PAIR.findall(record))}
