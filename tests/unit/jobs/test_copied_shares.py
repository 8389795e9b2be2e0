"""A job on nodes with copies of shares: copied in before it, copied back after it; a failed copy fails the job."""

import os
import subprocess
from dataclasses import replace
from pathlib import Path

from tests.support.cases import cases
from tests.unit.jobs.job_clusters import SHIPPED, resolved

from shoal.jobs.script import sbatch_script
from shoal.storage.stage import PROGRAM


def script(copies: bool) -> str:
    return sbatch_script(resolved(requeue=False), replace(SHIPPED, copies=copies))


def test_job_without_shares_has_no_copy_step() -> None:
    assert PROGRAM not in script(copies=False)


@cases(
    "failing, status, steps",
    ("", 0, ["in", "rank", "out"]),
    ("in", 1, ["in"]),
    ("out", 1, ["in", "rank", "out"]),
    ("rank", 3, ["in", "rank", "out"]),
)
def test_shares_are_copied_around_the_ranks(tmp_path: Path, failing: str, status: int, steps: list[str]) -> None:
    """The lines from the first step on, with a stand-in for srun that writes down what it is to start."""
    srun = tmp_path / "srun"
    srun.write_text(
        f'#!/bin/sh\ncase "$*" in *"{PROGRAM} in"*) step=in;; *"{PROGRAM} out"*) step=out;; *) step=rank;; esac\n'
        f"echo $step >> {tmp_path}/steps\n[ $step != '{failing}' ] || exit 3\n"
    )
    srun.chmod(0o755)
    text = script(copies=True)
    [pipe] = [line for line in text.splitlines() if line.startswith("exec {SHOAL_WARNINGS}")]
    steps_text = text[text.index("srun --overlap") :].partition("# srun may leave")[0]
    body = f'{pipe}\n{steps_text}exit "$status"\n'
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_NUM_NODES": "2"}
    done = subprocess.run(["bash", "-c", body], env=env, capture_output=True, text=True)
    assert (tmp_path / "steps").read_text().split() == steps, done.stderr
    assert done.returncode == status
