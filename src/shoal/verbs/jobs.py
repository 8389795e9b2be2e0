"""`shoal jobs`: the queue and what has just ended, with progress, and why what failed has failed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import HostError
from shoal.hostlist import expand
from shoal.jobs.reason import Reason, explain_failure
from shoal.jobs.record import JobRecord, parse_records, show_command
from shoal.plan.connections import Connections
from shoal.train.contract import PROGRESS_FILE
from shoal.verbs.context import Context, keeping
from shoal.verbs.logs import files_of, read_tails
from shoal.verbs.slurmctld import while_it_runs
from shoal.verbs.status import ask

EXPLAINED = 5
"""Of so many failed jobs, the newest, the logs are read to say why."""

LATEST = 20
"""So many that slurmctld has forgotten within a day are shown unasked."""


@dataclass(frozen=True)
class JobView:
    """A job, how far it is, and why it failed."""

    record: JobRecord
    progress: Mapping[str, Any] = field(default_factory=dict)
    """What its training says of itself: step, loss, samples a second."""
    reason: Reason | None = None


@dataclass(frozen=True)
class JobsResult:
    cluster: str
    jobs: tuple[JobView, ...]
    failures: Mapping[str, HostError] = field(default_factory=dict)


async def jobs(context: Context, *, ended: bool = False) -> JobsResult:
    """Those that slurmctld knows: they wait, run or have just ended; and the newest others that ended within a day.

    With `ended`, all that have ended before as well, as far back as there are records.
    """
    from shoal.verbs.ended import ended_ever, ended_lately, without  # `shoal run` loads this file too

    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [said] = await while_it_runs(controller, ask(controller, show_command()))
        known = parse_records(said)
        before = await ended_ever(context, controller) if ended else await ended_lately(controller)
        records = [*without(before, known)[0 if ended else -LATEST :], *known]
        running = [record for record in known if record.state == "RUNNING" and record.work_dir]
        progress = await _progress(fleet, context.controller.name, running)
        failed = _to_explain(records)
        told = await asyncio.gather(*(_reason(context, fleet, record) for record in failed))
        reasons = {(record.id, record.start): reason for record, reason in zip(failed, told, strict=True)}
        failures = dict(fleet.failures)
    views = tuple(
        JobView(r, progress.get(r.id, {}) if r in running else {}, reasons.get((r.id, r.start))) for r in records
    )
    return JobsResult(context.cluster, views, failures)


def _to_explain(records: Sequence[JobRecord]) -> list[JobRecord]:
    """The newest that failed. Of a number that was given out twice, only the later job's logs are still there."""
    last = {record.id: record for record in records}
    failed = [record for record in records if record.failed and record.state != "CANCELLED"]
    return [record for record in failed if last[record.id] is record][-EXPLAINED:]


async def _reason(context: Context, fleet: Connections, record: JobRecord) -> Reason | None:
    return explain_failure(record, await read_tails(fleet, keeping(context), files_of(context, record.id, record)))


async def _progress(fleet: Connections, controller: str, running: list[JobRecord]) -> dict[str, Mapping[str, Any]]:
    """What rank 0 of each running job last wrote of itself. Which node it is on is its launcher's choice."""
    found: dict[str, Mapping[str, Any]] = {}
    # A node that is rented shares the directory with the controller, or has it fetched there.
    nodes = {
        record.id: [name for name in expand(record.nodes) if name in fleet.targets] or [controller]
        for record in running
    }

    async def one(name: str) -> None:
        host = await fleet.host(name)
        for record in (record for record in running if name in nodes[record.id]):
            result = await host.run(["cat", f"{record.work_dir}/{record.id}/{PROGRESS_FILE}"], timeout=30)
            try:
                value = json.loads(result.text) if result.status == 0 else None
            except ValueError:
                continue
            if isinstance(value, dict) and _updated(value) >= _updated(found.get(record.id, {})):
                found[record.id] = value

    await fleet.each(dict.fromkeys(name for names in nodes.values() for name in names), one)
    return found


def _updated(progress: Mapping[str, Any]) -> float:
    when = progress.get("updated", 0)
    return float(when) if isinstance(when, int | float) else 0.0
