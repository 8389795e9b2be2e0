"""What rented machines cost: now, today and in a month, by nodeset, user and job, and what nobody used.

Pure, but for `main`, which `shoal cost` runs on the controller, where the ledger and Slurm's records are. All money is
whole millionths of a dollar. What a machine cost is divided by time: among the jobs on it, in equal parts where there
are several, and what is left is `starting` until its node takes jobs, and `idle` after that. So everything adds up.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

from shoal.elastic.bill import between, day_of, month_of, presence, rate
from shoal.elastic.ledger import LEDGER, Ledger
from shoal.elastic.rentals import Rental
from shoal.errors import LedgerError, ShoalError, SlurmError
from shoal.hostlist import HostlistError, expand
from shoal.jobs.history import parse_runs
from shoal.jobs.record import JobRecord, parse_records, show_command
from shoal.slurm.accounting import JOBCOMP

PATIENCE = 60.0
"""Seconds for slurmctld to answer."""


@dataclass(frozen=True)
class Use:
    """A job on a node, for a while."""

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
class Costs:
    """The money of a cluster. Amounts are millionths of a dollar."""

    at: float
    month: str
    """The month that is told: `2026-11`."""
    per_hour: int
    """What all machines together cost an hour now."""
    machines: int
    """How many there are now, or may be."""
    today: int
    total: int
    """Of the month."""
    nodesets: Mapping[str, int] = field(default_factory=dict)
    users: Mapping[str, int] = field(default_factory=dict)
    jobs: tuple[JobCost, ...] = ()
    """Dearest first."""
    starting: int = 0
    """For time before a node took jobs."""
    idle: int = 0
    """For time after that in which it had none."""
    unpriced: tuple[str, ...] = ()
    """Nodes that had a machine of which nobody knows the price: it is in no sum."""
    unattributed: str = ""
    """Why jobs are not told, where Slurm's records could not be read."""


def summary(
    rentals: Sequence[Rental], uses: Sequence[Use], now: float, month: str = "", unattributed: str = ""
) -> Costs:
    """What the ledger says in money, for the month of `now` or another one, `2026-10`."""
    begin, end = month_of(_first_of(month)) if month else month_of(now)
    until = min(now, end)
    day = day_of(now)[0]
    by_node: dict[str, list[Use]] = {}
    for use in uses:
        by_node.setdefault(use.node, []).append(use)
    nodesets: Counter[str] = Counter()
    shares: Counter[tuple[str, str]] = Counter()
    told: dict[tuple[str, str], Use] = {}
    for rental in rentals:
        spent = between(rental, begin, until)
        nodesets[rental.nodeset] += spent
        for use, part in _divided(rental, spent, by_node.get(rental.node, ()), begin, until):
            key = (use.job, use.user)
            shares[key] += part
            told[key] = use
    users: Counter[str] = Counter()
    for (job, user), part in shares.items():
        if job:
            users[user] += part
    jobs = [JobCost(job, user, told[job, user].name, part) for (job, user), part in shares.items() if job and part]
    return Costs(
        at=now,
        month=f"{datetime.fromtimestamp(begin, UTC):%Y-%m}",
        per_hour=sum(rate(rental) for rental in rentals),
        machines=sum(rental.live for rental in rentals),
        today=sum(between(rental, day, now) for rental in rentals),
        total=nodesets.total(),
        nodesets={name: part for name, part in sorted(nodesets.items()) if part},
        users={name: part for name, part in users.most_common() if part},
        jobs=tuple(sorted(jobs, key=lambda job: (-job.micros, job.id))),
        starting=shares[_STARTING.job, _STARTING.user],
        idle=shares[_IDLE.job, _IDLE.user],
        unpriced=tuple(sorted({one.node for one in rentals if one.usd_hour is None and presence(one, begin, until)})),
        unattributed=unattributed,
    )


