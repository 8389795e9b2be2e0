"""A job in a rented container: its batch script waits for its files, and ends once its results are fetched."""

import os
import shlex
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from tests.goldens import assert_golden
from tests.support.cases import cases
from tests.support.waiting import wait_for
from tests.unit.jobs.job_clusters import SHIPPED, resolved

from shoal.jobs import staging
from shoal.jobs.script import sbatch_script

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root acts as a job's user")
STAGED = replace(SHIPPED, staged=True)
LIMIT = 60.0


def test_script_matches_its_golden() -> None:
    assert_golden("jobs/staged.sbatch", sbatch_script(resolved(), STAGED))


class Script:
    """The part of a batch script that waits, and what it then goes on with, in a container or elsewhere."""

    def __init__(self, place: Path, container: bool = True) -> None:
        self.job, end = place / "jobs/7", place / "job-end"
        (place / "jobs").mkdir()
        if container:
            end.touch()
        text = "\n".join([*staging.wait_for_files_lines(str(place / "jobs")), 'echo "code in $SHOAL_SENT"'])
        self.text = text.replace(staging.END_PROGRAM, str(end)).replace("turn < 9000", "turn < 5 * 60")
        self.process = self._start()

    def _start(self) -> subprocess.Popen[str]:
        env = {**os.environ, "SHOAL_JOB_DIR": str(self.job), "SHOAL_SUBMISSION": "5eed"}
        return subprocess.Popen(
            ["bash", "-c", self.text], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def tell(self, name: str, text: str = "") -> None:
        wait_for((self.job / "submission").exists)
        (self.job / "sent").mkdir()
        (self.job / name).write_text(text)

    def ended(self) -> tuple[int, str, str]:
        out, errors = self.process.communicate(timeout=LIMIT)
        return self.process.returncode, out, errors


def test_script_writes_its_submission_and_waits_for_its_files(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.tell("sent/.ready")
    assert script.ended() == (0, f"code in {script.job}/sent\n", "")
    assert (script.job / "submission").read_text() == "5eed"


def test_script_fails_with_the_reason_when_files_cannot_arrive(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.tell("sent/.failed", "the disk is full\n")
    why = "shoal: error: the files of the job did not come from the controller: the disk is full\n"
    assert script.ended() == (1, "", why)


def test_script_outside_a_container_uses_the_job_directory(tmp_path: Path) -> None:
    script = Script(tmp_path, container=False)
    assert script.ended() == (0, f"code in {tmp_path}/jobs\n", "") and not script.job.exists()


class End:
    """The Epilog of job 7, with its marks elsewhere."""

    def __init__(self, place: Path, alone_seconds: int = 120) -> None:
        self.mark, self.over = place / "marks/7", place / "marks/7.over"
        self.text = self._elsewhere(staging.job_end()).replace("-lt 600 ]", f"-lt {alone_seconds * 5} ]")
        self.place = place

    def _elsewhere(self, text: str) -> str:
        return text.replace(staging.MARKS, str(self.mark.parent))

    def begin(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["sh", "-c", self.text], env={**os.environ, "SLURM_JOB_ID": "7"})

    def carry(self, seconds: int) -> subprocess.Popen[bytes]:
        """A process that holds the lock of the job's files for a while."""
        carrying = subprocess.Popen(shlex.split(self._elsewhere(staging.with_job_lock("7", ["sleep", str(seconds)]))))
        wait_for(self.mark.exists)
        return carrying


def test_end_does_not_wait_without_a_fetch_mark(tmp_path: Path) -> None:
    assert End(tmp_path).begin().wait(LIMIT) == 0


def test_end_waits_until_the_mark_is_removed(tmp_path: Path) -> None:
    end = End(tmp_path)
    carrying, waiting = end.carry(600), end.begin()
    try:
        wait_for(end.over.exists)
        assert waiting.poll() is None
        end.mark.unlink()
        assert waiting.wait(LIMIT) == 0 and not end.over.exists()
    finally:
        carrying.kill()
        carrying.wait()


def test_end_times_out_when_the_fetcher_is_dead(tmp_path: Path) -> None:
    end = End(tmp_path, alone_seconds=1)
    carrying = end.carry(600)
    carrying.kill()
    carrying.wait()
    assert end.begin().wait(LIMIT) == 0 and list(end.mark.parent.iterdir()) == []


@as_root
def test_fetched_job_leaves_no_files(tmp_path: Path) -> None:
    job = tmp_path / "jobs/7"
    job.mkdir(parents=True)
    for path in (job / "x", tmp_path / "jobs/7.out", tmp_path / "jobs/8.out"):
        path.touch()
    subprocess.run(["sh", "-c", staging.cleanup_command("7", os.getuid(), os.getgid(), str(job))], check=True)
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["8.out"]


@as_root
@cases("why", "plain", "it's $(odd) `text`\nof two lines")
def test_failure_reason_is_written_unchanged(tmp_path: Path, why: str) -> None:
    command = staging.fail(os.getuid(), os.getgid(), str(tmp_path / "7"), why)
    subprocess.run(["sh", "-c", command], check=True)
    assert (tmp_path / "7/sent/.failed").read_text() == f"{why}\n"
