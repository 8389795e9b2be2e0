"""Jobs that ended long ago, from slurmctld's file and from slurmdbd."""

from dataclasses import replace

from tests.support.cases import cases

from shoal.jobs.failure import NO_OUTPUT_SIGNAL, explain_failure
from shoal.jobs.logs import JobLogs
from shoal.jobs.record import SACCT_COMMAND, JobRecord, merge_records, parse_jobcomp, parse_sacct
from shoal.slurm.state import JOB_RECORD
from shoal.verbs.logs import exclude_known

FILE = """\
JobId=3 UserId=root(0) GroupId=root(0) Name=true JobState=COMPLETED Partition=main TimeLimit=UNLIMITED \
StartTime=2026-11-15T09:54:03 EndTime=2026-11-15T09:54:03 NodeList=gpu1 NodeCnt=1 ProcCnt=1 WorkDir=/tmp \
ReservationName= Tres=cpu=1,mem=470M,node=1,billing=1 Account=root QOS=normal WcKey= Cluster=reef \
SubmitTime=2026-11-15T09:54:03 EligibleTime=2026-11-15T09:54:03 DerivedExitCode=0:0 ExitCode=0:0
JobId=1 UserId=ann(1001) GroupId=ann(1001) Name=a name | JobId=9
 with = things JobState=FAILED Partition=main TimeLimit=1500 \
StartTime=2026-11-13T09:54:03 EndTime=2026-11-15T10:54:05 NodeList=gpu[1-2] NodeCnt=2 ProcCnt=1 WorkDir=/tmp \
ReservationName= Tres=cpu=1 Account=root QOS=normal WcKey= Cluster=reef SubmitTime=2026-11-13T09:54:03 \
EligibleTime=2026-11-13T09:54:03 ArrayJobId=1 ArrayTaskId=7 DerivedExitCode=0:0 ExitCode=3:0
JobId=4 UserId=bob(1002) GroupId=bob(1002) Name=late JobState=CANCELLED Partition=main TimeLimit=30 StartTime=Unknown \
EndTime=2026-11-15T11:00:00 NodeList=(null) NodeCnt=0 ProcCnt=0 WorkDir=/tmp ReservationName= Tres= Account=root \
QOS=normal WcKey= Cluster=reef SubmitTime=2026-11-15T09:54:03 EligibleTime=Unknown DerivedExitCode=0:0 ExitCode=0:15
"""


def sacct(*fields: str) -> str:
    return JOB_RECORD.join(fields) + "\n"


def test_name_of_a_job_is_no_record_of_an_ended_job() -> None:
    forged = "\nJobId=9 UserId=root(0) GroupId=root(0) Name=y JobState=FAILED"
    jobs = parse_jobcomp(FILE.replace("Name=late", f"Name=late{forged}"))
    assert [(job.id, job.user) for job in jobs] == [("3", "root"), ("1_7", "ann"), ("4", "bob")]


def test_jobcomp_file_is_parsed_under_any_job_name() -> None:
    done, failed, cancelled = parse_jobcomp(FILE)
    assert (done.id, done.state, done.name, done.user, done.run_time) == ("3", "COMPLETED", "true", "root", "00:00:00")
    assert (failed.id, failed.number, failed.exit_code) == ("1_7", "1", 3)
    assert failed.name == "a name | JobId=9\n with = things"
    assert (failed.nodes, failed.node_count) == ("gpu[1-2]", 2)
    assert (failed.run_time, failed.time_limit) == ("2-01:00:02", "1-01:00:00")
    assert (cancelled.state, cancelled.nodes, cancelled.exit_signal) == ("CANCELLED", "", 15)
    assert (cancelled.run_time, cancelled.start) == ("00:00:00", "")


@cases("word", "REQUEUED", "PENDING", "PREEMPTED", "NODE_FAIL", "BOOT_FAIL")
def test_requeued_job_is_listed_once(word: str) -> None:
    again = FILE.splitlines()[0]
    requeued = again.replace("COMPLETED", word).replace("T09:54", "T08:54")
    assert [record.state for record in parse_jobcomp(f"{requeued}\n{again}\n")] == ["COMPLETED"]


@cases("word", "PREEMPTED", "NODE_FAIL")
def test_earlier_run_of_a_current_job_is_not_listed(word: str) -> None:
    turn = JobRecord("3", word, start="2026-11-15T08:54:03", end="2026-11-15T08:55:00")
    assert exclude_known([turn], [JobRecord("3", "PENDING", restarts=1)]) == []
    assert exclude_known([turn], [JobRecord("3", "PENDING")]) == [turn]  # the controller had lost its state
    failed = replace(turn, state="FAILED")
    assert exclude_known([failed], [JobRecord("3", "RUNNING", restarts=1)]) == [failed]


def test_reused_job_id_is_listed_twice() -> None:
    again = FILE.splitlines()[0]
    earlier = again.replace("2026-11-15", "2026-10-01")
    assert [record.start[:10] for record in parse_jobcomp(f"{earlier}\n{again}\n")] == ["2026-10-01", "2026-11-15"]


def test_empty_file_has_no_jobs() -> None:
    assert parse_jobcomp("") == []


def test_sacct_query_covers_all_users_and_every_run() -> None:
    assert {"-a", "-D", "-X", "1970-01-02"} <= set(SACCT_COMMAND)


def test_sacct_output_contains_only_ended_jobs() -> None:
    text = sacct("7", "CANCELLED by 0", "ann", "main", "gpu1", "1", "0:15", "2026-11-15T09:00:00",
                 "2026-11-15T09:10:00", "00:10:00", "UNLIMITED", "/home/ann", "a|b\nc")  # fmt: skip
    text += sacct("8_2", "RUNNING", "ann", "main", "gpu1", "1", "0:0", "2026-11-15T09:00:00", "Unknown", "00:10:00",
                  "01:00:00", "/home/ann", "x")  # fmt: skip
    [record] = parse_sacct(text)
    assert (record.id, record.state, record.name, record.exit_signal) == ("7", "CANCELLED", "a|b\nc", 15)


def test_job_in_both_sources_is_listed_once() -> None:
    text = sacct("3", "COMPLETED", "root", "main", "gpu1", "1", "0:0", "2026-11-15T09:54:03", "2026-11-15T09:54:03",
                 "00:00:01", "UNLIMITED", "/tmp", "true")  # fmt: skip
    found = merge_records(parse_jobcomp(FILE), parse_sacct(text))
    assert [(record.id, record.run_time) for record in found] == [
        ("3", "00:00:01"),
        ("1_7", "2-01:00:02"),
        ("4", "00:00:00"),
    ]


def test_reason_needs_no_path_that_records_lack() -> None:
    record = replace(parse_jobcomp(FILE)[1], exit_code=0, exit_signal=NO_OUTPUT_SIGNAL)
    reason = explain_failure(record, JobLogs())
    assert reason is not None
    assert reason.text == "no rank of the job has started: gpu[1-2] could not open the file for its output"
