"""Jobs as Slurm knows them: the commands to ask, and a parser for each. Pure.

slurmctld keeps ended jobs for five minutes (MinJobAge). Older ones are in the file that slurmctld always writes
(jobcomp), and in slurmdbd where there is one.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from shoal.contract import PROFILE_DIRECTORY
from shoal.slurm.state import JOBCOMP

JOBS_DIRECTORY = "/var/lib/shoal/jobs"
"""Where the hosts keep jobs: a directory for each cluster below it."""

ACTIVE = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"),
    *("REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING", "STOPPED"),
)
SUCCESS_STATES = ("COMPLETED",)

_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z_/:]*)=(\S*)")
_ADMIN_COMMENT = re.compile(r"\sAdminComment=(.*?)\s*(?=\s[A-Z][A-Za-z_/:]*=|$)", re.DOTALL)
_NAME = re.compile(r"\sJobName=(.*?)\sUserId=", re.DOTALL)


MAX_ENDED_JOBS = 1000
"""The newest ones are read."""

_FIELD = "\x1f"
SACCT_FIELDS = (
    *("JobID", "State", "User", "Partition", "NodeList", "NNodes", "ExitCode", "Start", "End", "Elapsed"),
    *("Timelimit", "WorkDir", "JobName"),
)
"""The name, which its owner chose, comes last."""

_JOBCOMP_NAME = re.compile(r"(?:^|\s)Name=(.*?)\sJobState=", re.DOTALL)
_JOBCOMP_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z]*)=(\S*)")


@dataclass(frozen=True)
class JobComment:
    """What `shoal run` writes into a job's comment: the code it uses, which must not be cleaned up."""

    code: str
    runtime: str
    profile: str = ""
    environment: str = ""
    """The id of its Python environment."""

    def __str__(self) -> str:
        uses = "/".join(filter(None, (self.code, self.runtime, self.profile)))
        return f"shoal:{uses}@{self.environment}" if self.environment else f"shoal:{uses}"

    @classmethod
    def parse(cls, comment: str) -> JobComment | None:
        """The note in a comment; None in one that somebody else wrote."""
        match = re.fullmatch(r"shoal:([0-9a-z]+)/([0-9a-z]+)(?:/([a-z]+))?(?:@([0-9a-z]+))?", comment)
        return cls(match[1], match[2], match[3] or "", match[4] or "") if match else None


@dataclass(frozen=True)
class JobRecord:
    """What `scontrol show job` says."""

    id: str
    """`17`, or `17_3` for one of an array, or `17_4-9` for those of it that still wait together."""
    state: str
    name: str = ""
    user: str = ""
    partition: str = ""
    reason: str = ""
    """Why it waits, or why it ended: Slurm's word."""
    nodes: str = ""
    """The hostlist of its nodes; empty while it waits."""
    node_count: int = 0
    batch_host: str = ""
    exit_code: int = 0
    exit_signal: int = 0
    restarts: int = 0
    run_time: str = ""
    time_limit: str = ""
    start: str = ""
    end: str = ""
    output: str = ""
    """The file of what the batch script prints; `error` of what it complains about, most often the same."""
    error: str = ""
    work_dir: str = ""
    number: str = ""
    """Slurm's own number of it; differs from `id` in an array."""
    comment: str = ""
    waits_for: str = ""
    """Why it waits for rented nodes, in the words of what rents them."""

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def failed(self) -> bool:
        return not self.active and self.state not in SUCCESS_STATES

    @property
    def note(self) -> JobComment | None:
        """What `shoal run` noted of it; None for a job that came by another way."""
        return JobComment.parse(self.comment)

    @property
    def traces(self) -> str:
        """The directory on its nodes where the profiler's files are; empty where it has none."""
        return f"{self.work_dir}/{self.id}/{PROFILE_DIRECTORY}" if self.note and self.note.profile else ""


def show_command(job: str = "") -> tuple[str, ...]:
    """The question: one job, or all that slurmctld remembers."""
    return ("scontrol", "-o", "show", "job", job) if job else ("scontrol", "-o", "show", "job")


