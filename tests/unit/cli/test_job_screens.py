"""How job results are shown."""

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.screens import screen_text

from shoal.cli.job_commands import finish_follow, finish_logs, keep_running
from shoal.cli.job_screens import (
    format_bytes,
    progress_text,
    show_fetched,
    show_job_directory,
    show_job_end,
    show_jobs,
    show_line,
    show_submitted,
)
from shoal.cli.output import plain
from shoal.cli.run_command import finish_wait, misplaced_options
from shoal.cli.session import Session
from shoal.errors import Interrupted, Unreachable
from shoal.jobs.failure import FailureReason
from shoal.jobs.logs import BATCH, LogLine
from shoal.jobs.record import JobRecord
from shoal.jobs.tree_files import LeftOut
from shoal.verbs.fetch import FetchResult, SkippedFile
from shoal.verbs.jobs import JobsResult, JobView
from shoal.verbs.logs import LogsResult
from shoal.verbs.submission import SubmittedJob


def test_log_line_starts_with_rank_and_restart_count_or_its_time() -> None:
    lines = (LogLine(1, 3, 0, "a [b]\tc"), LogLine(1, 3, 2, "again"), LogLine(1, BATCH, 0, "srun: error"))
    said = "".join(screen_text(show_line, line) for line in lines)
    assert said == "[3] a [b]\tc\n[3.2] again\n[-] srun: error\n"
    assert screen_text(show_line, LogLine(1.25, 0, 0, "a"), timestamps=True).endswith(":01.250000 [0] a\n")


def test_option_of_run_behind_a_script_without_it_is_noted() -> None:
    words = ("--lr", "0.1", "--wait", "-N2", "--launcher=spawn", "--gpus-per-node", "3", "--no-requeue", "--max-size=9")
    shown = ["--wait", "-N2", "--launcher=spawn", "--gpus-per-node", "--no-requeue", "--max-size=9"]
    assert misplaced_options(words, "import sys") == shown
    script = 'parser.add_argument("--gpus_per_node"); parser.add_argument("--wait")'
    assert misplaced_options(("--gpus-per-node", "--wait", "--array"), script) == ["--array"]


def test_job_list_shows_progress_or_the_reason() -> None:
    running = JobRecord("17", "RUNNING", "train", "ann", nodes="n[1-2]", run_time="00:01:00", time_limit="UNLIMITED")
    failed = JobRecord("18", "FAILED", "[red]x", "ann", restarts=2)
    views = (
        JobView(running, {"step": 12, "total_steps": 100, "loss": 0.51234, "state": "running"}),
        JobView(failed, reason=FailureReason("script", "rank 2 on n2 failed first")),
        JobView(JobRecord("19", "PENDING", reason="Resources", node_count=4)),
        JobView(JobRecord("21", "PENDING", reason="BeginTime", waits_for="lambda us-west-1 out of gpu_1x_a10")),
        JobView(JobRecord("22", "FAILED", reason="NonZeroExitCode")),
        JobView(JobRecord("20", "COMPLETED", work_dir="/jobs", comment="shoal:c0de/11b/torch")),
    )
    silent = {"n9": Unreachable("n9", "does not answer", hint="is it up?")}
    said = screen_text(show_jobs, JobsResult("reef", views, silent)).splitlines()
    assert [" ".join(line.split()) for line in said] == [
        "✗ n9: does not answer",
        "fix: is it up?",
        "job name user state time limit nodes progress or reason",
        "17 train ann running 00:01:00 unlimited n[1-2] step 12/100, loss 0.5123",
        "18 [red]x ann failed, restart 2 0 rank 2 on n2 failed first",
        "19 pending 4 Resources",
        "21 pending 0 lambda us-west-1 out of gpu_1x_a10",
        "22 failed 0 `shoal logs 22` says why",
        "20 completed 0 profile in /jobs/20/profile",
    ]
    assert screen_text(show_jobs, JobsResult("reef", views, left_out=30)).endswith(
        "\n30 more ended within a day: `shoal jobs --all` lists them\n"
    )
    assert screen_text(show_jobs, JobsResult("reef", ())) == "no jobs\n"


def test_job_end_shows_the_reason_its_lines_and_the_fix() -> None:
    reason = FailureReason(
        "script", "rank 2 failed first", 2, "n2", ("Traceback:", "ValueError: [x]\x1b[2J"), "look at it"
    )
    assert screen_text(show_job_end, JobRecord("17", "FAILED"), reason).splitlines() == [
        "✗ job 17: failed: rank 2 failed first",
        "    Traceback:",
        "    ValueError: [x]\\x1b[2J",
        "  fix: look at it",
    ]
    assert screen_text(show_job_directory, JobRecord("17", "COMPLETED", nodes="n[1-2]", work_dir="/jobs")) == (
        "  its files are in /jobs/17 on n[1-2]; `shoal fetch 17` copies them\n"
    )


