"""One misbehaviour of one provider: a job for two nodes is run through it, and what came of it is written down.

The provider's simulator answers on a real socket, with no machines behind it; Slurm, the joiner and the clock are
those of `shoal.elastic.fake`. The nodeset rents from one place, and where that is out from any other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tests.contract.renters import CASES, Case
from tests.unit.elastic.scene import Scene, choice, rented_set, scene

from shoal.simulators.faults import Fault
from shoal.spec.rented import Budget

ENOUGH = 4.5
"""The budget admits so many machines at their price: two for the job, and two that are on their way out."""
MENDED = ("balance", "auth")
"""What somebody must act on: the job waits, and goes on when it is mended."""
WORDS = {"balance": "has no money of ours left", "auth": "does not accept our key"}
"""What the job says meanwhile."""

FAULTS: dict[str, Fault] = {
    "none": Fault("stockout", 0),
    "stockout": Fault("stockout", -1),
    "quota": Fault("quota", 1),
    "rate": Fault("rate", 4),
    "error-after-create": Fault("error-after-create", 1),
    "error-before-create": Fault("error-before-create", 1),
    "slow-boot": Fault("slow-boot", 1, seconds=200.0),
    "never-reachable": Fault("never-reachable", 1),
    "dies": Fault("dies", 1, seconds=40.0),
    "preempt": Fault("preempt", 1, seconds=40.0),
    "lagging-list": Fault("lagging-list", 2, seconds=90.0),
    "duplicate-name": Fault("duplicate-name", 1),
    "price-change": Fault("price-change", 1),
    "bad-gpu": Fault("bad-gpu", 1),
    "list-fails": Fault("list-fails", 6),
    "balance": Fault("balance", -1),
    "auth": Fault("auth", -1),
}
"""Each kind that a simulator knows, as it is played here. What is always so holds for the first place only."""


@dataclass(frozen=True)
class Cell:
    """What came of it."""

    fault: str
    provider: str
    job: str
    """COMPLETED, or why not."""
    restarts: int
    warned: int
    machines: int
    """So many the provider made."""
    stuck: int
    """Nodes that cannot be woken again when all is over."""
    orphan_seconds: float
    """How long machines were paid for after the nodes slept and one reconcile had passed."""
    doubles: int
    """Machines beyond those that the ledger accounts for, but for twins that the provider itself made."""
    over_budget: float
    """The most that was paid an hour beyond the budget."""
    said: str
    """What stood on the job while it waited."""

    @property
    def good(self) -> bool:
        right = self.job == "COMPLETED" and WORDS.get(self.fault, "") in self.said
        return right and not (self.stuck or self.orphan_seconds or self.doubles or self.over_budget > 0)


async def play(directory: Path, provider: str, name: str) -> Cell:
    """Run one cell."""
    case, fault = CASES[provider], FAULTS[name]
    price = case.offer.usd_hour or 0.0
    dearer = 2 if name == "price-change" else 1
    budget = Budget(per_hour=ENOUGH * price * dearer)
    nodeset = rented_set("burst", 8, choice(case), _anywhere(case))
    async with scene(directory, provider, sets=(nodeset,), budget=budget) as it:
        # So long that a machine which never answers is given up and replaced while Slurm still waits.
        it.slurm.resume_timeout = 3 * it.fleet.sources[provider].abilities.boot_seconds
        watch = _Watch(it, ENOUGH * price * dearer)
        await _prime(it, provider)
        it.market().faults.append(_here(fault, case))
        job = it.slurm.submit("1", 2, seconds=400.0 if name in ("dies", "preempt") else 120.0)
        await watch.until(lambda: job.state == "COMPLETED" or (job.restarts > 0 and name in MENDED))
        if name in MENDED:
            it.market().faults.clear()
            it.ledger.unblock(provider)
            await watch.until(lambda: job.state == "COMPLETED")
        await watch.until(lambda: it.slurm.settled and not it.machines(), seconds=1800)
        await watch.passes(60)
        before = len(it.machines())
        await watch.passes(600)
        bill = it.market().bill()
        twins = 1 if name == "duplicate-name" and not it.market().profile.unique_names else 0
        return Cell(
            name,
            provider,
            job.state if job.state == "COMPLETED" else job.comment or job.state,
            job.restarts,
            job.warned,
            len(bill),
            sum(it.slurm.state(node) != {"IDLE", "CLOUD", "POWERED_DOWN"} for node in it.slurm.node_by_name),
            600.0 * before if before else watch.orphaned,
            len(bill) - len({one.id for one in it.rentals() if one.id}) - twins,
            max(0.0, round(watch.over, 6)),
            "; ".join(job.comments),
        )


@dataclass
class _Watch:
    """Lets time pass and keeps an eye on the money."""

    it: Scene
    limit: float
    over: float = float("-inf")
    orphaned: float = 0.0

    async def until(self, condition: object, seconds: float = 12 * 3600.0) -> None:
        assert callable(condition)
        end = self.it.clock.now() + seconds
        while not condition() and self.it.clock.now() < end:
            await self._step()

    async def passes(self, seconds: float) -> None:
        end = self.it.clock.now() + seconds
        while self.it.clock.now() < end:
            await self._step()
            self.orphaned += 10.0 * len(self.it.machines()) if self.it.slurm.settled else 0.0

    async def _step(self) -> None:
        await self.it.step()
        self.over = max(self.over, sum(machine.usd_hour for machine in self.it.machines()) - self.limit)
        self.it.clock.advance(10.0)


async def _prime(it: Scene, provider: str) -> None:
    """The service has run for a while: it knows the provider, and its key is there."""
    await it.step()
    await it.fleet.sources[provider].key_name(it.fleet.public_key)


def _here(fault: Fault, case: Case) -> Fault:
    if fault.times != -1 or fault.kind in MENDED:
        return fault
    return Fault(fault.kind, fault.times, region=case.offer.place, seconds=fault.seconds)


def _anywhere(case: Case) -> object:
    return choice(case, region=None, zone=None)


def table(cells: list[Cell]) -> str:
    """The matrix as text: what became of the job in every cell, and what must be nothing in all of them."""
    providers = list(dict.fromkeys(cell.provider for cell in cells))
    lines = [f"{'misbehaviour':<20}" + "".join(f"{name:>14}" for name in providers)]
    for fault in dict.fromkeys(cell.fault for cell in cells):
        row = {cell.provider: _shown(cell) for cell in cells if cell.fault == fault}
        lines.append(f"{fault:<20}" + "".join(f"{row.get(name, ''):>14}" for name in providers))
    lines += [
        "",
        "done: the job finished; +2: after two more turns in the queue; 3 machines were made for its two nodes.",
        "waits: it said why until somebody acted, and finished then.",
        "",
        f"cells                                   {len(cells)}",
        f"jobs that did not finish                {sum(cell.job != 'COMPLETED' for cell in cells)}",
        f"nodes stuck                             {sum(cell.stuck for cell in cells)}",
        f"orphan seconds after one reconcile      {sum(cell.orphan_seconds for cell in cells):.0f}",
        f"machines ordered twice                  {sum(cell.doubles for cell in cells)}",
        f"budgets exceeded                        {sum(cell.over_budget > 0 for cell in cells)}",
    ]
    return "\n".join(lines) + "\n"


def _shown(cell: Cell) -> str:
    word = "waits" if cell.fault in MENDED else "done" if cell.job == "COMPLETED" else "STUCK"
    more = f"+{cell.restarts}" if cell.restarts else ""
    return f"{word}{more} {cell.machines}{'' if cell.good else ' BAD'}"
