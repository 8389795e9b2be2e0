"""What a host reports of itself to `shoal doctor`: the answer of `remote/health_probe.py`, as values. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.health.reliability import EndedJobs, Stop

MAX_EVIDENCE = 3
"""So many lines of a log are shown."""
CHANGE_OF_NODE = re.compile(r"update_node: node (\S+) (reason|state) set to:? (.*)")


@dataclass(frozen=True)
class Space:
    """A directory, and the file system that it is on."""

    path: str
    mount: str
    total_mb: int
    free_mb: int
    files: int
    free_files: int
    problem: str = ""
    """Why nothing can be written there."""

    def __post_init__(self) -> None:
        if not all(isinstance(number, int) for number in (self.total_mb, self.free_mb, self.files, self.free_files)):
            raise TypeError("a size that is no number")


@dataclass(frozen=True)
class LogEntry:
    """A line of a log of Slurm's."""

    text: str
    age_s: float | None

    def __post_init__(self) -> None:
        if not isinstance(self.age_s, float | int | None):
            raise TypeError("an age that is no number")


@dataclass(frozen=True)
class NodeFinding:
    """What the health program of a node found."""

    id: str
    since: float
    evidence: tuple[str, ...]


@dataclass(frozen=True)
class HealthReport:
    """The last result of a node's health program."""

    age_s: float
    findings: tuple[NodeFinding, ...] = ()

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> HealthReport:
        findings = (
            NodeFinding(str(entry["id"]), float(entry["since"]), tuple(map(str, entry["evidence"])))
            for entry in values["findings"]
        )
        return cls(float(values["age_s"]), tuple(findings))


@dataclass(frozen=True)
class CompletingJob:
    """A job that has ended and still holds its nodes."""

    job: str
    user: str
    nodes: str
    seconds: int
    """Since its end."""

    def __post_init__(self) -> None:
        if not isinstance(self.seconds, int):
            raise TypeError("an age that is no number")


@dataclass(frozen=True)
class HostReport:
    """What `remote/health_probe.py` reports of a host. A check that did not end is empty, and `unfinished` names it."""

    services: Mapping[str, str] = field(default_factory=dict)
    directories: Sequence[Space] = ()
    names: Sequence[str] = ()
    """Names of members that do not resolve there."""
    users: Mapping[str, int | None] = field(default_factory=dict)
    steps: Sequence[str] = ()
    """Job steps that have processes there."""
    logs: Sequence[LogEntry] = ()
    munge: Mapping[str, str] = field(default_factory=dict)
    unfinished: Sequence[str] = ()
    health: HealthReport | None = None
    records: Mapping[str, EndedJobs] = field(default_factory=dict)
    """What became of the jobs on each list of nodes. The controller has it."""
    clock: float | None = None
    version: str = ""
    """What its daemon of Slurm says of its version."""
    confs: Mapping[str, str] = field(default_factory=dict)
    """A digest of each file of Slurm's configuration."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Kernel, driver, packages and digests of files, to compare with other nodes."""
    completing: Sequence[CompletingJob] = ()
    """Jobs that have ended and still hold nodes. The controller has it."""
    stops: Sequence[Stop] = ()
    """When somebody rebooted the host, or stopped slurmd there."""

    @classmethod
    def parse(cls, values: Mapping[str, Any]) -> HostReport:
        """Raises ValueError for what no program of ours reports."""
        try:
            return cls(
                {str(name): str(state) for name, state in values.get("services", {}).items()},
                [Space(**space) for space in values.get("directories", ())],
                tuple(map(str, values.get("names", ()))),
                {
                    str(name): number if number is None else int(number)
                    for name, number in values.get("users", {}).items()
                },
                tuple(map(str, values.get("steps", ()))),
                [LogEntry(str(line["text"]), line["age_s"]) for line in values.get("logs", ())],
                {str(key): str(text) for key, text in values.get("munge", {}).items()},
                tuple(map(str, values.get("unfinished", ()))),
                HealthReport.parse(values["health"]) if values.get("health") else None,
                {
                    str(nodes): EndedJobs(int(jobs), tuple(map(float, failed)), tuple(map(float, lost)))
                    for nodes, (jobs, failed, lost) in values.get("records", {}).items()
                },
                float(values["clock"]) if "clock" in values else None,
                str(values.get("version", "")),
                {str(name): str(text) for name, text in values.get("confs", {}).items()},
                {str(name): str(text) for name, text in values.get("facts", {}).items()},
                tuple(CompletingJob(**job) for job in values.get("completing", ())),
                tuple((float(begin), float(end)) for begin, end in values.get("stops", ())),
            )
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(str(error)) from error

    def log_lines(self, pattern: str, max_age_s: float | None = None) -> tuple[str, ...]:
        """The newest lines of Slurm's logs there that match."""
        lines = [
            line.text
            for line in self.logs
            if re.search(pattern, line.text) and not CHANGE_OF_NODE.search(line.text)
            if max_age_s is None or (line.age_s is not None and line.age_s <= max_age_s)
        ]
        return tuple(lines[-MAX_EVIDENCE:])