def uses_of(records: Iterable[JobRecord], now: float) -> list[Use]:
    """Where and when jobs ran. Slurm tells times in the controller's own zone, so this is right only there."""
    found: dict[tuple[str, str, str], Use] = {}
    for record in records:
        start, end = _time(record.start), _time(record.end)
        if start is None or start > now or not record.nodes or record.state == "CONFIGURING":
            continue  # while its nodes start it has not begun
        # One that runs tells when it must end at the latest.
        last = now if record.active or end is None else min(end, now)
        try:
            nodes = expand(record.nodes)
        except HostlistError:
            continue
        for node in nodes:
            found[record.id, record.start, node] = Use(record.id, record.user, record.name, node, start, last)
    return list(found.values())


def encode(costs: Costs) -> str:
    """The wire form, from the controller to whoever asks."""
    return json.dumps(asdict(costs))


def decode(text: str) -> Costs:
    """The same back; what a later Shoal added is left out. ValueError where it is none."""
    told = json.loads(text)
    if not isinstance(told, dict) or "per_hour" not in told:
        raise ValueError("this is not an account of costs")
    known: dict[str, Any] = {name: value for name, value in told.items() if name in Costs.__dataclass_fields__}
    names = JobCost.__dataclass_fields__
    jobs = [{name: value for name, value in job.items() if name in names} for job in known.get("jobs", ())]
    unpriced = tuple(known.get("unpriced", ()))
    return Costs(**{**known, "jobs": tuple(JobCost(**job) for job in jobs), "unpriced": unpriced})


_STARTING = Use("", "starting", "", "", 0.0, 0.0)
_IDLE = Use("", "idle", "", "", 0.0, 0.0)


def _divided(rental: Rental, spent: int, uses: Sequence[Use], begin: float, until: float) -> list[tuple[Use, int]]:
    """What a machine cost in a period, divided among those who had it. The parts add up to the whole."""
    there = presence(rental, begin, until)
    if not spent or there is None:
        return [(_STARTING, spent)] if spent else []
    first, last = there
    joined = last if rental.joined_at is None else min(max(rental.joined_at, first), last)
    cuts = sorted({first, joined, last, *(min(max(t, first), last) for use in uses for t in (use.start, use.end))})
    weights: list[tuple[Use, float]] = []
    for left, right in pairwise(cuts):
        users = [use for use in uses if use.start <= left and use.end >= right]
        owners = users or [_STARTING if right <= joined else _IDLE]
        weights += [(owner, (right - left) / len(owners)) for owner in owners]
    return _parts(spent, weights or [(_STARTING, 1.0)])


def _parts(whole: int, weights: Sequence[tuple[Use, float]]) -> list[tuple[Use, int]]:
    """A whole number in parts like the weights; the sum stays the same to the last millionth."""
    total = sum(weight for _, weight in weights)
    parts: list[tuple[Use, int]] = []
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
    """Print the costs as JSON; on the controller, as root."""
    parser = argparse.ArgumentParser(prog="shoal.elastic.costs")
    parser.add_argument("--month", default="")
    parser.add_argument("--ledger", type=Path, default=LEDGER)
    chosen = parser.parse_args(argv)
    now = time.time()
    begin = month_of(_first_of(chosen.month) if chosen.month else now)[0]
    try:
        with Ledger.read(chosen.ledger) as ledger:
            rentals = ledger.all(min(begin, day_of(now)[0]))
    except LedgerError as error:
        print(json.dumps({"error": error.message, "fix": error.hint}))
        return 1
    uses: list[Use] = []
    why = ""
    if rentals:
        try:
            uses = uses_of((*_ended(), *_known()), now)
        except (ShoalError, OSError, subprocess.SubprocessError) as error:
            why = str(error)
    print(encode(summary(rentals, uses, now, chosen.month, why)))
    return 0


def _ended() -> list[JobRecord]:
    """Every run of every job that has ended, as slurmctld's file has it: a job that was queued again has several."""
    found: list[JobRecord] = []
    for path in (Path(f"{JOBCOMP}.1"), Path(JOBCOMP)):
        if path.exists():
            found += parse_runs(path.read_text(encoding="utf-8", errors="replace"))
    return found


def _known() -> list[JobRecord]:
    """The jobs that slurmctld has in its memory."""
    done = subprocess.run(show_command(), capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode != 0:
        raise SlurmError(f"slurmctld does not answer: {done.stderr.strip()}")
    return parse_records(done.stdout)


if __name__ == "__main__":
    sys.exit(main())
