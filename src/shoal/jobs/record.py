"""A job as slurmctld has it: the question and a parser. Ended jobs stay there for five minutes (MinJobAge)."""

from __future__ import annotations

import re
from dataclasses import dataclass

from shoal.jobs.model import Note
from shoal.train.contract import PROFILE_DIRECTORY

ACTIVE = (
    *("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED"),
    *("REQUEUED", "REQUEUE_HOLD", "RESIZING", "SIGNALING", "STOPPED"),
)
GOOD = ("COMPLETED",)

_PAIR = re.compile(r"(?:^|\s)([A-Z][A-Za-z_/:]*)=(\S*)")
_SAID = re.compile(r"\sAdminComment=(.*?)\s*(?=\s[A-Z][A-Za-z_/:]*=|$)", re.DOTALL)
_NAME = re.compile(r"\sJobName=(.*?)\sUserId=", re.DOTALL)


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
        return not self.active and self.state not in GOOD

    @property
    def note(self) -> Note | None:
        """What `shoal run` noted of it; None for a job that came by another way."""
        return Note.parse(self.comment)

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
    said = _SAID.search(rest)
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
        waits_for=said[1] if said and values.get("JobState") in ("PENDING", "CONFIGURING") else "",
    )


def _order(record: JobRecord) -> tuple[int, int]:
    first, _, task = record.id.partition("_")
    return _number(first), _number(re.match(r"\d*", task)[0])  # type: ignore[index]


def _number(text: str) -> int:
    return int(text) if text.isdecimal() else 0


def _text(values: dict[str, str], key: str) -> str:
    value = values.get(key, "")
    return "" if value in ("(null)", "N/A", "None", "Unknown") else value
