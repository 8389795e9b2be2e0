"""How long Slurm did not answer: a question to slurmctld, asked over and over on some hosts while something changes."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from shoal.errors import HostError
from shoal.hosts.api import Process
from shoal.plan.connections import Connections

AT_MOST = 8
"""Hosts that ask. Every question is work for slurmctld."""

QUESTION = "timeout 10 sinfo -h -o %D >/dev/null 2>&1"
LOOP = f'while :; do s=$EPOCHREALTIME; {QUESTION}; r=$?; echo "$s $EPOCHREALTIME $r"; sleep 0.1; done'
COMMAND = ("bash", "-c", LOOP)


@dataclass(frozen=True)
class Probe:
    """One question: when it was asked, when it was answered or given up, and whether it was answered."""

    begin: float
    end: float
    answered: bool


@dataclass
class Probes:
    """All questions so far, by the host that asked."""

    hosts: dict[str, list[Probe]] = field(default_factory=dict)

    @property
    def failed_seconds(self) -> float:
        """How long the host that had to wait longest got no answer."""
        return max((failed_seconds(probes) for probes in self.hosts.values()), default=0.0)

    @property
    def slowest(self) -> float:
        """The longest that any question took, answered or not."""
        return max((probe.end - probe.begin for probes in self.hosts.values() for probe in probes), default=0.0)

    @property
    def asked(self) -> int:
        return sum(len(probes) for probes in self.hosts.values())


def failed_seconds(probes: Sequence[Probe]) -> float:
    """The time from each first question without an answer to the end of the last one before the next answer."""
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
    """What the loop prints; None for anything else. Some locales write a comma into numbers."""
    parts = line.replace(",", ".").split()
    try:
        begin, end, status = float(parts[0]), float(parts[1]), int(parts[2])
    except (ValueError, IndexError):
        return None
    return Probe(begin, end, status == 0)


@asynccontextmanager
async def probing(fleet: Connections, names: Iterable[str]) -> AsyncIterator[Probes]:
    """Ask from these hosts for as long as the block lasts. At its end every host has asked once more."""
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
        for name in list(names)[:AT_MOST]:
            processes[name] = await (await fleet.host(name)).start(COMMAND)
            probes.hosts[name] = []
            readers.append(asyncio.ensure_future(read(name, processes[name])))
        await _one_more(probes, readers)
        yield probes
        await _one_more(probes, readers)
    finally:
        for process in processes.values():
            with contextlib.suppress(HostError):
                await process.kill()
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _one_more(probes: Probes, readers: Sequence[asyncio.Task[None]], patience: float = 30.0) -> None:
    """Wait until every host has had an answer to a question that it asked after now."""
    had: Mapping[str, int] = {name: len(found) for name, found in probes.hosts.items()}
    end = asyncio.get_running_loop().time() + patience
    while asyncio.get_running_loop().time() < end and not all(reader.done() for reader in readers):
        # The one that was under way when we began may have been answered before the change.
        if all(any(probe.answered for probe in found[had[name] + 1 :]) for name, found in probes.hosts.items()):
            return
        await asyncio.sleep(0.05)
