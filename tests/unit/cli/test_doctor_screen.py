"""What a person sees of findings: `shoal doctor`, and the hints of `shoal status` and `shoal jobs`."""

import re
from dataclasses import replace

import pytest
from tests.support.cases import cases
from tests.support.screens import screen_text
from tests.unit.cli.test_screens import STATUS, ended
from typer.testing import CliRunner

from shoal.cli.app import make_app
from shoal.cli.cluster_screens import show_status
from shoal.cli.doctor_command import finish_doctor
from shoal.cli.doctor_screen import show_doctor, show_history
from shoal.cli.job_screens import show_jobs
from shoal.cli.session import Session
from shoal.health.diagnosis import ClusterView, Diagnosis, diagnose
from shoal.health.report import HostReport
from shoal.jobs.record import JobRecord
from shoal.slurm.state import JobState, NodeState
from shoal.verbs.doctor import DoctorResult, FixOutcome
from shoal.verbs.jobs import JobsResult, JobView

HELD = "launch failed requeued held"
VIEW = ClusterView(
    "c1",
    nodes={
        "n1": NodeState("n1", ("IDLE", "DRAIN"), "Kill task failed", "root", "2026-11-17T10:00:00"),
        "n2": NodeState("n2", ("IDLE", "DRAIN"), "fan [red]broken\x1b[2J", "anna", "2026-11-17T09:00:00"),
    },
    jobs=(JobState("7", "PENDING", "bob", "main", "", HELD, "0:00", "1:00", 1, "train"),),
    reports={
        "n1": HostReport(services={"slurmd": "failed"}),
        "n2": HostReport(),
        "n3": HostReport(services={"slurmd": "inactive"}),
    },
)
RESULT = DoctorResult("reef", tuple(diagnose(VIEW)), ("n1", "n2", "n3"))


def test_findings_have_evidence_cause_fix_and_cost() -> None:
    text = screen_text(show_doctor, RESULT, width=300)
    assert text.count("  cause: ") == text.count("  fix: ") == 4
    [stopped] = [block for block in re.split(r"\n(?=error|info|✗)", text) if block.startswith("error n[1,3]")]
    assert stopped.splitlines()[:3] == [
        "error n[1,3]: slurmd does not run (slurmd-stopped)",
        "    n1: slurmd is failed",
        "    n3: slurmd is inactive",
    ]
    assert "  --fix applies it; cost: nothing" in stopped
    assert "error job 7: a node could not start the job, and Slurm holds it (job-launch-failed)\n" in text
    assert f"    job 7 of bob: {HELD}\n" in text
    assert "error n1: processes of a job did not end (kill-task-failed, since 2026-11-17T10:00:00)" in text
    assert "  Shoal cannot apply it yet: first: slurmd does not run (slurmd-stopped)" in text
    assert "  --fix applies it if it is named; cost: nothing" in text
    assert "info n2: a person took the node out of service (person-drain, since 2026-11-17T09:00:00)" in text
    assert "    fan [red]broken\\x1b[2J (anna)\n" in text
    assert text.endswith("\n✗ reef: 4 errors; checked 3 hosts\n")


@cases(
    "result, status, text",
    (DoctorResult("reef", checked=("n1",)), 0, "✓ reef: nothing is wrong; checked 1 host\n"),
    (DoctorResult("reef", (Diagnosis("person-drain", "info", "n1", "so"),)), 0, "✓ reef: nothing is wrong\n"),
    (DoctorResult("reef", (Diagnosis("job-waits-for-node", "warning", "", "so", "7"),)), 1, "✗ reef: 1 warning\n"),
    (RESULT, 1, "✗ reef: 4 errors; checked 3 hosts\n"),
    (DoctorResult("reef", unchecked=("n1",)), 3, "✓ reef: nothing is wrong; not checked: n1\n"),
)
def test_exit_code_and_summary(
    result: DoctorResult, status: int, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert ended(Session(json=False), lambda session: finish_doctor(session, result)) == status
    assert capsys.readouterr().out.endswith(text)


def test_fixes_and_their_history_are_shown() -> None:
    outcomes = (
        FixOutcome("munge-key", "n1", "", "up", True, time=1_700_000_000.0, by="anna@desk"),
        FixOutcome("job-launch-failed", "", "7", "release", False, "no such job", 1_700_000_000.0, "anna@desk"),
    )
    assert screen_text(show_doctor, DoctorResult("reef", fixes=outcomes)).splitlines()[:2] == [
        "✓ fixed: munge-key, n1 (up)",
        "✗ not fixed: job-launch-failed, job 7 (release): no such job",
    ]
    first, second = screen_text(show_history, outcomes).splitlines()
    assert first.endswith("anna@desk fixed munge-key, n1 (up)")
    assert second.endswith("anna@desk did not fix job-launch-failed, job 7 (release): no such job")
    assert screen_text(show_history, ()) == "no fix was applied yet\n"


def test_finding_without_fix_is_a_usage_error() -> None:
    done = CliRunner().invoke(make_app("doctor"), ["doctor", "low-memory"])
    assert done.exit_code == 2 and "use `shoal doctor --fix low-memory`" in done.output


def test_status_and_jobs_hint_at_what_the_doctor_knows() -> None:
    nodes = tuple(NodeState(name, ("IDLE", "DRAIN"), "Epilog error") for name in ("n1", "n2"))
    said = screen_text(show_status, replace(STATUS, nodes=nodes, jobs=VIEW.jobs))
    assert "n[1-2]: the epilog failed on the node; see `shoal doctor --node n[1-2]`\n" in said
    assert "a node could not start the job, and Slurm holds it: `shoal doctor --job 7`" in said
    held = JobRecord("7", "PENDING", reason=HELD.replace(" ", "_"))
    waits = JobView(JobRecord("8", "PENDING", reason="Resources"))
    said = screen_text(show_jobs, JobsResult("reef", (JobView(held), waits)))
    assert "a node could not start the job, and Slurm holds it: `shoal doctor --job 7`" in said and "Resources" in said