def parse_records(text: str) -> list[JobRecord]:
    """The answer to `show_command`, oldest job first."""
    return sorted((_record(record) for record in split_records(text)), key=_order)


def split_records(text: str) -> list[str]:
    """The text of each job, which begins with `JobId=`."""
    records: list[str] = []
    for line in text.splitlines():
        if line.startswith("JobId="):
            records.append(line)
        elif records and line.strip():
            records[-1] += "\n" + line  # a name with a newline in it
    return records


def _record(text: str) -> JobRecord:
    # The name is its owner's to choose: nothing in it may be taken for a key.
    named = _NAME.search(text)
    rest = text[: named.start()] + " UserId=" + text[named.end() :] if named else text
    values = {key: value for key, value in reversed(_PAIR.findall(rest))}
    comment = _ADMIN_COMMENT.search(rest)
    code, _, signal = values.get("ExitCode", "0:0").partition(":")
    array, task = values.get("ArrayJobId", ""), values.get("ArrayTaskId", "")
    return JobRecord(
        id=f"{array}_{task}" if array and task and task != "N/A" else values["JobId"],
        state=values.get("JobState", "UNKNOWN"),
        name=named[1] if named else "",
        user=values.get("UserId", "").partition("(")[0],
        partition=_text(values, "Partition"),
        reason=_text(values, "Reason"),
        nodes=_text(values, "NodeList"),
        node_count=int(re.match(r"\d*", values.get("NumNodes", "0"))[0] or 0),  # type: ignore[index]
        batch_host=_text(values, "BatchHost"),
        exit_code=_number(code),
        exit_signal=_number(signal),
        restarts=_number(values.get("Restarts", "0")),
        run_time=values.get("RunTime", ""),
        time_limit=values.get("TimeLimit", ""),
        start=_text(values, "StartTime"),
        end=_text(values, "EndTime"),
        output=_text(values, "StdOut"),
        error=_text(values, "StdErr"),
        work_dir=_text(values, "WorkDir"),
        number=values["JobId"],
        comment=_text(values, "Comment"),
        waits_for=comment[1] if comment and values.get("JobState") in ("PENDING", "CONFIGURING") else "",
    )


def _order(record: JobRecord) -> tuple[int, int]:
    first, _, task = record.id.partition("_")
    return _number(first), _number(re.match(r"\d*", task)[0])  # type: ignore[index]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _text(values: dict[str, str], key: str) -> str:
    value = values.get(key, "")
    return "" if value in ("(null)", "N/A", "None", "Unknown") else value


def jobcomp_command() -> tuple[str, ...]:
    """The newest lines of the file, of the one before it as well while that is not compressed."""
    return ("sh", "-c", f"cat {JOBCOMP}.1 {JOBCOMP} 2>/dev/null | tail -n {MAX_ENDED_JOBS}")


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
    return _last(record for record in found if not record.active)[-MAX_ENDED_JOBS:]


def merge_records(first: Iterable[JobRecord], second: Iterable[JobRecord]) -> list[JobRecord]:
    """Jobs of both, oldest first; of one that both have, what the second says."""
    found = {(record.id, record.start): record for record in (*first, *second)}
    return sorted(found.values(), key=lambda record: (record.end, record.id))


def may_be_requeued(record: JobRecord) -> bool:
    """Whether this may be the end of one turn of a job that was queued again. Slurm 24.11 notes such as pending."""
    return record.active or record.state in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def _last(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Each job once, with its last run. A number that comes again after a job had ended is another job's: numbers begin
    again on a controller that lost its state."""
    kept: dict[str, JobRecord] = {}
    ended: list[JobRecord] = []
    for record in records:
        before = kept.get(record.id)
        if before is not None and not may_be_requeued(before):
            ended.append(before)
        kept[record.id] = record
    return sorted([*ended, *kept.values()], key=lambda record: (record.end, record.id))


def _from_jobcomp(text: str) -> JobRecord:
    named = _JOBCOMP_NAME.search(text)
    rest = text[: named.start()] + " JobState=" + text[named.end() :] if named else text
    values = {key: value for key, value in reversed(_JOBCOMP_PAIR.findall(rest))}
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
