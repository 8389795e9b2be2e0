"""MPI that does not start: the words of Open MPI 4.1 and PMIx lead to their cause, and others to none."""

from tests.support.cases import cases

from shoal.jobs.failure import FailureReason, explain_failure
from shoal.jobs.logs import BATCH, JobLogs, LogLine, RankEnd
from shoal.jobs.record import JobRecord

FAILED = JobRecord("7", "FAILED", exit_code=1, nodes="fish[1-2]", batch_host="fish1")
ORTE = (
    "--------------------------------------------------------------------------",
    "It looks like orte_init failed for some reason; your parallel process is",
    "likely to abort.  There are many reasons that a parallel process can",
    "fail during orte_init; some of which are due to configuration or",
    "environment problems.",
    "  orte_ess_init failed",
)
CASES = {
    "without PMIx (--mpi=none or pmi2)": (
        "[fish1:00123] OPAL ERROR: Unreachable in file ext3x_client.c at line 112",
        'The application appears to have been direct launched using "srun",',
        "but OMPI was not built with SLURM's PMI support and therefore cannot",
        "execute. There are several options for building PMI support under",
        "*** An error occurred in MPI_Init",
    ),
    "(TMPDIR) is missing": (
        "[fish1:00123] [[1,0],0] ORTE_ERROR_LOG: Error in file util/session_dir.c at line 107",
        *ORTE,
    ),
    "no room left in /tmp or /dev/shm": (*ORTE, "PMIX ERROR: OUT-OF-RESOURCE in file dstore_segment.c at line 207"),
    "of different releases": ("PMIX ERROR: UNPACK-PAST-END in file unpack.c", *ORTE),
    "could not call back": (
        "ORTE was unable to reliably start one or more daemons.",
        "This usually is caused by:",
        "* compilation of the orted with dynamic libraries when static are required",
    ),
    "no known cause": ORTE,
}


def explain(lines: tuple[str, ...], *, rank: int) -> FailureReason:
    """The reason of a job whose rank, or mpirun in its batch script, printed these lines."""
    entries = tuple(LogLine(1.0 + number / 100, rank, 0, text) for number, text in enumerate(lines))
    ends = () if rank == BATCH else (RankEnd(rank, "fish1", 0, 0.0, 2.0, 1),)
    reason = explain_failure(FAILED, JobLogs(entries, ends))
    assert reason is not None
    return reason


@cases("rank", 0, BATCH)
@cases("cause", *CASES)
def test_words_of_mpi_lead_to_their_cause(cause: str, rank: int) -> None:
    reason = explain(CASES[cause], rank=rank)
    assert reason.kind == "start" and reason.text.startswith("MPI did not start: ") and cause in reason.text
    assert reason.fix and 0 < len(reason.details) <= 10 and reason.node == "fish1"


@cases(
    "lines",
    ("Traceback (most recent call last):", "  File 'a.py'", "RuntimeError: the MPI_Init of my library timed out"),
    ("mpirun noticed that process rank 1 with PID 9 on node fish2 exited on signal 9 (Killed).",),
    ("the results are in orte.txt",),
)
def test_other_failures_are_not_taken_for_it(lines: tuple[str, ...]) -> None:
    assert "MPI did not start" not in explain(lines, rank=0).text


def test_traceback_of_a_rank_counts_more_than_the_words_around_it() -> None:
    lines = ("Traceback (most recent call last):", "ValueError: bad shard", "*** An error occurred in MPI_Init_thread")
    assert "bad shard" in explain(lines, rank=0).text
