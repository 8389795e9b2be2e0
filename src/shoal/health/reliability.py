"""Nodes on which far more jobs fail than on others, by Slurm's file of ended jobs: no accounting is needed. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.hostlist import expand

RECORD_DAYS = 7
MIN_LOST = 2
"""So many jobs that Slurm lost with the node (NODE_FAIL) make it unreliable."""
MIN_FAILED, MIN_RATE, MIN_RATIO = 5, 0.3, 3.0
"""So do so many failed jobs, if they are this part of its jobs, and this many times the part on the other nodes."""


SHUTDOWN_S, REGISTRATION_S = 30.0, 60.0
"""Jobs end so long before slurmd in a shutdown; slurmctld gives up others so long after slurmd's next start."""
Stop = tuple[float, float]
"""When slurmd was told to end, and when it was back."""
ALWAYS: tuple[Stop, ...] = ((-math.inf, math.inf),)


@dataclass(frozen=True)
class EndedJobs:
    """The jobs that ended on a list of nodes: how many, when some failed, and when Slurm lost some with a node."""

    jobs: int = 0
    failed_at: tuple[float, ...] = ()
    lost_at: tuple[float, ...] = ()


@dataclass(frozen=True)
class JobCounts:
    """Ended jobs: all, those that failed or were lost, and those that Slurm lost with a node."""

    jobs: int = 0
    failed: int = 0
    lost: int = 0

    def __add__(self, other: JobCounts) -> JobCounts:
        return JobCounts(self.jobs + other.jobs, self.failed + other.failed, self.lost + other.lost)

    def __sub__(self, other: JobCounts) -> JobCounts:
        return JobCounts(self.jobs - other.jobs, self.failed - other.failed, self.lost - other.lost)

    @property
    def rate(self) -> float:
        return self.failed / self.jobs if self.jobs else 0.0


def count_by_node(records: Mapping[str, EndedJobs], stops: Mapping[str, Sequence[Stop]]) -> dict[str, JobCounts]:
    """The counts of each node. A job of several nodes counts for each of them.

    One that failed or was lost when somebody rebooted a node of it, or stopped slurmd there, does not count. Neither
    do those with a node that could not be asked about that: it may be rebooting.
    """
    counts: dict[str, JobCounts] = {}
    for nodes, record in records.items():
        try:
            names = expand(nodes)
        except ValueError:
            continue
        asked_for = [stop for name in names for stop in stops.get(name, ALWAYS)]
        lost = sum(not _is_during(time, asked_for) for time in record.lost_at)
        failed = sum(not _is_during(time, asked_for) for time in record.failed_at) + lost
        jobs = record.jobs - len(record.lost_at) - len(record.failed_at) + failed
        count = JobCounts(jobs, failed, lost)
        for name in names:
            counts[name] = counts.get(name, JobCounts()) + count
    return counts


def _is_during(time: float, stops: Sequence[Stop]) -> bool:
    return any(begin - SHUTDOWN_S <= time <= end + REGISTRATION_S for begin, end in stops)


def unreliable_nodes(
    records: Mapping[str, EndedJobs], stops: Mapping[str, Sequence[Stop]]
) -> Iterator[tuple[str, str]]:
    """The nodes, each with its numbers."""
    counts = count_by_node(records, stops)
    total = JobCounts()
    for count in counts.values():
        total += count
    for name, count in sorted(counts.items()):
        others = total - count
        often = count.failed >= MIN_FAILED and count.rate >= max(MIN_RATE, MIN_RATIO * others.rate) and others.jobs > 0
        if often or count.lost >= MIN_LOST:
            here = f"{count.failed} of {count.jobs} jobs failed here, {count.lost} were lost with the node"
            yield name, f"in {RECORD_DAYS} days {here}; on other nodes {others.failed} of {others.jobs} failed"
