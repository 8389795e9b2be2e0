"""Jobs as Slurm knows them: the commands to ask, and a parser for each. Pure.

slurmctld keeps ended jobs for five minutes (MinJobAge). Older ones are in the file that slurmctld always writes
(jobcomp), and in slurmdbd where there is one.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime

from shoal.contract import PROFILE_DIRECTORY
from shoal.slurm.state import JOB_RECORD, JOBCOMP

JOBS_DIRECTORY = "/var/lib/shoal/jobs"
"""Where the hosts keep the operator's jobs: a directory for each cluster below it."""
USER_JOBS_DIRECTORY = "/var/lib/shoal/user-jobs"
"""Where each host keeps users' jobs that are on no share: a directory of root's with one for each user."""

ACTIVE = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"),
    *("REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD", "EXPEDITING"),  # it waits to run again
    *("RESIZING", "SIGNALING", "STAGE_OUT", "STOPPED"),
)

_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z_/:]*)=(\S*)")
_ADMIN_COMMENT = re.compile(r"\sAdminComment=(.*?)\s*(?=\s[A-Z][A-Za-z_/:]*=|$)", re.DOTALL)
_JOBCOMP_END = re.compile(r"\sExitCode=[0-9]+:[0-9]+ ?$")
MAX_ENDED_JOBS = 1000
"""The newest ones are read."""

SACCT_FIELDS = {
    **{"JobID": "JobId", "State": "JobState", "User": "UserId", "Partition": "Partition", "NodeList": "NodeList"},
    **{"NNodes": "NumNodes", "ExitCode": "ExitCode", "Start": "StartTime", "End": "EndTime", "Elapsed": "RunTime"},
    **{"Timelimit": "TimeLimit", "WorkDir": "WorkDir", "JobName": "name"},
}
"""The fields to ask for, each with scontrol's key. The name, which its owner chose, comes last."""
NO_JOBCOMP = "no-file-of-ended-jobs"
JOBCOMP_COMMAND = (
    *("sh", "-c"),
    f"cat {JOBCOMP}.1 {JOBCOMP} 2>/dev/null | tail -n {MAX_ENDED_JOBS}; [ -e {JOBCOMP} ] || echo {NO_JOBCOMP}",
)
"""The newest lines of the file, of the one before it as well while that is not compressed. Login hosts have none."""
RECENT_COMMAND = ("sh", "-c", f"date -d '1 day ago' +%FT%T; {JOBCOMP_COMMAND[-1]}")
"""The same, behind the time that was a day ago by the clock that the file is written by."""
STEPS_COMMAND = ("squeue", "-h", "-s", "-o", f"{JOB_RECORD}%i %j")
"""The steps that run, each with its name."""
OWNERS_COMMAND = ("squeue", "-h", "-a", "-t", "all", "-o", "%A %U")
"""The number of every job that slurmctld has, with its owner's. An owner can put a newline and the record of another
job into the name, comment or directory of a job, and can choose neither of these."""
SACCT_COMMAND = (
    *("sacct", "-a", "-D", "-X", "-n", "-P", f"--delimiter={JOB_RECORD}"),
    *("-S", "1970-01-02", "-o", ",".join(SACCT_FIELDS)),
)
"""The same question for slurmdbd: every job of all time."""


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
        return not self.active and self.state != "COMPLETED"

    @property
    def rejected(self) -> bool:
        """Whether Slurm never queued it. It records such a job as failed, without nodes, and with 1 as its status,
        which reads as SIGHUP."""
        return self.state == "FAILED" and not self.nodes and (self.exit_code, self.exit_signal) == (0, 1)

    @property
    def note(self) -> JobComment | None:
        """What `shoal run` noted of it; None for a job that came by another way."""
        return JobComment.parse(self.comment)

    @property
    def run_seconds(self) -> int:
        """How long it has run."""
        days, _, clock = self.run_time.rpartition("-")
        hours, minutes, seconds = [0, 0, *map(_leading_number, clock.split(":"))][-3:]
        return ((_leading_number(days) * 24 + hours) * 60 + minutes) * 60 + seconds

    @property
    def traces(self) -> str:
        """The directory on its nodes where the profiler's files are; empty where it has none."""
        return f"{self.work_dir}/{self.id}/{PROFILE_DIRECTORY}" if self.note and self.note.profile else ""


def show_command(job: str = "") -> tuple[str, ...]:
    """The question: one job, or all that slurmctld remembers."""
    return ("scontrol", "-o", "show", "job", job) if job else ("scontrol", "-o", "show", "job")


def step_command(
    job: str, nodes: Sequence[str], command: Sequence[str], options: Sequence[str] = ()
) -> tuple[str, ...]:
    """The command as a step of a running job, one task on each node, beside whatever runs there."""
    tasks = (f"--nodes={len(nodes)}", f"--ntasks={len(nodes)}", "--ntasks-per-node=1")
    return (
        "srun",
        f"--jobid={job}",
        f"--nodelist={','.join(nodes)}",
        *tasks,
        "--overlap",
        "--quiet",
        *options,
        *command,
    )


