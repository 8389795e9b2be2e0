"""What rented machines cost: now, today and in a month, by nodeset, user and job.

Pure but for `main`, which `shoal cost` runs on the controller. The cost of a machine is divided by time among the jobs
on it, equally where there are several; the rest is `starting` until its node takes jobs, and `idle` after that.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

from shoal.cloud.rental import Rental, cost_between, day_of, hourly_rate, known_fields, month_of, presence
from shoal.cloud.service.ledger import LEDGER, Ledger
from shoal.errors import LedgerError, ShoalError, SlurmError
from shoal.hostlist import HostlistError, expand
from shoal.jobs.record import (
    OWNERS_COMMAND,
    JobRecord,
    combine_records,
    doubtful_ids,
    parse_owners,
    parse_runs,
    show_command,
)
from shoal.slurm.state import JOBCOMP

SLURM_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class NodeUse:
    """A job on a node, from start to end."""

    job: str
    user: str
    name: str
    node: str
    start: float
    end: float


@dataclass(frozen=True)
class JobCost:
    """What the machines of a job cost while it ran."""

    id: str
    user: str
    name: str
    micros: int


@dataclass(frozen=True)
class CostReport:
    """The costs of a cluster. Amounts are millionths of a dollar."""

    at: float
    month: str
    """The month of the report: `2026-11`."""
    per_hour: int
    """The current cost per hour of all machines."""
    machines: int
    """How many exist now, or may exist."""
    today: int
    total: int
    """Of the month."""
    nodesets: Mapping[str, int] = field(default_factory=dict)
    hosts: Mapping[str, int] = field(default_factory=dict)
    """Rented hosts, by name: the controller and login hosts."""
    users: Mapping[str, int] = field(default_factory=dict)
    jobs: tuple[JobCost, ...] = ()
    """Most expensive first."""
    starting: int = 0
    """Before a node took jobs."""
    idle: int = 0
    """While a node had no jobs after that."""
    unpriced: tuple[str, ...] = ()
    """Nodes with a machine of unknown price, which is in no sum."""
    unpriced_now: int = 0
    """Of them, the machines that exist now, or may exist."""
    unpriced_today: int = 0
    """Of them, the machines that existed today."""
    unattributed: str = ""
    """Why jobs are missing: Slurm's records could not be read."""


@dataclass(frozen=True)
class TotalCost:
    """What a cluster rented from its beginning until now, in millionths of a dollar."""

    nodes: int = 0
    hosts: int = 0
    """Rented hosts: the controller and login hosts."""
    unpriced: tuple[str, ...] = ()
    """Machines of unknown price, by node or host, which are in no sum."""


def total_cost(rentals: Sequence[Rental], now: float) -> TotalCost:
    """All that the ledger has."""
    spent = Counter[bool]()
    for rental in rentals:
        spent[bool(rental.nodeset)] += cost_between(rental, 0.0, now)
    unpriced = {one.node for one in rentals if one.usd_hour is None and presence(one, 0.0, now)}
    return TotalCost(spent[True], spent[False], tuple(sorted(unpriced)))


def summary(
    rentals: Sequence[Rental], uses: Sequence[NodeUse], now: float, month: str = "", unattributed: str = ""
) -> CostReport:
    """The costs in the ledger, for the month of `now` or another one, `2026-10`."""
    begin, end = month_of(_first_of(month)) if month else month_of(now)
    until = min(now, end)
    day = day_of(now)[0]
    by_node: defaultdict[str, list[NodeUse]] = defaultdict(list)
    for use in uses:
        by_node[use.node].append(use)
    nodesets: Counter[str] = Counter()
    hosts: Counter[str] = Counter()
    shares: Counter[tuple[str, str]] = Counter()
    names: dict[tuple[str, str], str] = {}
    users: Counter[str] = Counter()
    for rental in rentals:
        spent = cost_between(rental, begin, until)
        if not rental.nodeset:  # no job is charged for a rented host
            hosts[rental.node] += spent
            continue
        nodesets[rental.nodeset] += spent
        for use, part in _divided(rental, spent, by_node[rental.node], begin, until):
            shares[use.job, use.user] += part
            names[use.job, use.user] = use.name
            users[use.user] += part if use.job else 0
    unpriced = [rental for rental in rentals if rental.usd_hour is None]
    jobs = [JobCost(job, user, names[job, user], part) for (job, user), part in shares.items() if job and part]
    return CostReport(
        at=now,
        month=f"{datetime.fromtimestamp(begin, UTC):%Y-%m}",
        per_hour=sum(hourly_rate(rental) for rental in rentals),
        machines=sum(rental.live for rental in rentals),
        today=sum(cost_between(rental, day, now) for rental in rentals),
        total=nodesets.total() + hosts.total(),
        nodesets={name: part for name, part in sorted(nodesets.items()) if part},
        hosts={name: part for name, part in sorted(hosts.items()) if part},
        users={name: part for name, part in users.most_common() if part},
        jobs=tuple(sorted(jobs, key=lambda job: (-job.micros, job.id))),
        starting=shares[_STARTING.job, _STARTING.user],
        idle=shares[_IDLE.job, _IDLE.user],
        unpriced=tuple(sorted({one.node for one in unpriced if presence(one, begin, until)})),
        unpriced_now=sum(one.live for one in unpriced),
        unpriced_today=sum(presence(one, day, now) is not None for one in unpriced),
        unattributed=unattributed,
    )