FINISH: dict[str, Callable[[Session, LogsResult], None]] = {
    "logs": lambda session, result: finish_logs(session, result, None, False),
    "logs -f": lambda session, result: finish_follow(session, result, None),
    "run --wait": lambda session, result: finish_wait(session, SubmittedJob("17", "x", "p", 1, 1, "", 0, ""), result),
}


@cases("command", *FINISH)
def test_unreachable_nodes_are_reported_by_every_log_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    failures = {"n9": Unreachable("n9", "does not answer", hint="is it up?")}
    result = LogsResult("17", (LogLine(1, 0, 0, "a"),), JobRecord("17", "COMPLETED"), None, failures)
    session = Session(json=False)
    FINISH[command](session, result)
    said = capsys.readouterr()
    assert session.status == 3 and "✗ n9: does not answer" in said.err and "is it up?" in said.err
    assert ("job 17: completed" in said.err) == (command == "run --wait")
    FINISH[command](Session(json=True), result)
    told = json.loads(capsys.readouterr().out)
    assert list(told["failures"]) == ["n9"] and told["lines"][0]["text"] == "a" and told["record"]["id"] == "17"


SENT = SubmittedJob("17", "train", "main", 2, 4, "c0de", 2048, "")
LEFT_OUT = LeftOut(7, 3 << 20, ("data/[a].bin", "b.bin"), links=("mnt -> /mnt",), submodules=("third/x",))


@cases(
    "fields, lines",
    ({}, []),
    ({"shared": False, "nodes": 1}, []),
    ({"shared": False}, ["  checkpoints need storage that its nodes share: name it with --directory"]),
    ({"array": True}, []),
    ({"traces": "/jobs/17/profile"}, ["  its profile will be on its nodes in /jobs/17/profile"]),
    (
        {"left_out": LEFT_OUT},
        [
            "  .gitignore kept 7 files (3.0 MiB) from being sent: data/[a].bin, b.bin, …",
            "  --include PATTERN sends them",
            "  links that leave the tree lead nowhere on nodes without their targets: mnt -> /mnt",
            "  submodules without files: third/x; `git submodule update --init` gets them",
        ],
    ),
)
def test_submitted_job_shows_what_was_not_sent_and_how_to_follow_it(fields: dict[str, Any], lines: list[str]) -> None:
    job = replace(SENT, **fields)
    nodes = "2 nodes" if job.nodes == 2 else "1 node"
    log = "17_N` shows what its task N prints" if job.array else "17` shows what it prints"
    assert screen_text(show_submitted, job).splitlines() == [
        f"✓ job 17 (train): 4 processes on {nodes} of main; 2 KiB sent",
        f"  `shoal logs -f {log}",
        *lines,
    ]


def test_watched_job_says_what_ctrl_c_does() -> None:
    _, second = screen_text(lambda console: show_submitted(console, SENT, watched=True)).splitlines()
    assert second == "  Ctrl-C leaves it running; a second one within two seconds cancels it"


@cases(
    "progress, text",
    ({}, ""),
    ({"step": 3, "total_steps": None, "loss": None}, "step 3"),
    ({"step": 3, "diverged": True, "loss": None}, "step 3, the loss is no longer a number"),
    (
        {"step": 3, "total_steps": 9, "loss": 1.0, "samples_per_second": 5400.4, "mfu": 0.41, "eta_seconds": 200},
        "step 3/9, loss 1, 5400 samples/s, MFU 41%, 3 min left",
    ),
)
def test_progress_fits_on_a_line(progress: dict[str, object], text: str) -> None:
    assert progress_text(progress) == text


def test_interrupted_watch_reports_that_the_job_continues() -> None:
    with pytest.raises(Interrupted) as told, keep_running("17"):
        raise Interrupted("stopped")
    assert told.value.message == "job 17 goes on"
    assert told.value.hint == "`shoal logs -f 17` shows it, `shoal cancel 17` ends it"


@cases(
    "size, text", (0, "0 bytes"), (1023, "1023 bytes"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 40, "5120.0 GiB")
)
def test_sizes_have_a_unit(size: int, text: str) -> None:
    assert format_bytes(size) == text


def test_fetched_files_and_those_that_were_not_are_shown() -> None:
    skipped = tuple(SkippedFile(f"link{number}\x1b", "a link that leaves the job's files") for number in range(7))
    result = FetchResult("17", "/jobs/17", "job-17", 1, 2048, 3, skipped)
    lines = screen_text(lambda console: show_fetched(console, console, result)).splitlines()
    assert lines[0] == "not copied: link0\\x1b: a link that leaves the job's files"
    assert lines[5] == "not copied: 2 more; --json names them"
    assert lines[6] == "✓ 1 file (2.0 KiB) of job 17 in job-17; 3 were here already"
    assert plain(result)["skipped"][0] == {"name": "link0\x1b", "why": "a link that leaves the job's files"}