def is_plain(text: str) -> bool:
    """Whether the answer to `show_command` with a number is one record that nothing was put into."""
    return len(text.strip().split("\n")) == 1 and len(re.findall(r"\sUserId=", text)) <= 1


def parse_owners(text: str) -> dict[str, str]:
    """The answer to OWNERS_COMMAND."""
    pairs = (line.split() for line in text.split("\n"))
    return {pair[0]: pair[1] for pair in pairs if len(pair) == 2}


def parse_records(text: str, owners: Mapping[str, str] | None = None) -> list[JobRecord]:
    """The answer to `show_command`, oldest job first, without those of `doubtful_ids`. `owners`, asked for after it,
    may be left out where the answer is plain."""
    doubtful = doubtful_ids(text, owners or {})
    records = [part for part in split_records(text, owners) if _number(part) not in doubtful]
    return sorted((_shown_record(part, owners) for part in records), key=_order)


def doubtful_ids(text: str, owners: Mapping[str, str]) -> list[str]:
    """The jobs that have several records in an answer, all but one in the words of the job before it; and the latter.
    Ask for each alone."""
    numbers = [_number(part) for part in split_records(text, owners)]
    counts = Counter(numbers)
    pairs = itertools.pairwise(numbers)
    doubtful = [number for pair in pairs if counts[pair[1]] > 1 for number in pair]
    return [*dict.fromkeys(doubtful)]


def combine_records(text: str, owners: Mapping[str, str], answers: Mapping[str, str]) -> list[JobRecord]:
    """The same with those of `doubtful_ids`, by their numbers with the answers to `show_command` for each."""
    asked = (record for job in answers for record in parse_answer(answers[job], job, owners) if record.number == job)
    return sorted((*parse_records(text, owners), *asked), key=_order)


def parse_answer(text: str, job: str, owners: Mapping[str, str]) -> list[JobRecord]:
    """The answer to `show_command` with the number of a job: it, or the tasks of an array, which have one owner."""
    owner = owners.get(_number(text))
    parts = split_records(text, {number for number in owners if owners[number] == owner})
    first_parts = {_number(part): part for part in reversed(parts)}
    records = [_shown_record(part, owners) for part in first_parts.values()]
    return sorted((r for r in records if job in (r.id, r.number, r.id.partition("_")[0])), key=_order)


def parse_steps(text: str, other: str = "") -> set[str]:
    """The jobs that have a step with a number, which is none of a name that begins with `other`."""
    steps = re.findall(rf"{JOB_RECORD}([0-9]+(?:_[0-9]+)?)\.[0-9]+ (.*)", text)
    return {job for job, name in steps if not (other and name.startswith(other))}


def split_records(text: str, numbers: Collection[str] | None = None) -> list[str]:
    """The text of each job in what scontrol shows: it begins with `JobId=` and, where known, one of these numbers."""
    records: list[str] = []
    for line in text.split("\n"):
        if line.startswith("JobId=") and (numbers is None or _number(line) in numbers):
            records.append(line)
        elif records and line.strip():
            records[-1] += "\n" + line  # a name with a newline in it
    return records


def _number(record: str) -> str:
    match = re.match(r"JobId=([0-9]*)", record)
    return match[1] if match else ""


def _shown_record(text: str, owners: Mapping[str, str] | None) -> JobRecord:
    owner = rf"UserId=(?=[^\s(]*\({owners[_number(text)]}\))" if owners is not None else "UserId="
    return _record(_values(text, "JobName", owner))


def _values(text: str, name_key: str, next_key: str) -> dict[str, str]:
    """The pairs of a job. Its name, under `name`, is its owner's to choose: nothing in it may be taken for a key."""
    name_match = re.search(rf"(?:^|\s){name_key}=(.*?)\s(?={next_key})", text, re.DOTALL)
    rest = text[name_match.end() :] if name_match else ""
    other_pairs = f"{text[: name_match.start()]} {rest}" if name_match else re.split(rf"\s{name_key}=", text)[0]
    comment = _ADMIN_COMMENT.search(other_pairs)
    values = {key: value for key, value in reversed(_PAIR.findall(other_pairs))}
    return values | {"name": name_match[1] if name_match else "", "AdminComment": comment[1] if comment else ""}


def _record(values: dict[str, str]) -> JobRecord:
    """A job of pairs, under scontrol's keys."""
    code, _, signal = values.get("ExitCode", "0:0").partition(":")
    array, task = values.get("ArrayJobId", ""), _text(values, "ArrayTaskId")
    state = values.get("JobState", "UNKNOWN").split(" ")[0]  # `CANCELLED by 1000` says who
    return JobRecord(
        id=f"{array}_{task}" if array and task else values["JobId"],
        state=state,
        name=values["name"],
        user=values.get("UserId", "").partition("(")[0],
        partition=_text(values, "Partition"),
        reason=_text(values, "Reason"),
        nodes=_text(values, "NodeList"),
        node_count=_leading_number(values.get("NumNodes", "")),
        batch_host=_text(values, "BatchHost"),
        exit_code=_leading_number(code),
        exit_signal=_leading_number(signal),
        restarts=_leading_number(values.get("Restarts", "")),
        run_time=values.get("RunTime", ""),
        time_limit=_limit(values.get("TimeLimit", "")),
        start=_text(values, "StartTime"),
        end=_text(values, "EndTime"),
        output=_text(values, "StdOut"),
        error=_text(values, "StdErr"),
        work_dir=_text(values, "WorkDir"),
        number=values["JobId"].partition("_")[0],
        comment=_text(values, "Comment"),
        waits_for=values.get("AdminComment", "") if state in ("PENDING", "CONFIGURING") else "",
    )


