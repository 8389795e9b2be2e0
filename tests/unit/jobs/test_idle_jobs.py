"""Jobs that run although none of their ranks does, and short jobs that read files: what is asked of Slurm."""

import asyncio
import io
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from tests.support.cases import cases
from tests.unit.jobs.test_job_verbs import Reef

from shoal.cli.job_screens import show_jobs
from shoal.hosts.api import Target
from shoal.jobs.record import JobRecord, parse_steps
from shoal.remote import log_reader
from shoal.slurm.state import JOB_RECORD
from shoal.verbs.jobs import JobsResult, JobView, jobs
from shoal.verbs.node_files import READER_NAME, NodeFiles, reader_command, short_job_command
from shoal_simulators.fake_host import FakeHost

RECORD = "JobId=17 JobName=train UserId=root(0) JobState={} RunTime=1-02:03:04 ExitCode={} NodeList=n[1-2] "
RECORD += "WorkDir=/jobs Comment={}\n"
DAY_S = 24 * 3600 + 2 * 3600 + 3 * 60 + 4


def reef_with_steps(steps: bytes, comment: str = "shoal:c0de/11b") -> Reef:
    reef = Reef()
    reef.states, reef.comment, reef.record = ["RUNNING"], comment, RECORD
    marked = b"".join(JOB_RECORD.encode() + line for line in steps.splitlines(keepends=True))
    reef.controller.answers = {**reef.controller.answers, ("squeue",): marked}
    return reef


def test_steps_with_a_number_count_and_those_that_read_files_do_not() -> None:
    names = "17.batch batch|17.extern extern|17.0 python3|18.batch batch\n18.0 x|19_3.1 my.py"
    text = "".join(f"{JOB_RECORD}{line}\n" for line in (*names.split("|"), f"20.4 {READER_NAME}"))
    assert parse_steps(text, READER_NAME) == {"17", "19_3"} and parse_steps(text) == {"17", "19_3", "20"}


@cases("text, seconds", ("1-02:03:04", DAY_S), ("00:01:00", 60), ("02:05", 125), ("", 0), ("INVALID", 0))
def test_run_time_is_read_in_seconds(text: str, seconds: int) -> None:
    assert JobRecord("17", "RUNNING", run_time=text).run_seconds == seconds


@cases(
    "steps, comment, idle",
    (b"17.batch batch\n", "shoal:c0de/11b", DAY_S),
    (b"17.batch batch\n17.0 python3\n", "shoal:c0de/11b", None),
    (b"17.batch batch\n17.3 shoal-logs\n", "shoal:c0de/11b", DAY_S),
    (b"17.batch batch\n", "(null)", None),  # an sbatch script may need none
)
async def test_running_job_without_a_step_is_idle(steps: bytes, comment: str, idle: int | None) -> None:
    [view] = (await jobs(reef_with_steps(steps, comment).context)).jobs
    assert view.no_step_seconds == idle and view.progress == {"step": 12, "loss": 0.5}


async def test_job_is_idle_since_its_last_rank_ended() -> None:
    reef = reef_with_steps(b"17.batch batch\n")
    for name, seconds in (("n1", b"7000"), ("n2", b"300")):
        reef.nodes[name].answers = {("python3",): b'{"last_end_seconds": ' + seconds + b"}\n"}
    [view] = (await jobs(reef.context)).jobs
    assert view.no_step_seconds == 300 and view.progress == {}


@cases("seconds, text", (59, "step 3"), (60, "no step for 1 minute"), (150, "no step for 2 minutes"))
def test_idle_job_shows_for_how_long(seconds: float, text: str) -> None:
    out = io.StringIO()
    view = JobView(JobRecord("17", "RUNNING"), {"step": 3}, no_step_seconds=seconds)
    show_jobs(Console(file=out, width=200), JobsResult("reef", (view,)))
    assert out.getvalue().rstrip().endswith(text)


def printed_progress(directory: Path) -> str:
    line = [sys.executable, log_reader.__file__, "progress", "", str(directory), "progress.json"]
    return subprocess.run(line, capture_output=True, text=True, timeout=60, check=True).stdout


def test_reader_prints_progress_and_when_a_rank_last_ran(tmp_path: Path) -> None:
    assert printed_progress(tmp_path) == ""
    (tmp_path / "progress.json").write_text('{"step": 3}')
    (tmp_path / "rank-0.0.end").touch()
    os.utime(tmp_path / "rank-0.0.end", (time.time() - 5000,) * 2)
    first, second = printed_progress(tmp_path).splitlines()
    assert first == '{"step": 3}' and second.startswith('{"last_end_seconds": 50')
    pids = tmp_path / f"pids.{os.uname().nodename}"
    pids.mkdir()
    (pids / str(os.getpid())).touch()
    assert printed_progress(tmp_path).splitlines()[1] == '{"last_end_seconds": 0}'


@cases("ended", False, True)
async def test_short_job_is_cancelled_when_its_srun_is_killed(ended: bool) -> None:
    async def srun(program: Any) -> int:
        await program.print(b"rank-0.0.log\t1.0 a\n")
        if not ended:
            await asyncio.sleep(600)
        return 0

    controller, taken = FakeHost(Target("c1"), {("srun",): srun, ("scancel",): b""}), asyncio.Event()
    record = JobRecord("17", "COMPLETED", number="17")
    line = short_job_command(record, "n1", ["cat"])
    [name] = [word.removeprefix("--job-name=") for word in line if word.startswith("--job-name=")]
    files = NodeFiles(controller, ("n1",), ("cat",), lambda node, raw: taken.set())
    reading = asyncio.create_task(files.pump("n1", line))
    await taken.wait()
    if not ended:
        reading.cancel()
    await asyncio.wait([reading])
    cancelled = [argv for argv in controller.argvs if argv[0] == "scancel"]
    assert cancelled == ([] if ended else [("scancel", f"--name={name}")])
    assert name != READER_NAME and f"--job-name={READER_NAME}" in reader_command(record, ["n1"], ["cat"])
