"""How long Slurm does not answer during a change: some hosts query slurmctld again and again."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.errors import HostError
from shoal.hosts.api import Process
from shoal.plan.connections import Connections

MAX_HOSTS = 8
"""Hosts that query. Every query is work for slurmctld."""

QUERY = "timeout 10 sinfo -h -o %D >/dev/null 2>&1"
LOOP = f'while :; do s=$EPOCHREALTIME; {QUERY}; r=$?; echo "$s $EPOCHREALTIME $r"; sleep 0.1; done'
PROBE_COMMAND = ("bash", "-c", LOOP)


@dataclass(frozen=True)
class Probe:
    """One query: its begin, its end, and whether slurmctld answered."""

    begin: float
    end: float
    answered: bool


@dataclass
class Probes:
    """All queries so far, by host."""

    hosts: dict[str, list[Probe]] = field(default_factory=dict)

    @property
    def failed_seconds(self) -> float:
        """The longest time that any host got no answer."""
        return max((failed_seconds(probes) for probes in self.hosts.values()), default=0.0)

    @property
    def slowest(self) -> float:
        """The longest query, answered or not."""
        return max((probe.end - probe.begin for probes in self.hosts.values() for probe in probes), default=0.0)

    @property
    def asked(self) -> int:
        return sum(len(probes) for probes in self.hosts.values())


def failed_seconds(probes: Sequence[Probe]) -> float:
    """The time from each first failed query to the end of the last one before the next answer."""
    total, begin, end = 0.0, None, 0.0
    for probe in probes:
        if probe.answered:
            total += end - begin if begin is not None else 0.0
            begin = None
            continue
        begin = probe.begin if begin is None else begin
        end = probe.end
    return total + (end - begin if begin is not None else 0.0)


def parse_probe(line: str) -> Probe | None:
    """A line of the loop; None for anything else. Some locales write a comma into numbers."""
    fields = line.replace(",", ".").split()
    try:
        begin, end, status = float(fields[0]), float(fields[1]), int(fields[2])
    except (ValueError, IndexError):
        return None
    return Probe(begin, end, status == 0)


@asynccontextmanager
async def measure_downtime(fleet: Connections, names: Iterable[str]) -> AsyncIterator[Probes]:
    """Query from these hosts during the block, and once more on every host at its end."""
    probes = Probes()
    processes: dict[str, Process] = {}
    readers: list[asyncio.Task[None]] = []

    async def read(name: str, process: Process) -> None:
        with contextlib.suppress(HostError):
            while line := await process.readline():
                probe = parse_probe(line.decode("utf-8", "replace"))
                if probe is not None:
                    probes.hosts[name].append(probe)

    try:
        for name in list(names)[:MAX_HOSTS]:
            processes[name] = await (await fleet.host(name)).start(PROBE_COMMAND)
            probes.hosts[name] = []
            readers.append(asyncio.ensure_future(read(name, processes[name])))
        await _wait_for_answers(probes, readers)
        yield probes
        await _wait_for_answers(probes, readers)
    finally:
        for process in processes.values():
            with contextlib.suppress(HostError):
                await process.kill()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _wait_for_answers(probes: Probes, readers: Sequence[asyncio.Task[None]], timeout_s: float = 30.0) -> None:
    """Wait until every host has an answer to a query that it began after now."""
    counts: Mapping[str, int] = {name: len(queries) for name, queries in probes.hosts.items()}
    deadline = asyncio.get_running_loop().time() + timeout_s
    while asyncio.get_running_loop().time() < deadline and not all(reader.done() for reader in readers):
        # The query that was under way may have been answered before the change.
        if all(any(probe.answered for probe in queries[counts[name] + 1 :]) for name, queries in probes.hosts.items()):
            return
        await asyncio.sleep(0.05)
