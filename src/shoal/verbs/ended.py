"""Jobs that slurmctld has forgotten, as it does minutes after their end: from the file where it notes each of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

from shoal.errors import SlurmError
from shoal.hosts.api import Host
from shoal.jobs.history import (
    jobcomp_command,
    may_go_on,
    merged,
    parse_jobcomp,
    parse_recent,
    parse_sacct,
    recent_command,
    sacct_command,
)
from shoal.jobs.record import JobRecord
from shoal.verbs.context import Context
from shoal.verbs.status import ask


async def ended_lately(controller: Host) -> list[JobRecord]:
    """Those that ended within a day, oldest first."""
    return parse_recent(await ask(controller, recent_command()))


async def ended_ever(context: Context, controller: Host) -> list[JobRecord]:
    """As far back as there are records: what the file has, and slurmdbd, which knows more, where there is one.

    Either may know jobs that the other does not: the file is rotated, and a database can be put back to an older one.
    """
    found = [record for record in parse_jobcomp(await ask(controller, jobcomp_command())) if not record.active]
    if context.spec.accounting is not None:
        with contextlib.suppress(SlurmError):
            found = merged(found, parse_sacct(await ask(controller, sacct_command())))
    return found


async def ended_job(controller: Host, job: str) -> list[JobRecord]:
    """One job, or the members of an array, as they last ended."""
    found = parse_jobcomp(await ask(controller, jobcomp_command()))
    last = {record.id: record for record in found if job in (record.id, record.id.partition("_")[0])}
    return [record for record in last.values() if not record.active]


def without(ended: Iterable[JobRecord], known: Iterable[JobRecord]) -> list[JobRecord]:
    """Those that slurmctld does not tell of by itself. Of one that never started the two give another start."""
    known = list(known)
    told = {(record.id, when) for record in known for when in (record.start, record.end)}
    again = {record.id for record in known if record.restarts}
    return [
        record
        for record in ended
        if not {(record.id, record.start), (record.id, record.end)} & told
        and not (record.id in again and may_go_on(record))
    ]
