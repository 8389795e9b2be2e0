"""A simulated cloud in a process of its own, and the service as it runs on a controller, with its clock and ledger."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.contract.renters import CASES, PUBLIC_KEY, account
from tests.unit.elastic.scene import CLUSTER

from shoal.elastic.clock import SystemClock
from shoal.elastic.fleet import Fleet
from shoal.elastic.inbox import Inbox
from shoal.elastic.ledger import Ledger
from shoal.elastic.service import Service
from shoal.elastic.source import Source
from shoal.providers.rented import renter
from shoal.simulators import cloud
from shoal.simulators.ground import Nowhere
from shoal.simulators.market import Market
from shoal.simulators.server import Simulation, serving

ROOM = 8000
"""Machines of each type in each place: nothing is ever out."""
PATIENCE = 120.0
"""A step waits so long for its calls: what is timed is a whole step, however long they take."""


@contextmanager
def running_cloud(kind: str, boot: float) -> Iterator[str]:
    """Its address. It has no machines, and calls each of them up `boot` seconds after its order."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run_cloud, args=(kind, boot, theirs), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.terminate()
        process.join()


def _run_cloud(kind: str, boot: float, pipe: Connection) -> None:
    asyncio.run(_serve_cloud(kind, boot, pipe))


async def _serve_cloud(kind: str, boot: float, pipe: Connection) -> None:
    made = cloud(kind)
    profile = replace(made.profile, boot_seconds=boot, address_seconds=min(boot, made.profile.address_seconds))
    types = [replace(one, places=dict.fromkeys(one.places, ROOM)) for one in made.types]
    async with serving(Simulation(made(Market(profile, types, Nowhere())), limited=False)) as url:
        pipe.send(url)
        await asyncio.Event().wait()


@asynccontextmanager
async def service_for(
    kind: str, url: str, nodeset: Any, slurm: Any, joiner: Any
) -> AsyncIterator[tuple[Service, Path]]:
    """A service that rents for one nodeset at one account, and the directory with its requests."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "requests").mkdir()
        with Ledger.open(directory / "ledger.db") as ledger:
            quick = account(CASES[kind], url, request_interval="0", create_interval="0", timeout="60")
            source = Source(kind, renter(replace(quick, name=kind)), CLUSTER, ledger, clock)
            fleet = Fleet(CLUSTER, {nodeset.name: nodeset}, {kind: source}, ledger, slurm, joiner, clock, PUBLIC_KEY)
            fleet.patience = PATIENCE
            service = Service(fleet, inbox=Inbox(directory / "requests"))
            try:
                yield service, directory
            finally:
                await service.close()
