"""Why a job failed: the first rank by time is the cause, not those that died after it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.cases import cases

from shoal.contract import EXIT_REQUEUE, EXIT_UNSAVED
from shoal.jobs.failure import explain_failure, last_traceback
from shoal.jobs.logs import BATCH, JobLogs, LogLine, RankEnd
from shoal.jobs.record import (
    JobComment,
    JobRecord,
    combine_records,
    doubtful_ids,
    is_plain,
    parse_answer,
    parse_records,
)

CAPTURED = (Path(__file__).parent / "show_job_22.05.txt").read_text()
FAILED = JobRecord("7", "FAILED", exit_code=143, nodes="fish[1-2]", batch_host="fish1", time_limit="00:01:00")
TRACEBACK = (
    "Traceback (most recent call last):",
    '  File "fail.py", line 7, in <module>',
    "    inner()",
    "ValueError: bad data in shard 7",
)
SRUN = (
    "srun: error: fish2: task 2: Exited with exit code 1",
    "srun: launch/slurm: _step_signal: Terminating StepId=7.0",
    "slurmstepd-fish1: error: *** STEP 7.0 ON fish1 CANCELLED AT 2026-11-15T04:06:23 ***",
)


def printed(rank: int, *lines: str, restart: int = 0, at: float = 1.0) -> list[LogLine]:
    return [LogLine(at + number / 100, rank, restart, text) for number, text in enumerate(lines)]


def ended(rank: int, status: int, at: float, **more: Any) -> RankEnd:
    return RankEnd(rank, f"fish{rank // 2 + 1}", more.pop("restart", 0), 0.0, at, status, **more)


def logs(*parts: list[LogLine] | RankEnd) -> JobLogs:
    """What ranks printed, and how they ended."""
    lines = [line for part in parts if isinstance(part, list) for line in part]
    return JobLogs(tuple(lines), tuple(part for part in parts if isinstance(part, RankEnd)))


@cases(
    "said, status, text, fix",
    (
        "shoal: cannot start nsys: No such file or directory",
        127,
        "rank 0 on fish1: cannot start nsys: No such file or directory",
        "install NVIDIA Nsight Systems on the nodes, or leave out --profile",
    ),
    (
        "/usr/bin/python3: No module named kernprof",
        1,
        "rank 0 on fish1 could not be profiled: /usr/bin/python3: No module named kernprof",
        "install line_profiler for the Python of the job, or leave out --profile",
    ),
)
def test_missing_profiler_is_reported_with_the_fix(said: str, status: int, text: str, fix: str) -> None:
    reason = explain_failure(FAILED, logs(printed(0, said), ended(0, status, 1.0)))
    assert reason is not None and (reason.kind, reason.text, reason.fix) == ("start", text, fix)


@cases(
    "status, said",
    (1, "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 8000ms for send operation"),
    (-6, "[rank1]:[E] [Rank 1] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)"),
)
def test_rank_timeout_is_reported_with_a_hint_to_other_ranks(status: int, said: str) -> None:
    reason = explain_failure(FAILED, logs(printed(1, said), ended(1, status, 1.0), ended(0, 143, 1.1)))
    assert reason is not None and (reason.kind, reason.rank) == ("script", 1)
    assert reason.fix.startswith("it waited for another rank, which hangs, is slow, or took another way: `shoal logs`")


def test_rank_killed_without_a_warning_is_the_first_failure() -> None:
    reset = "RuntimeError: Connection reset by peer"
    killed = (ended(0, -9, 1.0), ended(3, 1, 1.1), ended(2, -15, 1.2, signals=("SIGTERM",)))
    reason = explain_failure(FAILED, JobLogs(tuple(printed(3, reset)), killed))
    assert reason is not None and reason.text == "rank 0 on fish1 was ended by SIGKILL"
    assert reason.fix.startswith("Slurm did not do that: `shoal ssh fish1 journalctl -k` tells if memory")
    late = (ended(0, -9, 1.0, signals=("SIGTERM",)), ended(3, 1, 1.1))  # by clocks that differ
    reason = explain_failure(FAILED, JobLogs(tuple(printed(3, reset)), late))
    assert reason is not None and (reason.rank, reset in reason.text) == (3, True)


FULL = "the checkpoint of step 90 (end) FAILED: rank 0: OSError: [Errno 28] No space left on device"


@cases(
    "record, ends, lines, text",
    (
        JobRecord("7", "FAILED", exit_code=EXIT_UNSAVED),
        (ended(0, EXIT_UNSAVED, 1.0),),
        printed(0, f"{FULL} (failure 2 of this process)", "training is done, and its last state ...", "bye"),
        "its last state could not be saved: rank 0: OSError: [Errno 28] No space left on device",
    ),
    # torchrun has its own status; on a full disk a rank may not be able to record how it ended.
    (FAILED, (ended(0, EXIT_UNSAVED, 1.0),), [], "its last state could not be saved"),
    (JobRecord("7", "FAILED", exit_code=EXIT_UNSAVED), (), [], "its last state could not be saved"),
)
def test_failed_final_checkpoint_is_reported_with_the_fix(
    record: JobRecord, ends: tuple[RankEnd, ...], lines: list[LogLine], text: str
) -> None:
    reason = explain_failure(record, logs(lines, *ends))
    assert reason is not None and (reason.kind, reason.text) == ("checkpoint", text)
    assert reason.fix.startswith("solve that, and run it again with the same directory for its checkpoints")


def test_stopped_job_without_requeue_is_reported_with_the_fix() -> None:
    reason = explain_failure(JobRecord("7", "FAILED", exit_code=EXIT_REQUEUE), logs(ended(0, EXIT_REQUEUE, 1.0)))
    assert reason is not None and reason.text.startswith("it was stopped before its end, saved its work")
    assert reason.fix.endswith("without --no-requeue it does so by itself")


@cases("comment", "(null)", "mine", "shoal:", "shoal:../x/y")
def test_foreign_comment_is_not_parsed(comment: str) -> None:
    [record] = parse_records(f"JobId=7 JobState=RUNNING WorkDir=/jobs Comment={comment}\n")
    assert (record.note, record.traces) == (None, "")


def test_wait_reason_for_rented_nodes_is_read_only_while_pending() -> None:
    text = "JobId=7 JobName=AdminComment=x UserId=a(1) JobState={} AdminComment=lambda out of a10, trying gcp Node=\n"
    assert [record.waits_for for state in ("PENDING", "RUNNING") for record in parse_records(text.format(state))] == [
        "lambda out of a10, trying gcp",
        "",
    ]
    [last] = parse_records("JobId=7 JobState=PENDING Power= AdminComment=out of a10 \n")
    assert last.waits_for == "out of a10"


def test_job_comment_is_parsed() -> None:
    [record] = parse_records("JobId=7 JobState=RUNNING WorkDir=/jobs Comment=shoal:c0de/11b/nsys\n")
    assert record.note == JobComment("c0de", "11b", "nsys") and record.traces == "/jobs/7/profile"
    assert record.comment == str(record.note)


def test_slurm_records_are_parsed() -> None:
    records = parse_records(CAPTURED)
    assert [(r.id, r.number, r.state, r.name, r.restarts) for r in records] == [
        ("7", "7", "FAILED", "fail", 0),
        ("10", "10", "COMPLETED", "again", 1),
        ("12_0", "14", "RUNNING", "slow", 0),
        ("12_2-3%2", "12", "PENDING", "slow", 0),
        ("13", "13", "PENDING", "slow", 0),
        ("16", "16", "RUNNING", "slow", 0),
    ]
    failed = records[0]
    assert (failed.exit_code, failed.exit_signal, failed.reason) == (143, 0, "NonZeroExitCode")
    assert (failed.nodes, failed.batch_host, failed.node_count) == ("fish[1-2]", "fish1", 2)
    assert (failed.work_dir, failed.output) == ("/var/lib/shoal/jobs/reef", "/var/lib/shoal/jobs/reef/7.out")
    assert (records[4].reason, records[4].nodes, records[4].node_count) == ("Dependency", "", 1)
    assert [r.active for r in records] == [False, False, True, True, True, True]
    assert [r.failed for r in records] == [True, False, False, False, False, False]


def test_job_name_cannot_inject_fields() -> None:
    evil = CAPTURED.splitlines()[0].replace("JobName=fail", "JobName=x JobState=COMPLETED NodeList=evil")
    [record] = parse_records(evil)
    assert (record.name, record.state, record.nodes) == ("x JobState=COMPLETED NodeList=evil", "FAILED", "fish[1-2]")


FORGED = "x UserId=ann(1001) JobState=COMPLETED \nJobId={} JobName=y UserId=root(0) JobState=FAILED NodeList=fish9 \nz"
RECORD = "JobId={} JobName={} UserId={} GroupId=x(1) JobState=RUNNING NodeList=fish1 Comment={} \n"
OWNERS = {"7": "1001", "8": "0"}


@cases("free", "name", "comment")
def test_newline_in_a_job_is_no_record_of_another_job(free: str) -> None:
    name, comment = (FORGED.format(99), "c") if free == "name" else ("a", FORGED.format(99))
    text = RECORD.format(7, name, "ann(1001)", comment) + RECORD.format(8, "b", "root(0)", "c")
    assert [(r.id, r.user) for r in parse_records(text, OWNERS)] == [("7", "ann"), ("8", "root")]


def test_record_that_is_there_twice_is_asked_for_alone() -> None:
    alone = RECORD.format(8, "b", "root(0)", "c")
    text = RECORD.format(7, FORGED.format(8), "ann(1001)", "c") + alone
    assert parse_records(text, OWNERS) == [] and doubtful_ids(text, OWNERS) == ["7", "8"]
    [record] = parse_answer(alone, "8", OWNERS)
    assert (record.id, record.state, record.nodes) == ("8", "RUNNING", "fish1")
    [forger] = parse_answer(text.removesuffix(alone), "7", OWNERS)
    assert (forger.user, forger.comment) == ("ann", "c")
    answers = {"8": alone, "7": text.removesuffix(alone)}
    assert combine_records(text, OWNERS, answers) == [forger, record], "the oldest first"


def test_answer_about_a_job_has_no_record_of_another_owner() -> None:
    forged = "JobId=8 ArrayJobId=7 ArrayTaskId=1 JobName=x UserId=root(0) JobState=FAILED"
    text = RECORD.format(7, f"x UserId=root(0) JobState=FAILED\n{forged}", "ann(1001)", "c")
    [record] = parse_answer(text, "7", OWNERS)
    assert (record.id, record.user, record.state) == ("7", "ann", "RUNNING")
    assert not is_plain(text) and is_plain(RECORD.format(7, "x", "ann(1001)", "c"))
    assert not is_plain(RECORD.format(7, "x UserId=root(0)", "ann(1001)", "c"))


def test_successful_job_has_no_reason() -> None:
    assert explain_failure(JobRecord("1", "COMPLETED"), JobLogs()) is None
    assert explain_failure(JobRecord("1", "RUNNING"), JobLogs()) is None


def test_traceback_is_from_the_first_failed_rank() -> None:
    lines = [
        *printed(2, "start 2", *TRACEBACK, at=2.0),
        *printed(0, "Traceback (most recent call last):", "RuntimeError: Connection closed by peer", at=2.5),
        *printed(BATCH, *SRUN, at=3.0),
    ]
    # srun ended rank 1 before rank 0's end was recorded, so rank 1's record comes first.
    ends = (ended(1, -15, 1.9), ended(2, 1, 2.1), ended(0, 1, 2.6), ended(3, 143, 2.7))
    reason = explain_failure(FAILED, logs(lines, *ends))
    assert reason is not None
    assert (reason.kind, reason.rank, reason.node, reason.details) == ("script", 2, "fish2", TRACEBACK)
    assert reason.text == "rank 2 on fish2 failed first, with exit status 1: ValueError: bad data in shard 7"


def test_multi_line_error_is_shortened_to_its_first_line() -> None:
    lines = printed(
        0,
        *TRACEBACK[:3],
        "shoal.train.errors.BindingError: ranks 0 and 1 are on the same GPU of fish1: GPU-7",
        "  found: rank  node",
        "  fix: #SBATCH --gpus-per-node=2 --ntasks-per-node=2",
    )
    reason = explain_failure(FAILED, logs(lines, ended(0, 1, 2.0)))
    assert reason is not None and reason.text == (
        "rank 0 on fish1 failed first, with exit status 1: shoal.train.errors.BindingError: ranks 0 and 1 are on the "
        "same GPU of fish1: GPU-7"
    )
    assert reason.details[-1] == lines[-1].text


def test_data_worker_killed_by_the_stop_signal_is_reported_with_the_fix() -> None:
    said = "RuntimeError: DataLoader worker (pid 2656) is killed by signal: Terminated. "
    lines = printed(0, *(f"[rank0]: {line}" for line in (*TRACEBACK[:3], said)))
    reason = explain_failure(FAILED, logs(lines, ended(0, 1, 2.0)))
    assert reason is not None and reason.text.endswith(f"exit status 1: {said}")
    assert reason.fix.endswith("ended its data workers first: DataLoader(worker_init_fn=worker_signals)")
    assert reason.details == (*TRACEBACK[:3], said), "without torch's word for the rank"


def test_missing_package_on_the_nodes_is_reported_with_the_fix() -> None:
    lines = printed(0, "Traceback (most recent call last):", "ModuleNotFoundError: No module named 'torch'")
    reason = explain_failure(FAILED, logs(lines, ended(0, 1, 1.0)))
    assert reason is not None and "No module named 'torch'" in reason.text
    assert "`shoal env build` and `shoal run --env NAME`" in reason.fix and "the working tree?" in reason.fix


def test_write_to_an_image_is_reported_with_the_fix() -> None:
    last = "OSError: [Errno 30] Read-only file system: '/opt/note'"
    reason = explain_failure(FAILED, logs(printed(0, *TRACEBACK[:3], last), ended(0, 1, 1.0)))
    assert reason is not None and "'/opt/note'" in reason.text and "use --container-name" in reason.fix


def test_last_run_of_a_requeued_job_counts() -> None:
    lines = [*printed(0, *TRACEBACK), *printed(0, "OSError: disk full", restart=1, at=9.0)]
    ends = (ended(0, 1, 1.5), ended(0, 2, 9.5, restart=1))
    reason = explain_failure(JobRecord("7", "FAILED", restarts=1), logs(lines, *ends))
    assert reason is not None and reason.details == ("OSError: disk full",)


def test_chained_exceptions_are_shown_together() -> None:
    chain = (
        *TRACEBACK,
        "",
        "The above exception was the direct cause of the following exception:",
        "",
        *("Traceback (most recent call last):", "RuntimeError: cannot load"),
    )
    assert last_traceback(("noise", *chain)) == chain
    assert last_traceback((*TRACEBACK, "went on", *TRACEBACK)) == TRACEBACK
    assert last_traceback(("a", "b")) == ("a", "b")


def test_long_traceback_is_shortened_in_the_middle() -> None:
    frames = [f"  frame {number}" for number in range(100)]
    lines = printed(0, "before", TRACEBACK[0], *frames, TRACEBACK[-1], *("behind",) * 100)
    reason = explain_failure(FAILED, logs(lines, ended(0, 1, 9.0)))
    assert reason is not None and reason.text.endswith("exit status 1: ValueError: bad data in shard 7")
    assert len(reason.details) == 50 and reason.details[0] == TRACEBACK[0]
    assert reason.details[24:27] == ("  frame 23", "...", "  frame 92")
    assert reason.details[33:] == ("  frame 99", TRACEBACK[-1]) + ("behind",) * 15


SILENT_STORE = "torch.distributed.DistNetworkError: The client socket has timed out after 15s"
NO_PYTHON = "slurmstepd-fish1: error: execve(): /nope/python: No such file or directory"
UNREACHED = "torchrun on fish2 does not reach the one on the first node, at 10.0.0.1 port 17: no answer"
CUDA = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79 GiB"
CASES: dict[str, tuple[JobRecord, JobLogs, str, int | None, str]] = {
    "killed for memory by the kernel": (
        *(FAILED, logs(ended(1, 1, 5.0), ended(3, -9, 4.0, out_of_memory=True))),
        *("out of memory", 3, "rank 3 on fish2 was killed: the memory was used up"),
    ),
    "no memory on the node": (
        *(FAILED, logs(printed(2, f"[rank2]: {TRACEBACK[0]}", "[rank2]: MemoryError"), ended(2, 1, 2.0))),
        *("out of memory", 2, "rank 2 on fish2 ran out of memory on the node: MemoryError"),
    ),
    "no memory on the GPU": (
        *(FAILED, logs(printed(2, TRACEBACK[0], CUDA), ended(2, 1, 2.0))),
        *("out of memory", 2, f"rank 2 on fish2 ran out of memory on its GPU: {CUDA}"),
    ),
    "Slurm says out of memory": (
        JobRecord("7", "OUT_OF_MEMORY", nodes="fish1"),
        logs(printed(BATCH, "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0"), ended(1, -9, 2.0)),
        *("out of memory", 1, "rank 1 on fish1 was killed: the job's memory was used up"),
    ),
    "time limit after a warning": (
        JobRecord("7", "TIMEOUT", time_limit="00:01:00"),
        *(logs(ended(0, -15, 60.0, signals=("SIGUSR1", "SIGTERM"))), "time limit", None),
        "the job reached its time limit of 00:01:00; it was warned before, and did not ask to be queued again",
    ),
    "node failure": (
        JobRecord("7", "NODE_FAIL", nodes="fish[1-2]"),
        logs(
            printed(
                BATCH,
                "srun: error: Node failure on fish2",
                "slurmstepd-fish1: error: *** JOB 7 ON fish1 CANCELLED AT 2026-11-15T04:06:23 DUE TO NODE FAILURE,"
                " SEE SLURMCTLD LOG FOR DETAILS ***",
            )
        ),
        *("node failure", None, "a node of the job failed: fish2"),
    ),
    "node failure that Slurm does not name": (
        *(JobRecord("7", "NODE_FAIL", nodes="fish2"), JobLogs()),
        *("node failure", None, "a node of the job failed: fish2"),
    ),
    "rendezvous": (
        *(FAILED, logs(printed(1, TRACEBACK[0], SILENT_STORE), ended(1, 1, 2.0)), "rendezvous", 1),
        f"the ranks did not find each other; rank 1 on fish1 gave up first: {SILENT_STORE}",
    ),
    "crash": (
        *(FAILED, logs(ended(0, -11, 1.0), ended(1, -15, 2.0))),
        *("script", 0, "rank 0 on fish1 was ended by SIGSEGV"),
    ),
    "no such Python": (
        replace(FAILED, comment="shoal:ab/cd"),
        logs(printed(BATCH, NO_PYTHON, "srun: error: fish1: tasks 0-1: Exited with exit code 2")),
        *("start", None, f"no rank of the job has started: {NO_PYTHON}"),
    ),
    "no such program in the tree": (
        *(FAILED, logs(printed(0, "shoal: cannot start ./go: [Errno 8] Exec format error"), ended(0, 127, 1.0))),
        *("start", 0, "rank 0 on fish1: cannot start ./go: [Errno 8] Exec format error"),
    ),
    "torchrun of one node does not reach the other": (
        FAILED,
        logs(
            printed(
                *(BATCH, f"shoal: {UNREACHED}", *(f"  File torch, line {line}" for line in range(60))),
                "srun: error: fish2: task 1: Exited with exit code 1",
            )
        ),
        *("rendezvous", None, f"no rank of the job has started: {UNREACHED}"),
    ),
    "plain srun": (
        *(JobRecord("7", "FAILED", exit_code=2, reason="NonZeroExitCode"), JobLogs()),
        *("unknown", None, "it ended with exit status 2 (NonZeroExitCode)"),
    ),
    "plain sbatch": (
        JobRecord("7", "FAILED", exit_code=1, reason="NonZeroExitCode"),
        logs(printed(BATCH, *TRACEBACK, "srun: error: fish2: task 1: Exited with exit code 1")),
        *("unknown", None, f"it ended with exit status 1: {TRACEBACK[-1]}"),
    ),
    "nothing is known": (
        *(JobRecord("7", "FAILED", exit_code=2, reason="NonZeroExitCode", comment="shoal:ab/cd"), JobLogs()),
        *("unknown", None, "no rank of the job has started; it ended with exit status 2 (NonZeroExitCode)"),
    ),
    "the file for its output could not be opened": (
        *(JobRecord("7", "FAILED", exit_signal=53, batch_host="fish1", output="/scratch/none/7.log"), JobLogs()),
        *("start", None),
        "no rank of the job has started: fish1 could not open the file for its output, /scratch/none/7.log",
    ),
    "ranks died with their slurmstepd": (
        *(FAILED, logs(printed(BATCH, "shoal: lost in turn 0: rank 1 on fish2: killed with its slurmstepd", *SRUN))),
        *("node failure", None, "ranks of the job are gone: rank 1 on fish2: killed with its slurmstepd"),
    ),
    "ranks that died with their host in an earlier turn": (
        JobRecord("7", "FAILED", exit_code=1, restarts=1),
        logs(
            printed(BATCH, "shoal: lost in turn 0: rank 1 on fish2: the host was started again"),
            printed(1, "ValueError: bad", restart=1, at=3.0),
            ended(1, 1, 4.0, restart=1),
        ),
        *("script", 1, "rank 1 on fish1 failed first, with exit status 1: ValueError: bad"),
    ),
    "cancelled": (JobRecord("7", "CANCELLED"), JobLogs(), "cancelled", None, "the job was cancelled"),
    "preempted": (
        *(JobRecord("7", "PREEMPTED"), JobLogs()),
        *("cancelled", None, "the job was preempted by one of a higher partition"),
    ),
}


@cases("case", *CASES)
def test_reason_matches_the_case(case: str) -> None:
    record, logs, kind, rank, text = CASES[case]
    reason = explain_failure(record, logs)
    assert reason is not None and (reason.kind, reason.rank, reason.text) == (kind, rank, text)


def test_last_output_of_a_killed_rank_is_its_own() -> None:
    said = printed(0, "epoch 3", "tracking: no answer; records stay on disk, training continues")
    reason = explain_failure(FAILED, logs(said, ended(0, -9, 2.0)))
    assert reason is not None and reason.details == ("epoch 3",)


def test_job_that_slurm_never_queued_is_reported_as_rejected() -> None:
    rejected = JobRecord("17", "FAILED", exit_signal=1, start="2026-01-01T10:00:00", end="2026-01-01T10:00:00")
    reason = explain_failure(rejected, JobLogs())
    assert rejected.rejected and reason is not None
    assert reason.text == "Slurm rejected the job when it was submitted, and told who submitted it why"
    ran = replace(rejected, nodes="n1")
    reason = explain_failure(ran, JobLogs())
    assert not ran.rejected and reason is not None and "it ended with signal SIGHUP" in reason.text
