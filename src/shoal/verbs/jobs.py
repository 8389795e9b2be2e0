"""`shoal jobs` and `shoal cancel`: the queue, with progress, what ended within a day, and why jobs failed."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.errors import CommandTimeout, HostError, SlurmError, UsageError
from shoal.hostlist import expand
from shoal.hosts.api import Host
from shoal.jobs.failure import FailureReason
from shoal.jobs.record import (
    RECENT_COMMAND,
    STEPS_COMMAND,
    JobRecord,
    lacks_jobcomp,
    parse_recent,
    parse_steps,
)
from shoal.plan.connections import Connections
from shoal.remote.log_reader import LAST_END
from shoal.verbs import logs
from shoal.verbs.context import Context, job_file_hosts
from shoal.verbs.node_files import READER_NAME, nodes_with_files, reader_command
from shoal.verbs.slurmctld import current_jobs, gather_answers, slurm_output
from shoal.verbs.unsent_files import explain_job

MAX_EXPLAINED_JOBS = 5
"""The logs of the newest failed jobs are read to explain them."""

PROGRESS_TIMEOUT_S = 30.0
MAX_RECENT_JOBS = 20
"""The newest jobs that ended within a day, and that slurmctld no longer knows, are shown by default."""


@dataclass(frozen=True)
class JobView:
    """A job, how far it is, and why it failed."""

    record: JobRecord
    progress: Mapping[str, Any] = field(default_factory=dict)
    """What its training says of itself: step, loss, samples a second."""
    reason: FailureReason | None = None
    no_step_seconds: float | None = None
    """How long none of its ranks has run, though it runs; None where they do, and for jobs that others started."""


@dataclass(frozen=True)
class JobsResult:
    cluster: str
    jobs: tuple[JobView, ...]
    failures: Mapping[str, HostError] = field(default_factory=dict)
    left_out: int = 0
    """How many others ended within a day."""


async def jobs(context: Context, numbers: Sequence[str] = (), *, ended: bool = False) -> JobsResult:
    """Those that slurmctld knows: they wait, run or have just ended; and the newest others that ended within a day.

    With `ended`, all that have ended before as well, as far back as there are records; with `numbers`, these alone.
    """
    for number in numbers:
        logs.check_job(number)
    left_out = 0
    async with await context.connections() as fleet:
        controller = await fleet.host(context.controller.name)
        if numbers:
            current_records = [record for tasks in (await _find(controller, numbers)).values() for record in tasks]
            ended_records = []
        else:
            [current_records] = await gather_answers(controller, current_jobs(controller))
            ended_records = await _ended_records(context, controller, current_records, ended)
            left_out = 0 if ended else len(ended_records[:-MAX_RECENT_JOBS])
        records = [*ended_records[left_out:], *current_records]
        if context.joined is not None:
            records = [record for record in records if not record.name.startswith(READER_NAME)]
        running_records = [record for record in current_records if record.state == "RUNNING" and record.work_dir]
        on_nodes = [record for record in running_records if nodes_with_files(context, record)]
        elsewhere = [record for record in running_records if record not in on_nodes]
        reports = await _reports(fleet, context.controller.name, elsewhere)
        answers = await asyncio.gather(*(_report_on_nodes(context, controller, record) for record in on_nodes))
        reports |= {record.id: answer for record, answer in zip(on_nodes, answers, strict=True)}
        idle = await _idle_times(controller, running_records, reports)
        failed_records = _select_failures(records)
        failure_reasons = await asyncio.gather(*(_reason(context, fleet, record) for record in failed_records))
        reasons = {
            (record.id, record.start): reason for record, reason in zip(failed_records, failure_reasons, strict=True)
        }
        failures = dict(fleet.failures)
    views = tuple(
        JobView(r, reports[r.id].progress, None, idle.get(r.id))
        if r in running_records
        else JobView(r, {}, reasons.get((r.id, r.start)))
        for r in records
    )
    return JobsResult(context.cluster, views, failures, left_out)


async def _ended_records(
    context: Context, controller: Host, current_records: Sequence[JobRecord], every: bool
) -> list[JobRecord]:
    """Jobs that slurmctld no longer knows: every one, or those that ended within a day."""
    if every:
        return logs.exclude_known(await logs.all_ended_jobs(context, controller), current_records)
    text = await slurm_output(controller, RECENT_COMMAND)
    accounted = await logs.accounted_jobs(controller) if lacks_jobcomp(text) else []
    return logs.exclude_known(parse_recent(text, accounted), current_records)


async def _find(controller: Host, numbers: Sequence[str], otherwise: str = "") -> dict[str, list[JobRecord]]:
    """The jobs of these numbers, of arrays every task. Raises UsageError for those that Slurm does not know."""
    answers = await gather_answers(controller, *(logs.find_records(controller, number) for number in numbers))
    records = dict(zip(numbers, answers, strict=True))
    unknown = [number for number, tasks in records.items() if not tasks]
    if unknown:
        hint = "`shoal jobs` lists those that Slurm knows, --all earlier ones"
        raise UsageError(f"there is no job {', '.join(unknown)}{otherwise}", hint=hint)
    return records


def _select_failures(records: Sequence[JobRecord]) -> list[JobRecord]:
    """The newest that failed. Of a number that was given out twice, only the later job's logs are still there."""
    newest = {record.id: record for record in records}
    failed = [record for record in records if record.failed and record.state != "CANCELLED"]
    return [record for record in failed if newest[record.id] is record][-MAX_EXPLAINED_JOBS:]


