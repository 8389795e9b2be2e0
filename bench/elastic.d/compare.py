"""A comparison of many machines with Slurm and the ledger, in turn with ParallelCluster's of as many instances.

Neither side finds anything to do: each node is idle and has its machine. Both clouds answer from memory and both
Slurms are shell scripts that print a file, so the time is the reconciler's own, the reading of all that included.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from answers import remembered
from ground import BenchFailed
from parallelcluster import VERSION, Clustermgtd, installed, running
from simulated import running_cloud, service_for
from tests.contract.renters import CASES, PUBLIC_KEY
from tests.unit.elastic.scene import CLUSTER, choice, rented_set

from shoal.elastic.ledger import Ledger
from shoal.elastic.rentals import Rental
from shoal.elastic.service import Service
from shoal.elastic.slurm import LiveSlurm
from shoal.elastic.source import Source
from shoal.hosts.api import Target
from shoal.hosts.local import LocalHost
from shoal.providers.rental import Order
from shoal.simulators import cloud

MANY = 4000
BOUND = 2.0
"""Seconds for a comparison of MANY machines."""
KIND = "gcp"
"""A provider that takes bulk orders and lists in pages."""
NODE = (
    "NodeName={0} Arch=x86_64 CoresPerSocket=8 CPUAlloc=0 CPUEfctv=8 CPUTot=8 CPULoad=0.01 AvailableFeatures=cloud"
    " ActiveFeatures=cloud Gres=gpu:a40:1 GresDrain=N/A GresUsed=gpu:a40:0 NodeAddr=10.0.0.1 NodeHostName={0}"
    " Version=22.05.8 OS=Linux 6.1.0 RealMemory=48000 AllocMem=0 FreeMem=47000 Sockets=1 Boards=1 State=IDLE+CLOUD"
    " ThreadsPerCore=1 TmpDisk=0 Weight=1 Owner=N/A MCS_label=N/A Partitions=burst BootTime=2026-11-15T14:00:00"
    " SlurmdStartTime=2026-11-15T14:00:10 LastBusyTime=2026-11-15T14:10:00 CfgTRES=cpu=8,mem=48000M,billing=8\n"
)


@dataclass
class Times:
    """What was measured, a value for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    listed: list[float] = field(default_factory=list)
    """Of the time on the wall, until the provider's list was there and read."""