def uses_of(records: Iterable[JobRecord], now: float) -> list[NodeUse]:
    """Where and when jobs ran. Slurm's times are in the controller's time zone, so this is right only there."""
    uses: dict[tuple[str, str, str], NodeUse] = {}
    for record in records:
        start, end = _time(record.start), _time(record.end)
        if start is None or start > now or not record.nodes or record.state == "CONFIGURING":
            continue  # it has not started while its nodes are resumed
        # the end of a running job is its time limit
        last = now if record.active or end is None else min(end, now)
        with contextlib.suppress(HostlistError):
            for node in expand(record.nodes):
                uses[record.id, record.start, node] = NodeUse(record.id, record.user, record.name, node, start, last)
    return list(uses.values())


def encode(costs: CostReport) -> str:
    """The report as JSON."""
    return json.dumps(asdict(costs))


def decode(text: str) -> CostReport:
    """The report from JSON. Raises ValueError."""
    data = json.loads(text)
    if not isinstance(data, dict) or "per_hour" not in data:
        raise ValueError("this is not a cost report")
    jobs = tuple(JobCost(**known_fields(JobCost, job)) for job in data.get("jobs", ()))
    unpriced = tuple(data.get("unpriced", ()))
    return CostReport(**{**known_fields(CostReport, data), "jobs": jobs, "unpriced": unpriced})


_STARTING = NodeUse("", "starting", "", "", 0.0, 0.0)
_IDLE = NodeUse("", "idle", "", "", 0.0, 0.0)


def _divided(
    rental: Rental, spent: int, uses: Sequence[NodeUse], begin: float, until: float
) -> list[tuple[NodeUse, int]]:
    """The cost of a machine in a period, divided among its users. The parts add up to the whole."""
    there = presence(rental, begin, until)
    if not spent or there is None:
        return [(_STARTING, spent)] if spent else []
    first, last = there
    joined = last if rental.joined_at is None else min(max(rental.joined_at, first), last)
    cuts = sorted({first, joined, last, *(min(max(t, first), last) for use in uses for t in (use.start, use.end))})
    weights: list[tuple[NodeUse, float]] = []
    for left, right in pairwise(cuts):
        users = [use for use in uses if use.start <= left and use.end >= right]
        owners = users or [_STARTING if right <= joined else _IDLE]
        weights += [(owner, (right - left) / len(owners)) for owner in owners]
    return _parts(spent, weights or [(_STARTING, 1.0)])


def _parts(whole: int, weights: Sequence[tuple[NodeUse, float]]) -> list[tuple[NodeUse, int]]:
    """Divide a whole number by weights; the sum is exact."""
    total = sum(weight for _, weight in weights)
    parts: list[tuple[NodeUse, int]] = []
    given, reached = 0, 0.0
    for owner, weight in weights:
        reached += weight
        share = round(whole * reached / total) - given if total else 0
        parts.append((owner, share))
        given += share
    owner, share = parts[-1]
    parts[-1] = (owner, share + whole - given)
    return parts


def _first_of(month: str) -> float:
    return datetime.strptime(month, "%Y-%m").replace(tzinfo=UTC).timestamp()


def _time(text: str) -> float | None:
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print the costs as JSON. Runs on the controller as root."""
    parser = argparse.ArgumentParser(prog="shoal.cloud.service.costs")
    parser.add_argument("--month", default="")
    parser.add_argument("--total", action="store_true", help="of all months together")
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    chosen = parser.parse_args(argv)
    try:
        if chosen.total:
            with Ledger.read(chosen.ledger) as ledger:
                print(json.dumps(asdict(total_cost(ledger.all(), time.time()))))
            return 0
        [costs] = collect_costs((chosen.month,), time.time(), chosen.ledger)
    except LedgerError as error:
        print(json.dumps({"error": error.message, "fix": error.hint}))
        return 1
    print(encode(costs))
    return 0


def collect_costs(months: Sequence[str], now: float, path: Path = LEDGER) -> list[CostReport]:
    """The costs of months, "" for that of `now`, from the ledger and Slurm's records. Raises LedgerError."""
    begins = [month_of(_first_of(month) if month else now)[0] for month in months]
    with Ledger.read(path) as ledger:
        rentals = ledger.all(min(*begins, day_of(now)[0]))
    uses: list[NodeUse] = []
    why = ""
    if rentals:
        try:
            uses = uses_of((*_ended_jobs(), *_current_jobs()), now)
        except (ShoalError, OSError, subprocess.SubprocessError) as error:
            why = str(error)
    return [summary(rentals, uses, now, month, why) for month in months]


def _ended_jobs() -> list[JobRecord]:
    """Every ended run of every job, from slurmctld's file: a requeued job has several."""
    paths = [path for path in (Path(f"{JOBCOMP}.1"), Path(JOBCOMP)) if path.exists()]
    return [run for path in paths for run in parse_runs(path.read_text(encoding="utf-8", errors="replace"))]


def _current_jobs() -> list[JobRecord]:
    """The jobs that slurmctld still has in memory."""
    text, owners = _ask(show_command()), parse_owners(_ask(OWNERS_COMMAND))
    return combine_records(text, owners, {job: _ask(show_command(job)) for job in doubtful_ids(text, owners)})


def _ask(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=SLURM_TIMEOUT_S, check=False)
    if done.returncode != 0:
        raise SlurmError(f"slurmctld does not answer: {done.stderr.strip()}")
    return done.stdout


if __name__ == "__main__":
    sys.exit(main())