def _order(record: JobRecord) -> tuple[int, int]:
    first, _, task = record.id.partition("_")
    return _leading_number(first), _leading_number(task)


def _leading_number(text: str) -> int:
    return int("0" + re.match(r"[0-9]*", text)[0])  # type: ignore[index]


def _text(values: dict[str, str], key: str) -> str:
    value = values.get(key, "")
    return "" if value in ("(null)", "N/A", "None", "NONE", "None assigned", "Unknown") else value


def parse_jobcomp(text: str) -> list[JobRecord]:
    """What the file says, oldest first. A job that was queued again has several lines; the last one counts."""
    return _last(parse_runs(text))


def lacks_jobcomp(text: str) -> bool:
    """Whether the host that answered has no file of ended jobs."""
    return text.endswith(NO_JOBCOMP + "\n")


def parse_recent(text: str, accounted: Iterable[JobRecord] = ()) -> list[JobRecord]:
    """The answer to RECENT_COMMAND, oldest first, without the turns of jobs that were queued again. `accounted` are the
    jobs that slurmdbd has, for hosts without the file."""
    since, _, jobcomp = text.partition("\n")
    return [record for record in (*parse_jobcomp(jobcomp), *accounted) if record.end >= since and not record.active]


def parse_runs(text: str) -> list[JobRecord]:
    """What the file says, each run of a job for itself."""
    records: list[str] = []
    ended = True
    for line in text.removesuffix(NO_JOBCOMP + "\n").split("\n"):
        if ended and line.startswith("JobId="):
            records.append(line)
        elif records and line.strip():
            records[-1] += "\n" + line  # a name with a newline in it, or with the beginning of another record
        ended = _JOBCOMP_END.search(line) is not None or (ended and not line)
    return [_from_jobcomp(record) for record in records]


def parse_sacct(text: str) -> list[JobRecord]:
    """What sacct says, oldest first, without what still waits or runs."""
    records: list[str] = []
    for line in text.split("\n"):
        if line.count(JOB_RECORD) >= len(SACCT_FIELDS) - 1:
            records.append(line)
        elif records and line:
            records[-1] += "\n" + line
    rows = (record.split(JOB_RECORD, len(SACCT_FIELDS) - 1) for record in records)
    jobs = (_record(dict(zip(SACCT_FIELDS.values(), row, strict=True))) for row in rows)
    return _last(job for job in jobs if not job.active)[-MAX_ENDED_JOBS:]


def merge_records(first: Iterable[JobRecord], second: Iterable[JobRecord]) -> list[JobRecord]:
    """Jobs of both, oldest first; of one that both have, what the second says."""
    records = {(record.id, record.start): record for record in (*first, *second)}
    return sorted(records.values(), key=lambda record: (record.end, record.id))


def may_be_requeued(record: JobRecord) -> bool:
    """Whether this may be the end of one turn of a job that was queued again. Slurm 24.11 notes such as pending."""
    return record.active or record.state in ("PREEMPTED", "NODE_FAIL", "BOOT_FAIL")


def _last(records: Iterable[JobRecord]) -> list[JobRecord]:
    """Each job once, with its last run. A number that comes again after a job had ended is another job's: numbers begin
    again on a controller that lost its state."""
    last_runs: dict[str, JobRecord] = {}
    ended: list[JobRecord] = []
    for record in records:
        previous = last_runs.get(record.id)
        if previous is not None and not may_be_requeued(previous):
            ended.append(previous)
        last_runs[record.id] = record
    return sorted([*ended, *last_runs.values()], key=lambda record: (record.end, record.id))


def _from_jobcomp(text: str) -> JobRecord:
    values = _values(text, "Name", "JobState=")
    values["NumNodes"] = values.get("NodeCnt", "")
    record = _record(values)
    return replace(record, run_time=_run_time(record.start, record.end))


def _run_time(start: str, end: str) -> str:
    try:
        seconds = int((datetime.fromisoformat(end) - datetime.fromisoformat(start)).total_seconds())
    except ValueError:
        seconds = 0
    return _clock(max(0, seconds))


def _limit(text: str) -> str:
    """The file has minutes where other commands have a clock."""
    return _clock(int(text) * 60) if text.isdecimal() else text


def _clock(seconds: int) -> str:
    """Seconds as Slurm writes them: [days-]HH:MM:SS."""
    minutes, second = divmod(seconds, 60)
    hours, minute = divmod(minutes, 60)
    days, hour = divmod(hours, 24)
    return (f"{days}-" if days else "") + f"{hour:02}:{minute:02}:{second:02}"