def measure(rounds: int, peers: Path | None, say: Callable[[str], None]) -> list[str]:
    """The lines of the table. Without `peers` ParallelCluster is left out."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_cloud(KIND, 0.0) as real,
        remembered(real, cloud(KIND).listing) as url,
    ):
        directory = Path(scratch)
        _commands(directory)
        if peers is None:
            ours, theirs = asyncio.run(_rounds(url, rounds, None, say))
        else:
            (directory / "peer").mkdir()
            with running(installed(peers), directory / "peer", MANY) as peer:
                ours, theirs = asyncio.run(_rounds(url, rounds, peer, say))
    return _table(ours, theirs)


async def _rounds(url: str, rounds: int, peer: Clustermgtd | None, say: Callable[[str], None]) -> tuple[Times, Times]:
    nodeset = rented_set("burst", MANY, choice(CASES[KIND]))
    host = LocalHost(Target("controller", "127.0.0.1"))
    ours, theirs = Times(), Times()
    async with service_for(KIND, url, nodeset, LiveSlurm(host), None) as (service, _):
        source, ledger = service.fleet.sources[KIND], service.fleet.ledger
        ledger._database.execute("PRAGMA synchronous = OFF")  # only to have them: what is timed is as it always is
        for start in range(0, MANY, source.abilities.at_once):
            await _have(source, ledger, nodeset.nodes[start : start + source.abilities.at_once])
        ledger._database.execute("PRAGMA synchronous = FULL")
        for turn in range(rounds + 1):
            await _step(service, source, ours)
            if peer is not None:
                wall, cpu = peer.once()
                theirs.wall.append(wall)
                theirs.cpu.append(cpu)
            beside = f", clustermgtd {theirs.wall[-1]:.2f} s" if peer else ""
            say(f"{MANY} machines, round {turn or 'to warm up'}: {ours.wall[-1]:.2f} s{beside}")
        if {one.state for one in ledger.live()} != {"joined"} or len(ledger.live()) != MANY:
            raise BenchFailed("the bench's own machines are not all there, or something was corrected")
    for times in (ours, theirs):  # the first round read everything for the first time
        del times.wall[:1], times.cpu[:1], times.listed[:1]
    return ours, theirs


async def _step(service: Service, source: Source, times: Times) -> None:
    """One step that lists, as the service does it once a minute."""
    source._asked_at = float("-inf")
    looked: list[float] = []
    look = source.look

    async def timed() -> None:
        begun = time.perf_counter()
        await look()
        looked.append(time.perf_counter() - begun)

    source.look = timed  # type: ignore[method-assign]
    begun, used = time.perf_counter(), _cpu_seconds()
    try:
        await service.step()
    finally:
        source.look = look  # type: ignore[method-assign]
    times.wall.append(time.perf_counter() - begun)
    times.cpu.append(_cpu_seconds() - used)
    times.listed += looked
    if source.problem or source.seen is None or len(source.seen.machines) != MANY or len(looked) != 1:
        raise BenchFailed(f"the step did not list {MANY} machines: {source.problem}")


async def _have(source: Source, ledger: Ledger, nodes: Sequence[str]) -> None:
    """Rent machines that have joined."""
    offer, now = replace(CASES[KIND].offer, provider=source.name), time.time()
    orders = [Order(CLUSTER, node, f"t{node}", offer, PUBLIC_KEY) for node in nodes]
    ledger.intend(*(Rental(one.token, one.node, "burst", source.name, offer, intended_at=now) for one in orders))
    for order, outcome in zip(orders, await source.order(orders), strict=True):
        if not outcome.ok:
            raise BenchFailed(f"the simulator does not fill the bench's order: {outcome}")
        ledger.made(order.token, outcome.id, None, now)
        ledger.joined(order.token, now)


def _commands(directory: Path) -> None:
    """A Slurm of two commands, first in this process's path: all nodes are idle, and there are no jobs."""
    nodes = rented_set("burst", MANY, choice(CASES[KIND])).nodes
    (directory / "nodes").write_text("".join(NODE.format(node) for node in nodes))
    (directory / "bin").mkdir()
    for name, text in (("scontrol", f"exec cat {directory}/nodes"), ("squeue", "exit 0")):
        (directory / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / "bin" / name).chmod(0o755)
    os.environ["PATH"] = f"{directory}/bin:{os.environ['PATH']}"


def _cpu_seconds() -> float:
    """Of this process and of the commands that it ran."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def _table(ours: Times, theirs: Times) -> list[str]:
    median = statistics.median
    met = "met" if median(ours.wall) <= BOUND else "MISSED"
    lines = [
        f"{f'{MANY} machines, each of an idle node: one comparison':<52}{'seconds':>11}{'of CPUs':>11}",
        f"{'Shoal: list, Slurm, ledger, compare':<52}{median(ours.wall):>11.2f}{median(ours.cpu):>11.2f}",
        f"{'  of it until the list was there and read':<52}{median(ours.listed):>11.2f}",
    ]
    if theirs.wall:
        pairs = list(zip(ours.wall, theirs.wall, strict=True)), list(zip(ours.cpu, theirs.cpu, strict=True))
        wall, cpu = (median(theirs / ours for ours, theirs in pair) for pair in pairs)
        name = f"clustermgtd of ParallelCluster {VERSION}"
        lines += [
            f"{name:<52}{median(theirs.wall):>11.2f}{median(theirs.cpu):>11.2f}",
            f"{'  so many times what Shoal takes, beside it':<52}{wall:>11.1f}{cpu:>11.1f}",
        ]
    return [*lines, f"Target: a comparison of {MANY} machines in under {BOUND:g} s: {met}."]
