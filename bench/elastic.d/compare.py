"""Times a comparison of many machines with Slurm and the ledger, beside ParallelCluster's of as many instances.

Neither has anything to change: each node is idle and has its machine. Both clouds answer from memory and both Slurms
are shell scripts that print a file, so the time is that of the reconciler, including reading all of that.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from answers import cached_cloud
from harness import BenchError, show_progress
from parallelcluster import VERSION, Clustermgtd, run_clustermgtd
from simulated import running_cloud, service_for
from tests.contract.rental_providers import CASES, PUBLIC_KEY
from tests.unit.cloud.scene import CLUSTER, choice, rented_set

from shoal.cloud.providers.api import RentalOrder
from shoal.cloud.rental import Rental
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import AccountClient
from shoal.cloud.service.service import RentalService
from shoal.cloud.service.slurm import LiveSlurm
from shoal.hosts.api import Target
from shoal.hosts.local import LocalHost
from shoal_simulators import find_simulator

MACHINES = 4000
TARGET_S = 2.0
"""For a comparison of MACHINES machines."""
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
    """Seconds, a value for each round."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    listed: list[float] = field(default_factory=list)
    """The part of the wall-clock time until the provider's list was read."""


def measure(count: int, rounds: int, peer_programs: Path | None) -> list[str]:
    """The lines of the table. Without `peer_programs` ParallelCluster is left out."""
    with (
        tempfile.TemporaryDirectory() as scratch,
        running_cloud(KIND, 0.0) as real,
        cached_cloud(real, find_simulator(KIND).listing) as url,
    ):
        directory = Path(scratch)
        _write_commands(directory, count)
        if peer_programs is None:
            ours, theirs = asyncio.run(_rounds(url, count, rounds, None))
        else:
            (directory / "peer").mkdir()
            with run_clustermgtd(peer_programs / "python", directory / "peer", count) as peer:
                ours, theirs = asyncio.run(_rounds(url, count, rounds, peer))
    return _table(count, ours, theirs)


async def _rounds(url: str, count: int, rounds: int, peer: Clustermgtd | None) -> tuple[Times, Times]:
    nodeset = rented_set("burst", count, choice(CASES[KIND]))
    host = LocalHost(Target("controller", "127.0.0.1"))
    ours, theirs = Times(), Times()
    async with service_for(KIND, url, nodeset, LiveSlurm(host), None) as (service, _):
        account, ledger = service.context.accounts[KIND], service.context.ledger
        ledger._database.execute("PRAGMA synchronous = OFF")  # for the setup only; what is timed is durable
        for start in range(0, count, account.abilities.at_once):
            await _rent(account, ledger, nodeset.nodes[start : start + account.abilities.at_once])
        ledger._database.execute("PRAGMA synchronous = FULL")
        for turn in range(rounds + 1):
            await _time_step(service, account, count, ours)
            if peer is not None:
                wall, cpu = peer.run_pass()
                theirs.wall.append(wall)
                theirs.cpu.append(cpu)
            beside = f", clustermgtd {theirs.wall[-1]:.2f} s" if peer else ""
            show_progress(f"{count} machines, round {turn or '(warm-up)'}: {ours.wall[-1]:.2f} s{beside}")
        if {rental.state for rental in ledger.live()} != {"joined"} or len(ledger.live()) != count:
            raise BenchError("machines are missing, or the service changed something")
    for times in (ours, theirs):  # the warm-up
        del times.wall[:1], times.cpu[:1], times.listed[:1]
    return ours, theirs


async def _time_step(service: RentalService, account: AccountClient, count: int, times: Times) -> None:
    """One step that lists the machines, as the service does once a minute."""
    account._asked_at = float("-inf")
    list_times: list[float] = []
    look = account.list_instances

    async def timed() -> None:
        start = time.perf_counter()
        await look()
        list_times.append(time.perf_counter() - start)

    account.list_instances = timed  # type: ignore[method-assign]
    start, cpu_start = time.perf_counter(), _cpu_seconds()
    try:
        await service.step()
    finally:
        account.list_instances = look  # type: ignore[method-assign]
    times.wall.append(time.perf_counter() - start)
    times.cpu.append(_cpu_seconds() - cpu_start)
    times.listed += list_times
    if account.problem or account.listing is None or len(account.listing.instances) != count or len(list_times) != 1:
        raise BenchError(f"the step did not list {count} machines: {account.problem}")


async def _rent(account: AccountClient, ledger: Ledger, nodes: Sequence[str]) -> None:
    """Rent machines that have joined."""
    offer, now = replace(CASES[KIND].offer, provider=account.name), time.time()
    orders = [RentalOrder(CLUSTER, node, f"t{node}", offer, PUBLIC_KEY) for node in nodes]
    ledger.intend(*(Rental(order.token, order.node, "burst", account.name, offer, intended_at=now) for order in orders))
    for order, outcome in zip(orders, await account.order(orders), strict=True):
        if not outcome.ok:
            raise BenchError(f"the simulator rejected an order: {outcome}")
        ledger.record_machine(order.token, outcome.id, None, now)
        ledger.record_join(order.token, now)


def _write_commands(directory: Path, count: int) -> None:
    """Write two Slurm commands and put them first in PATH: all nodes are idle, and there are no jobs."""
    nodes = rented_set("burst", count, choice(CASES[KIND])).nodes
    (directory / "nodes").write_text("".join(NODE.format(node) for node in nodes))
    (directory / "bin").mkdir()
    for name, text in (("scontrol", f"exec cat {directory}/nodes"), ("squeue", "exit 0")):
        (directory / "bin" / name).write_text(f"#!/bin/sh\n{text}\n")
        (directory / "bin" / name).chmod(0o755)
    os.environ["PATH"] = f"{directory}/bin:{os.environ['PATH']}"


def _cpu_seconds() -> float:
    """CPU seconds of this process and of the commands that it ran."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def _table(count: int, ours: Times, theirs: Times) -> list[str]:
    median = statistics.median
    met = "met" if median(ours.wall) <= TARGET_S else "MISSED"
    lines = [
        f"{f'{count} machines, each with an idle node: one comparison':<52}{'seconds':>11}{'CPU s':>11}",
        f"{'Shoal: list, Slurm, ledger, compare':<52}{median(ours.wall):>11.2f}{median(ours.cpu):>11.2f}",
        f"{'  until the list of machines was read':<52}{median(ours.listed):>11.2f}",
    ]
    if theirs.wall:
        pairs = list(zip(ours.wall, theirs.wall, strict=True)), list(zip(ours.cpu, theirs.cpu, strict=True))
        wall, cpu = (median(theirs / ours for ours, theirs in pair) for pair in pairs)
        name = f"clustermgtd of ParallelCluster {VERSION}"
        lines += [
            f"{name:<52}{median(theirs.wall):>11.2f}{median(theirs.cpu):>11.2f}",
            f"{'  ratio to Shoal, by rounds':<52}{wall:>11.1f}{cpu:>11.1f}",
        ]
    return [*lines, f"Target: a comparison of {count} machines under {TARGET_S:g} s: {met}."]