async def _reason(context: Context, fleet: Connections, record: JobRecord) -> FailureReason | None:
    files = logs.files_of(context, record.id, record)
    return explain_job(context, record, await logs.read(fleet, job_file_hosts(context), files, logs.TAIL_BYTES))


@dataclass(frozen=True)
class _Report:
    """What the nodes of a running job say of it."""

    progress: Mapping[str, Any] = field(default_factory=dict)
    last_end_s: float = math.inf
    """How long ago a rank last ran; infinite where none has."""

    def merge(self, other: _Report) -> _Report:
        newest = max(other.progress, self.progress, key=_update_time)
        return _Report(newest, min(self.last_end_s, other.last_end_s))


async def _reports(fleet: Connections, controller: str, records: list[JobRecord]) -> dict[str, _Report]:
    """What rank 0 of each running job last wrote of itself. Which node it is on is its launcher's choice."""
    reports = {record.id: _Report() for record in records}
    # A node that is rented shares the directory with the controller, or has it fetched there.
    nodes = {
        record.id: [name for name in expand(record.nodes) if name in fleet.targets] or [controller]
        for record in records
    }

    async def read_report(name: str) -> None:
        host = await fleet.host(name)
        for record in (record for record in records if name in nodes[record.id]):
            result = await host.run(logs.progress_command(record), timeout=30)
            reports[record.id] = reports[record.id].merge(_parse_report(result.text))

    await fleet.each(dict.fromkeys(name for names in nodes.values() for name in names), read_report)
    return reports


async def _report_on_nodes(context: Context, controller: Host, record: JobRecord) -> _Report:
    """The same for a user's job whose files are on its nodes. Only its owner may read them."""
    line = reader_command(record, nodes_with_files(context, record), logs.progress_command(record))
    try:
        result = await controller.run(line, timeout=PROGRESS_TIMEOUT_S, root=False)
    except CommandTimeout:
        return _Report()
    return _parse_report(result.text)


async def _idle_times(
    controller: Host, records: Sequence[JobRecord], reports: Mapping[str, _Report]
) -> dict[str, float]:
    """For how many seconds jobs of `shoal run` have had no step: since the last one ended, or since they started."""
    own = [record for record in records if record.note]
    if not own:
        return {}
    steps = parse_steps(await slurm_output(controller, STEPS_COMMAND), READER_NAME)
    return {
        # What ended before that belongs to an earlier turn.
        record.id: min(record.run_seconds, reports[record.id].last_end_s)
        for record in own
        if record.id not in steps
    }


def _parse_report(text: str) -> _Report:
    """The lines of one node or of several: progress, or how long ago a rank ended."""
    values = [_parse_progress(line) for line in text.splitlines()]
    ends = [end for value in values if isinstance(end := value.get(LAST_END), int | float)]
    progress = [value for value in values if LAST_END not in value]
    return _Report(max(progress, key=_update_time, default={}), min(ends, default=math.inf))


def _parse_progress(text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):  # the job's owner may write anything there
        return {}
    return value if isinstance(value, dict) else {}


def _update_time(progress: Mapping[str, Any]) -> float:
    updated = progress.get("updated", 0)
    return float(updated) if isinstance(updated, int | float) else 0.0


@dataclass(frozen=True)
class CancelResult:
    cancelled: tuple[str, ...]
    ended: tuple[str, ...] = ()
    """Jobs that had ended already."""


async def cancel(context: Context, jobs: Sequence[str]) -> CancelResult:
    """End jobs, running or waiting. Their processes get SIGTERM, and SIGKILL after Slurm's KillWait."""
    for job in jobs:
        logs.check_job(job)
    async with context.controller_host() as controller:
        records = await _find(controller, jobs, "; nothing was cancelled")
        live = [job for job, tasks in records.items() if any(record.active for record in tasks)]
        if live:
            result = await controller.run(["scancel", *live], timeout=60, root=False)
            if result.status != 0:
                raise SlurmError(f"scancel failed: {result.error_text.strip()}", hint="is it your job?")
    return CancelResult(tuple(live), tuple(job for job in jobs if job not in live))
