"""Jobs that have ended, from where Slurm keeps them: the file that slurmctld always writes, or slurmdbd. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime

from shoal.jobs.record import JobRecord, split_records
from shoal.slurm.accounting import JOBCOMP

NEWEST = 1000
"""So many ended jobs are told at most."""

_FIELD = "\x1f"
SACCT_FIELDS = (
    *("JobID", "State", "User", "Partition", "NodeList", "NNodes", "ExitCode", "Start", "End", "Elapsed"),
    *("Timelimit", "WorkDir", "JobName"),
)
"""The name, which its owner chose, comes last."""

_NAME = re.compile(r"(?:^|\s)Name=(.*?)\sJobState=", re.DOTALL)
_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z]*)=(\S*)")


def jobcomp_command() -> tuple[str, ...]:
    """The newest lines of the file, of the one before it as well while that is not compressed."""
    return ("sh", "-c", f"cat {JOBCOMP}.1 {JOBCOMP} 2>/dev/null | tail -n {NEWEST}")


def recent_command() -> tuple[str, ...]:
    """The same, behind the time that was a day ago by the clock that the file is written by."""
    return ("sh", "-c", f"date -d '1 day ago' +%FT%T; {jobcomp_command()[-1]}")


def sacct_command() -> tuple[str, ...]:
    """The same question for slurmdbd: every job of all time."""
    words = ("-a", "-D", "-X", "-n", "-P", f"--delimiter={_FIELD}", "-S", "uts1", "-o", ",".join(SACCT_FIELDS))
    return ("sacct", *words)


def parse_jobcomp(text: str) -> list[JobRecord]:
    """What the file says, oldest first. A job that was queued again has several lines; the last one counts."""
    return _last(parse_runs(text))


def parse_recent(text: str) -> list[JobRecord]:
    """The answer to `recent_command`, oldest first, without the turns of jobs that were queued again."""
    since, _, rest = text.partition("\n")
    return [record for record in parse_jobcomp(rest) if record.end >= since and not record.active]


def parse_runs(text: str) -> list[JobRecord]:
    """What the file says, each run of a job for itself."""
    return [_from_jobcomp(record) for record in split_records(text)]


def parse_sacct(text: str) -> list[JobRecord]:
    """What sacct says, oldest first, without what still waits or runs."""
    records: list[str] = []
    for line in text.split("\n"):
        if line.count(_FIELD) >= len(SACCT_FIELDS) - 1:
            records.append(line)
        elif records and line:
            records[-1] += "\n" + line
    found = (_from_sacct(record) for record in records)
    return _last(record for record in found if not record.active)[-NEWEST:]


def merged(first: Iterable[JobRecord], second: Iterable[JobRecord]) -> list[JobRecord]:
    """Jobs of both, oldest first; of one that both have, what the second says."""
    found = {(record.id, record.start): record for record in (*first, *second)}
    return sorted(found.values(), key=lambda record: (record.end, record.id))


def may_go_on(record: JobRecord) -> bool:
    """Whether this may be the end of one turn of a job that was queued again. Slurm 24.11 notes such as pending."""
    return record.active or record.state in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def _last(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Each job once, with its last run. A number that comes again after a job had ended is another job's: numbers begin
    again on a controller that lost its state."""
    kept: dict[str, JobRecord] = {}
    ended: list[JobRecord] = []
    for record in records:
        before = kept.get(record.id)
        if before is not None and not may_go_on(before):
            ended.append(before)
        kept[record.id] = record
    return sorted([*ended, *kept.values()], key=lambda record: (record.end, record.id))


def _from_jobcomp(text: str) -> JobRecord:
    named = _NAME.search(text)
    rest = text[: named.start()] + " JobState=" + text[named.end() :] if named else text
    values = {key: value for key, value in reversed(_PAIR.findall(rest))}
    code, _, signal = values.get("ExitCode", "0:0").partition(":")
    array, task = values.get("ArrayJobId", ""), values.get("ArrayTaskId", "")
    start, end = _time(values.get("StartTime", "")), _time(values.get("EndTime", ""))
    return JobRecord(
        id=f"{array}_{task}" if array and task and task != "NONE" else values["JobId"],
        state=values.get("JobState", "UNKNOWN"),
        name=named[1] if named else "",
        user=values.get("UserId", "").partition("(")[0],
        partition=values.get("Partition", ""),
        nodes="" if values.get("NodeList") in (None, "(null)") else values["NodeList"],
        node_count=_number(values.get("NodeCnt", "")),
        exit_code=_number(code),
        exit_signal=_number(signal),
        run_time=_elapsed(start, end),
        time_limit=_limit(values.get("TimeLimit", "")),
        start=start,
        end=end,
        work_dir=values.get("WorkDir", ""),
        number=values["JobId"],
    )


def _from_sacct(text: str) -> JobRecord:
    values = dict(zip(SACCT_FIELDS, text.split(_FIELD, len(SACCT_FIELDS) - 1), strict=True))
    code, _, signal = values["ExitCode"].partition(":")
    nodes = values["NodeList"]
    return JobRecord(
        id=values["JobID"],
        # `CANCELLED by 1000` says who; the word is what counts.
        state=values["State"].split(" ")[0],
        name=values["JobName"],
        user=values["User"],
        partition=values["Partition"],
        nodes="" if nodes == "None assigned" else nodes,
        node_count=_number(values["NNodes"]),
        exit_code=_number(code),
        exit_signal=_number(signal),
        run_time=values["Elapsed"],
        time_limit=values["Timelimit"],
        start=_time(values["Start"]),
        end=_time(values["End"]),
        work_dir=values["WorkDir"],
        number=values["JobID"].partition("_")[0],
    )


def _time(text: str) -> str:
    return "" if text in ("Unknown", "None", "NONE") else text


def _elapsed(start: str, end: str) -> str:
    try:
        seconds = int((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())
    except ValueError:
        return "00:00:00"
    minutes, second = divmod(max(0, seconds), 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    clock = f"{hour:02}:{minute:02}:{second:02}"
    return f"{days}-{clock}" if days else clock


def _limit(text: str) -> str:
    """The file has minutes where other commands have a clock."""
    if not text.isdecimal():
        return text
    hours, minutes = divmod(int(text), 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:00" if days else f"{hours:02}:{minutes:02}:00"


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0
