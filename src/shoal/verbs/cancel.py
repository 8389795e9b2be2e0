"""`shoal cancel`: end a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shoal.errors import SlurmError, UsageError
from shoal.verbs.context import Context
from shoal.verbs.logs import check_job, find_records
from shoal.verbs.slurmctld import while_it_runs


@dataclass(frozen=True)
class CancelResult:
    cancelled: tuple[str, ...]
    ended: tuple[str, ...] = ()
    """Jobs that had ended already."""


async def cancel(context: Context, jobs: Sequence[str]) -> CancelResult:
    """End jobs, running or waiting. Their processes get SIGTERM, and SIGKILL after Slurm's KillWait."""
    for job in jobs:
        check_job(job)
    async with await context.connections([context.controller]) as fleet:
        controller = await fleet.host(context.controller.name)
        found = await while_it_runs(controller, *(find_records(controller, job) for job in jobs))
        records = dict(zip(jobs, found, strict=True))
        unknown = [job for job, known in records.items() if not known]
        if unknown:
            raise UsageError(
                f"there is no job {', '.join(unknown)}; nothing was cancelled",
                hint="`shoal jobs` lists those that Slurm knows",
            )
        live = [job for job, known in records.items() if any(record.active for record in known)]
        if live:
            result = await controller.run(["scancel", *live], timeout=60, root=False)
            if result.status != 0:
                raise SlurmError(f"scancel refused: {result.error_text.strip()}", hint="is it your job?")
    return CancelResult(tuple(live), tuple(job for job in jobs if job not in live))
