"""A stopped job is requeued with its own id, unless it was cancelled."""

import os
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.train.env import requeue_job_id
from shoal.train.run import requeue

SHOW = "JobId=7 JobName=train\\n   JobState={state} Reason={reason} Dependency=(null)\\n   Requeue=1 Restarts=0"


def _slurm(tmp_path: Path, state: str = "RUNNING", reason: str = "None", status: int = 0) -> str:
    """A directory for PATH with a scontrol that records its arguments."""
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        f'echo "$*" >> {tmp_path}/asked\n'
        f'[ "$1" = show ] && {{ printf "{SHOW.format(state=state, reason=reason)}\\n"; exit 0; }}\n'
        f'[ {status} = 0 ] || echo "Requested operation is presently disabled" >&2\n'
        f"exit {status}\n"
    )
    scontrol.chmod(0o755)
    return str(tmp_path)


@cases(
    "environ, name",
    ({}, ""),
    ({"SLURM_JOB_ID": "12"}, "12"),
    ({"SLURM_JOB_ID": "15", "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "3"}, "12_3"),
    ({"SLURM_JOB_ID": "21", "SLURM_HET_JOB_ID": "20"}, "20"),
)
def test_job_has_the_id_that_scontrol_expects(environ: dict[str, str], name: str) -> None:
    assert requeue_job_id(environ) == name


@cases("state, reason", ("RUNNING", "None"), ("COMPLETING", "TimeLimit"))
def test_running_job_and_job_at_its_time_limit_are_requeued(tmp_path: Path, state: str, reason: str) -> None:
    environ = {"PATH": _slurm(tmp_path, state, reason), "SLURM_JOB_ID": "7"}
    assert requeue(environ=environ) == "requeued" and (tmp_path / "asked").read_text() == "show job 7\nrequeue 7\n"


def test_answer_is_read_although_slurm_kills_the_job_at_once(tmp_path: Path) -> None:
    environ = {"PATH": f"{_slurm(tmp_path)}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("exit 0\n", 'kill -TERM "$$"; exit 0\n'))
    assert requeue(environ=environ) == "requeued"


def test_requeued_job_is_not_requeued_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = _slurm(tmp_path, "COMPLETING", "None")  # its first turn ends, and Slurm counts no restart
    assert requeue(environ={"PATH": path, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "0"}) == "cancelled"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(scontrol.read_text().replace("Restarts=0", "Restarts=3"))
    assert requeue(environ={"PATH": path, "SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}) == "requeued"
    assert "requeue" not in (tmp_path / "asked").read_text() and "job 7 is already requeued" in caplog.text


@cases("state", "CANCELLED", "COMPLETING")
def test_cancelled_job_is_not_requeued(tmp_path: Path, state: str, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PATH": _slurm(tmp_path, state), "SLURM_JOB_ID": "7"}
    assert requeue(environ=environ) == "cancelled" and (tmp_path / "asked").read_text() == "show job 7\n"
    assert "job 7 was cancelled and is not requeued" in caplog.text


def test_scontrol_error_is_quoted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    environ = {"PATH": _slurm(tmp_path, status=1), "SLURM_JOB_ID": "7"}
    assert requeue(environ=environ) == "failed"
    assert "cannot requeue job 7: Requested operation is presently disabled" in caplog.text


def test_missing_scontrol_leaves_the_requeue_to_the_batch_script(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert requeue(environ={"PATH": str(tmp_path), "SLURM_JOB_ID": "7"}) == "failed"
    assert "no scontrol on this node" in caplog.text and requeue(environ={}) == "failed"
