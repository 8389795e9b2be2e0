"""A cluster with a simulated cloud, a fake Slurm and a fake clock: hours pass in a moment."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from tests.contract.rental_providers import CASES, PUBLIC_KEY, Case, account

from shoal.cloud.providers import rental_provider
from shoal.cloud.providers.api import Offer, RentedInstance
from shoal.cloud.rental import Rental
from shoal.cloud.service.context import UNFIT_PREFIX, ServiceContext
from shoal.cloud.service.ledger import Ledger
from shoal.cloud.service.provider_account import AccountClient
from shoal.cloud.service.service import RentalService
from shoal.remote import rental_blocks
from shoal.spec.rental import Budget, OfferChoice, RentedSet
from shoal_simulators import find_simulator
from shoal_simulators.backend import NoHosts
from shoal_simulators.fake_slurm import FakeClock, FakeJob, FakeJoiner, FakeSlurm
from shoal_simulators.instances import Fault
from shoal_simulators.market import Market
from shoal_simulators.server import SimulatorApp, serve

CLUSTER = "reef"
NO_PAUSE = {"request_interval": "0", "create_interval": "0"}
"""A provider's client waits in real time; here only the service limits its rate, by the scene's clock."""

STEP_TIMEOUT_S = 120.0


def choice(case: Case, **more: Any) -> OfferChoice:
    """A line of a nodeset with an offer that a provider has in stock."""
    offer = case.offer
    known = {"provider": case.kind, "type": offer.type, "region": offer.region, "market": offer.market}
    return OfferChoice(**{**known, **({"zone": offer.zone} if offer.zone else {}), **more})


def rented_set(name: str = "burst", most: int = 8, *offers: OfferChoice, **more: Any) -> RentedSet:
    made = RentedSet(
        name=name,
        offers=offers,
        prefer="listed",
        max=most,
        idle=600,
        lifetime=86400,
        max_price=None,
        budget=None,
        cpus=None,
        memory_mb=None,
        gpus=None,
        disk_gb=100,
        features=(),
        weight=1,
        site="",
    )
    return replace(made, **more)


@dataclass
class Scene:
    """All of it, and how to let time pass."""

    clock: FakeClock
    slurm: FakeSlurm
    joiner: FakeJoiner
    simulations: Mapping[str, SimulatorApp]
    context: ServiceContext
    service: RentalService
    restart: Callable[[], RentalService]
    """A new service over the same ledger, as after a kill."""

    @property
    def ledger(self) -> Ledger:
        return self.context.ledger

    def market(self, kind: str = "") -> Market:
        return self.simulations[kind or next(iter(self.simulations))].market

    def fault(self, kind: str, times: int = 1, *, at: str = "", **more: Any) -> None:
        self.market(at).faults.append(Fault(kind, times, **more))

    def machines(self, kind: str = "") -> list[Any]:
        """The machines that are paid for now."""
        self.market(kind).update()
        return [machine for machine in self.market(kind).instances.values() if machine.live]

    def unblock(self) -> None:
        """What `shoal up` does on the controller."""
        assert rental_blocks.main(["rental_blocks", str(self.ledger.path), "remove"]) == 0

    async def step(self) -> None:
        """Slurm does what is due, then the service."""
        self.slurm.tick()
        requests, self.slurm.requests[:] = list(self.slurm.requests), []
        await self.service.step(requests)
        await asyncio.sleep(0)
        self.slurm.tick()

    async def until(self, condition: Callable[[], bool], seconds: float = 7200.0, every: float = 10.0) -> None:
        """Let time pass until something is so."""
        end = self.clock.now() + seconds
        while not condition():
            assert self.clock.now() < end, f"not within {seconds} s: {self.told()}"
            await self.step()
            self.clock.advance(every)

    async def passes(self, seconds: float, every: float = 10.0) -> None:
        """Let so much time pass."""
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            await self.step()
            self.clock.advance(every)

    async def passes_alone(self, steps: int, every: float) -> None:
        """Let time pass for the service alone: Slurm does nothing."""
        for _ in range(steps):
            await self.service.step()
            self.clock.advance(every)

    async def runs(self, *jobs: str) -> None:
        """Until these jobs run, and one step more."""
        await self.until(lambda: all(self.slurm.job_by_id[job].state == "RUNNING" for job in jobs))
        await self.step()

    async def run_job(self, nodes: int = 1, **options: Any) -> FakeJob:
        """A job `1` that runs."""
        job = self.slurm.submit("1", nodes, **options)
        await self.runs("1")
        return job

    async def settled(self, *completed: FakeJob) -> None:
        """All jobs are done, all nodes asleep, all machines gone and struck off."""
        await self.until(lambda: self.slurm.settled and not self.ledger.live(), seconds=6 * 3600)
        assert self.machines() == []
        assert {one["ended"] is not None for one in self.market().bill()} <= {True}
        assert {job.state for job in completed} <= {"COMPLETED"}

    def told(self) -> str:
        jobs = [(job.id, job.state, job.nodes, job.comment) for job in self.slurm.job_by_id.values()]
        nodes = [(name, sorted(self.slurm.state(name)), node.reason) for name, node in self.slurm.node_by_name.items()]
        rentals = [(one.node, one.state, one.account, one.reason) for one in self.ledger.all()]
        return f"{jobs}\n{nodes}\n{rentals}"

    def rentals(self, state: str = "") -> list[Rental]:
        return [one for one in self.ledger.all() if state in ("", one.state)]

    def judge(self, machine: RentedInstance) -> str:
        """What a joiner finds: the machine as the simulated cloud made it."""
        for simulation in self.simulations.values():
            if made := simulation.market.instances.get(machine.id):
                if not made.reachable:
                    return f"{machine.host} does not answer"
                return "" if made.gpu_works else f"{UNFIT_PREFIX}CUDA error 802: system not yet initialized"
        return f"there is no {machine.id}"


@asynccontextmanager
async def scene(
    tmp_path: Path,
    *kinds: str,
    sets: tuple[RentedSet, ...] = (),
    budget: Budget | None = None,
    step_wait_s: float = STEP_TIMEOUT_S,
) -> AsyncIterator[Scene]:
    """A cluster that rents from simulated clouds of these kinds; by default eight nodes of an offer in stock.

    The clock stands still during a step, and a step waits for every call: a busy machine causes no timeout.
    """
    clock = FakeClock()
    sets = sets or (rented_set("burst", 8, *(choice(CASES[kind]) for kind in kinds)),)
    nodes = [node for nodeset in sets for node in nodeset.nodes]
    slurm = FakeSlurm(clock, nodes)
    slurm.idle_s = 60.0
    joiner = FakeJoiner(slurm)
    ledger = Ledger.open(tmp_path / "ledger.db")
    simulations: dict[str, SimulatorApp] = {}
    urls: dict[str, str] = {}
    async with AsyncExitStack() as stack:
        for kind in kinds:
            made = find_simulator(kind)
            market = Market(made.profile, made.types, NoHosts(), clock=clock.now)
            simulations[kind] = SimulatorApp(made(market), limited=False)
            urls[kind] = await stack.enter_async_context(serve(simulations[kind]))
        stack.callback(ledger.close)

        def service() -> RentalService:
            accounts = {
                kind: AccountClient(
                    kind,
                    rental_provider(replace(account(CASES[kind], urls[kind], **NO_PAUSE), name=kind)),
                    CLUSTER,
                    ledger,
                    clock,
                )
                for kind in kinds
            }
            context = ServiceContext(
                CLUSTER,
                {nodeset.name: nodeset for nodeset in sets},
                accounts,
                ledger,
                slurm,
                joiner,
                clock,
                PUBLIC_KEY,
                budget,
                step_wait_s=step_wait_s,
            )
            made = RentalService(context)
            stack.push_async_callback(made.close)
            return made

        first = service()
        made_scene = Scene(clock, slurm, joiner, simulations, first.context, first, service)
        joiner.judge = made_scene.judge
        yield made_scene


def with_scene(*kinds: str, **options: Any) -> pytest.MarkDecorator:
    """The scene that a test's fixture `it` is; see `scene`."""
    return pytest.mark.parametrize("it", [(kinds, options)], indirect=True, ids=["-".join(kinds)])


__all__ = ["CASES", "Offer", "Scene", "choice", "rented_set", "scene", "with_scene"]
