"""One fault of one provider: two jobs run while it happens, and the outcome is recorded.

The provider's simulator answers on a real socket, with no machines behind it; Slurm, the joiner and the clock are
those of `shoal_simulators.fake_slurm`. The nodeset rents from one place, and from others where that has no machines.
Each job needs two nodes, and the budget allows those of one job: the other job must wait for it.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from tests.contract.rental_providers import CASES, Case
from tests.matrix.elastic_watch import EVERY, Watch
from tests.unit.cloud.scene import Scene, choice, rented_set, scene

from shoal.spec.rental import Budget, OfferChoice
from shoal_simulators.fake_slurm import FakeJob
from shoal_simulators.instances import Fault

ENOUGH = 2.0
"""The budget admits so many machines at their price, and one that costs twice as much where prices change."""
MENDED = ("balance", "auth")
"""What somebody must act on: jobs wait, and go on when it is solved."""
LONG = 12 * 3600.0
"""Both jobs are done within so many seconds; the longest that is waited for is the hour of a quota."""

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
    "lagging-list": Fault("lagging-list", 2),
    "late-address": Fault("late-address", 2, seconds=150.0),
    "other-host-key": Fault("other-host-key", 1),
    "duplicate-name": Fault("duplicate-name", 1),
    "price-change": Fault("price-change", 1),
    "bad-gpu": Fault("bad-gpu", 1),
    "list-fails": Fault("list-fails", 6),
    "balance": Fault("balance", -1),
    "auth": Fault("auth", -1),
}
"""Each kind that a simulator knows, as it is played here. What is always so holds for the first place only."""

PATTERNS: dict[str, tuple[str, str]] = {
    "none": ("", ""),
    "stockout": ("job", r"{provider} \S.* out of {type}( spot)?, trying {provider} "),
    "quota": ("job", r"{provider}.* has no more.*: our quota is used up"),
    "rate": ("", ""),
    "error-after-create": ("", ""),
    "error-before-create": ("ledger", r"no machine of this order was listed within 120 s"),
    "slow-boot": ("", ""),
    "never-reachable": ("ledger", r"\S+ of {provider} is not a node after \d+ s: \S+ does not answer"),
    "dies": ("node", r"shoal: \S+ of {provider} is (?i:unhealthy|failed|terminated|error|off|stopped|exited|offline) "),
    "preempt": ("node", r"shoal: ({provider} takes \S+ away|\S+ of {provider} is gone) "),
    "lagging-list": ("", ""),
    "late-address": ("", ""),
    "other-host-key": ("", ""),
    "duplicate-name": ("", ""),
    "price-change": ("", ""),
    "bad-gpu": ("ledger", r"\S+ of {provider}: CUDA error 802: system not yet initialized"),
    "list-fails": ("", ""),
    "balance": ("job", r"{provider} has no money left of ours \(top it up; it is tried again every hour\)"),
    "auth": ("job", r"{provider} does not accept our key \(replace it, then run `shoal up`\)"),
}
"""The reason that must be read, and where: on the first job, on a node, or in the ledger. None where nobody waits."""
ALWAYS = r"trying |rented from |(a machine was|2 machines were) rejected \(|"
ALWAYS += r"the budget of \$[0-9.]+ an hour: \$[0-9.]+ is in use, and |burst\d+: "
"""How all else begins that a job may say: each other word is a wrong reason."""


@dataclass(frozen=True)
class Cell:
    """What came of it."""

    fault: str
    provider: str
    restarts: tuple[int, ...]
    machines: int
    """So many the provider made for the four nodes."""
    stuck: int
    """Nodes that cannot be woken again when all is over."""
    orphan_seconds: float
    longest_orphan: float
    doubles: int
    over_budget: float
    problems: tuple[str, ...]
    """What is not as it should be; empty for a good cell."""

    @property
    def good(self) -> bool:
        return not self.problems


async def play(directory: Path, provider: str, name: str) -> Cell:
    """Run one cell."""
    case = CASES[provider]
    price = case.offer.usd_hour or 0.0
    limit = price * (ENOUGH + (name == "price-change"))
    sets = (rented_set("burst", 8, choice(case), _anywhere(case)),)
    async with scene(directory, provider, sets=sets, budget=Budget(per_hour=limit)) as it:
        # So long that a machine which never answers is given up and replaced while Slurm still waits.
        it.slurm.resume_timeout = 3 * it.context.accounts[provider].abilities.boot_s
        watch = Watch(it, limit, provider)
        await _prime(it, provider)
        fault = _fit(FAULTS[name], it, case)
        it.market().faults.append(fault)
        seconds = 400.0 if name in ("dies", "preempt") else 120.0
        jobs = [it.slurm.submit(job, 2, seconds=seconds) for job in ("1", "2")]
        if name in MENDED:
            await watch.until(lambda: all(job.restarts for job in jobs), LONG)
            it.market().faults[:] = [Fault(fault.kind, 0)]
            if name == "auth":  # the new key comes with `shoal up`, money by itself
                it.unblock()
        await watch.until(lambda: all(job.state == "COMPLETED" for job in jobs), LONG)
        # A node for which there was nothing may stay down for an hour, and is no longer so then.
        await watch.until(lambda: it.slurm.settled, 7200)
        await watch.passes(600)
        return _judge(it, watch, name, fault, jobs)


def _judge(it: Scene, watch: Watch, name: str, fault: Fault, jobs: list[FakeJob]) -> Cell:
    stuck = sum(it.slurm.state(node) != {"IDLE", "CLOUD", "POWERED_DOWN"} for node in it.slurm.node_by_name)
    where, pattern = PATTERNS[name]
    pattern = pattern.format(provider=watch.provider, type=re.escape(CASES[watch.provider].offer.type))
    texts = {
        "job": jobs[0].comments,
        "node": [text for node in it.slurm.node_by_name.values() for text in node.reasons],
        "ledger": [rental.reason for rental in it.rentals()],
        "": [""],
    }
    comments = [text for job in jobs for text in job.comments]
    others = [text for text in comments if not re.match(f"{ALWAYS}|{pattern or ALWAYS}", text)]
    struck = fault.times < 1 or it.market().faults[0].times < fault.times
    problems = {
        f"{sum(job.state != 'COMPLETED' for job in jobs)} jobs did not finish": any(
            job.state != "COMPLETED" for job in jobs
        ),
        "the misbehaviour did not happen": not struck,
        f"no {where} says {pattern!r}": not any(re.match(pattern, text) for text in texts[where]),
        f"a job says {others}": bool(others),
        "no job was refused by the budget": not any("the budget of" in text for text in comments),
        f"{stuck} nodes are stuck": bool(stuck),
        f"{watch.orphan_seconds:.0f} s of machines without a node": bool(watch.orphan_seconds),
        f"{len(watch.doubles)} machines were ordered twice": bool(watch.doubles),
        f"${watch.over:.2f} an hour beyond the budget": watch.over > 0,
        f"{len(it.machines())} machines are left": bool(it.machines()),
    }
    return Cell(
        name,
        watch.provider,
        tuple(job.restarts for job in jobs),
        len(it.market().bill()),
        stuck,
        watch.orphan_seconds,
        watch.longest,
        len(watch.doubles),
        watch.over,
        tuple(text for text, so in problems.items() if so),
    )


async def _prime(it: Scene, provider: str) -> None:
    """The service has run for a while: it knows the provider, and its key is there."""
    await it.step()
    await it.context.accounts[provider].key_name(it.context.public_key)


def _fit(fault: Fault, it: Scene, case: Case) -> Fault:
    """The misbehaviour as it fits the provider: lists lag as long as it is known to let them, places have its names."""
    if fault.kind == "lagging-list":
        grace = it.context.accounts[case.kind].abilities.grace_s
        return Fault(fault.kind, fault.times, seconds=grace - 10.0)
    if fault.times != -1 or fault.kind in MENDED:
        return fault
    places = it.market().types[case.offer.type].places
    return Fault(fault.kind, fault.times, region=next(place for place in places if case.offer.place in place))


def _anywhere(case: Case) -> OfferChoice:
    return choice(case, region=None, zone=None)


def table(cells: list[Cell]) -> str:
    """The matrix as text: what became of the jobs in every cell, and what must be nothing in all of them."""
    providers = list(dict.fromkeys(cell.provider for cell in cells))
    lines = [f"{'misbehaviour':<20}" + "".join(f"{name:>14}" for name in providers)]
    for fault in dict.fromkeys(cell.fault for cell in cells):
        row = {cell.provider: _shown(cell) for cell in cells if cell.fault == fault}
        lines.append(f"{fault:<20}" + "".join(f"{row.get(name, ''):>14}" for name in providers))
    longest = max(cell.longest_orphan for cell in cells)
    lines += [
        "",
        "done: both jobs finished; +2: the first after two more turns in the queue; 3: so many machines were made for",
        "the four nodes (two, where the second job found those of the first still there). waits: both said why until",
        "somebody acted, and finished then. The budget has room for two machines (one at twice its price, where",
        "prices change): in every cell it kept a job waiting, which said so. Each reason is the one in the table of",
        "tests/matrix/elastic_faults.py, and no job gives another.",
        "",
        f"cells                                                    {len(cells)}",
        f"cells with a job unfinished or without the right reason  {_count(cells, 'jobs did|says|refused')}",
        f"nodes stuck                                              {sum(cell.stuck for cell in cells)}",
        f"instance-seconds without a node after one reconcile      {sum(cell.orphan_seconds for cell in cells):.0f}",
        f"  the longest that any machine was without a node        under {longest + EVERY:.0f} s",
        f"machines ordered twice                                   {sum(cell.doubles for cell in cells)}",
        f"budgets exceeded                                         {sum(cell.over_budget > 0 for cell in cells)}",
    ]
    lines += [f"{cell.fault} {cell.provider}: {'; '.join(cell.problems)}" for cell in cells if not cell.good]
    return "\n".join(lines) + "\n"


def _count(cells: list[Cell], problem: str) -> int:
    return sum(any(re.search(problem, text) for text in cell.problems) for cell in cells)


def _shown(cell: Cell) -> str:
    more = f"+{cell.restarts[0]}" if cell.restarts[0] else ""
    return f"{'waits' if cell.fault in MENDED else 'done'}{more} {cell.machines}{'' if cell.good else ' BAD'}"
