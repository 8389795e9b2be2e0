"""A simulated cloud in a process of its own, and the service as on a controller, with the system clock and a ledger."""

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

from tests.contract.rental_providers import CASES, PUBLIC_KEY, account
from tests.unit.cloud.scene import CLUSTER

from shoal.cloud.providers import rental_provider
from shoal.cloud.service.context import ServiceContext
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import AccountClient
from shoal.cloud.service.scheduling import SystemClock
from shoal.cloud.service.service import RentalService
from shoal.cloud.service.slurm_requests import RequestQueue
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.market import Market
from shoal_simulators.server import SimulatorApp, serve

CAPACITY = 8000
"""Machines of each type in each place: never exhausted."""
STEP_TIMEOUT_S = 120.0
"""Long enough for all calls of a step: whole steps are timed."""


@contextmanager
def running_cloud(kind: str, boot: float) -> Iterator[str]:
    """The address of a cloud without real machines: each is reported as up `boot` seconds after its order."""
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
    simulator = find_simulator(kind)
    delay = min(boot, simulator.profile.address_s)
    profile = replace(simulator.profile, boot_s=boot, address_s=delay)
    types = [replace(type, places=dict.fromkeys(type.places, CAPACITY)) for type in simulator.types]
    async with serve(SimulatorApp(simulator(Market(profile, types, NoHosts())), limited=False)) as url:
        pipe.send(url)
        await asyncio.Event().wait()


@asynccontextmanager
async def service_for(
    kind: str, url: str, nodeset: Any, slurm: Any, joiner: Any
) -> AsyncIterator[tuple[RentalService, Path]]:
    """A service that rents for one nodeset at one provider account, and the directory of its requests."""
    clock = SystemClock()
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(scratch)
        (directory / "requests").mkdir()
        with Ledger.open(directory / "ledger.db") as ledger:
            settings = account(CASES[kind], url, request_interval="0", create_interval="0", timeout="60")
            client = AccountClient(kind, rental_provider(replace(settings, name=kind)), CLUSTER, ledger, clock)
            context = ServiceContext(
                CLUSTER, {nodeset.name: nodeset}, {kind: client}, ledger, slurm, joiner, clock, PUBLIC_KEY
            )
            context.step_wait_s = STEP_TIMEOUT_S
            service = RentalService(context, requests=RequestQueue(directory / "requests"))
            try:
                yield service, directory
            finally:
                await service.close()
