"""Hosts that do not fit their cluster: clocks, versions, files of Slurm, nodes unlike their nodeset. Pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from shoal.health.report import HostReport, LogEntry
from shoal.hostlist import compress
from shoal.slurm.versions import Version, is_compatible

MAX_CLOCK_OFFSET_S = 60.0
"""munge rejects messages whose clocks are five minutes apart."""
CGROUP_ERRORS = (
    "cannot find cgroup plugin",
    "is not a valid cgroup2 mountpoint",
    "Hybrid mode is not supported",
    "Cannot setup the cgroup namespace",
    "systemd scope for slurmstepd could not be set",
    "scope and/or cgroup directory for slurmstepd could not be set",
    "cannot initialize cgroup directory for stepds",
    "Cannot enable subtree_control at the top level",
    "Unable to initialize the cpuset cgroup",
)
"""What slurmd logs where the cgroups of its host do not work."""
STARTED = "slurmd version "
COMPLETING_S = 120
"""So long a job may take to end. Slurm itself gives up after UnkillableStepTimeout, or never where an epilog hangs."""
Problem = tuple[str, str, tuple[str, ...]]
"""A fault of the table, its host, and the evidence."""


def wrong_clocks(controller: str, offsets: Mapping[str, float]) -> Iterator[Problem]:
    """Hosts whose clock is not the controller's; the offsets are those to the operator's machine."""
    reference = offsets.get(controller, math.nan)
    apart = {host: offset for host, offset in offsets.items() if abs(offset - reference) > MAX_CLOCK_OFFSET_S}
    if apart and abs(reference) > MAX_CLOCK_OFFSET_S > max(map(abs, apart.values())):
        yield "clock", controller, (_clock_text(reference, f"this machine and {compress(apart)}"),)
    else:
        yield from (("clock", host, (_clock_text(apart[host] - reference, controller),)) for host in apart)


def _clock_text(offset: float, other: str) -> str:
    return f"{abs(offset):.0f} s {'ahead of' if offset > 0 else 'behind'} {other}"


def wrong_versions(controller: str, reports: Mapping[str, HostReport]) -> Iterator[Problem]:
    """Nodes whose slurmd is newer than slurmctld, or too old for it."""
    own = _version(reports.get(controller, HostReport()).version)
    for host, report in reports.items():
        version = _version(report.version)
        if own is not None and version is not None and not is_compatible(own, version):
            yield "version-skew", host, (f"slurmd {version}, slurmctld on {controller} {own}",)


def _version(text: str) -> Version | None:
    try:
        return Version.parse(text)
    except ValueError:
        return None


def wrong_confs(controller: str, reports: Mapping[str, HostReport]) -> Iterator[Problem]:
    """Nodes whose slurmd has fetched other files than slurmctld has."""
    own = reports.get(controller, HostReport()).confs
    for host, report in reports.items():
        names = [name for name, digest in report.confs.items() if name in own and own[name] != digest]
        if names and host != controller:
            yield "conf-differs", host, (f"not as on {controller}: {', '.join(names)}",)


def failed_cgroups(report: HostReport, is_running: bool) -> tuple[str, ...]:
    """slurmd's errors of cgroups since it last started; if it does not run and never did, all of them."""
    entries: Sequence[LogEntry] = report.logs
    starts = [number for number, entry in enumerate(entries) if STARTED in entry.text]
    if starts or is_running:
        entries = entries[starts[-1] :] if starts else ()
    return tuple(entry.text for entry in entries if any(error in entry.text for error in CGROUP_ERRORS))[-3:]


def unlike_nodes(nodesets: Mapping[str, Sequence[str]], reports: Mapping[str, HostReport]) -> Iterator[Problem]:
    """Nodes that differ from most of their nodeset; of two, the second."""
    for nodes in nodesets.values():
        facts = {node: reports[node].facts for node in nodes if node in reports and reports[node].facts}
        differences: dict[str, list[str]] = {}
        for name in dict.fromkeys(name for values in facts.values() for name in values):
            values = {node: fact.get(name, "") for node, fact in facts.items()}
            # The most frequent one; of those that are equally frequent, the first.
            usual = Counter(values.values()).most_common(1)[0][0]
            example = next(node for node, value in values.items() if value == usual)
            for node, value in values.items():
                if value != usual:
                    differences.setdefault(node, []).append(_difference(name, value, usual, example))
        for node, texts in differences.items():
            yield "node-differs", node, tuple(texts)


def _difference(name: str, value: str, usual: str, example: str) -> str:
    if name.startswith("/"):
        is_digest = len(value) == 12 and " " not in value
        return f"{name}: {'another text than' if is_digest else f'{value}; it is'} on {example}"
    return f"{name}: {value or 'none'}, on {example} {usual or 'none'}"
