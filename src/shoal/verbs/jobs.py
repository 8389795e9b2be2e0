"""`shoal jobs`: the queue and what has just ended, with progress, and why what failed has failed."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import HostError, SlurmError
from shoal.hostlist import expand
from shoal.hosts.api import Host
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
    """Every job that Slurm remembers: those that wait and run, and those that ended in the last minutes.

    With `ended`, all that have ended before as well, as far back as there are records.
    """
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        [said] = await while_it_runs(controller, ask(controller, show_command()))
        records = parse_records(said)
        failed = [record for record in records if record.failed and record.state != "CANCELLED"][-EXPLAINED:]
        running = [record for record in records if record.state == "RUNNING" and record.work_dir]
        progress = await _progress(fleet, context.controller.name, running)
        reasons = {record.id: await _reason(context, fleet, record) for record in failed}
        before = await _ended(context, controller, records) if ended else []
        failures = dict(fleet.failures)
    views = tuple(JobView(r, progress.get(r.id, {}), reasons.get(r.id)) for r in (*before, *records))
    return JobsResult(context.cluster, views, failures)


async def _ended(context: Context, controller: Host, known: list[JobRecord]) -> list[JobRecord]:
    """Jobs that slurmctld has forgotten: what its file has of them, and slurmdbd, which knows more, where there is one.

    Either may know jobs that the other does not: the file is rotated, and a database can be put back to an older one.
    """
    from shoal.jobs.history import jobcomp_command, merged, parse_jobcomp, parse_sacct, sacct_command

    found = parse_jobcomp(await ask(controller, jobcomp_command()))
    if context.spec.accounting is not None:
        with contextlib.suppress(SlurmError):
            found = merged(found, parse_sacct(await ask(controller, sacct_command())))
    told = {(record.id, record.start) for record in known}
    return [record for record in found if (record.id, record.start) not in told]


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
