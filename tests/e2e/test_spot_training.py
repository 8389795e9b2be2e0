"""A training job on a spot machine that Google preempts: only the machine itself reads the notice, then it is off.

The job is submitted with `shoal run`, and its script uses the training library. It saves only when it is warned: steps
that it did not save in time run again on the next rented machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.simulated_clouds import GOOGLE_IMAGE, UNFINISHED, Cloud, bill, ended, preempt, renting, shown
from tests.e2e.torch_env import PYTHONPATH, give_torch
from tests.matrix.stopped_jobs import Cell, Stopped

from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(900)]

NAME = "ee-spot"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  gcp: {{url: "URL-OF-gcp", key: "env:GCP_KEY", project: p}}
nodesets:
  spot:
    {{provider: gcp, type: a3-highgpu-1g, zone: us-central1-a, market: spot, image: {GOOGLE_IMAGE}, max: 2, idle: 10s,
     cpus: 1, memory: 2G, gpus: 0}}
"""
JOBS = "/shared/jobs"
STEPS = ("--steps", "120", "--save-every", "1000")
"""Far more than pass, one a second, until the notice arrives on a busy machine."""
AT_WORK = 3
"""The step after which its machine is taken away."""


@dataclass(frozen=True)
class Story:
    """What became of the job."""

    job: Stopped
    told: list[dict[str, Any]]
    """What its rank printed, over both turns."""
    whole: list[dict[str, Any]]
    """The same of a run that nobody stopped."""
    record: dict[str, str]
    """The job as Slurm has it at the end."""
    machines: list[dict[str, Any]]
    """The provider's bill."""


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    directory = tmp_path_factory.mktemp("spot")
    with renting(directory, SPEC, Cloud("gcp", "key-of-gcp-0123456789")) as (cluster, urls):
        give_torch(NAME)
        tree = directory / "tree"
        tree.mkdir()
        shutil.copy(ROOT / "tests/matrix/train.py", tree)
        job = queue(cluster, tree)
        whole = undisturbed(tree, directory)
        yield play(cluster, urls["gcp"], job, whole)


def queue(cluster: Cluster, tree: Path) -> Stopped:
    options = ["--directory", JOBS, "--gpus-per-node", "0", "--mem", "1500M", "--launcher", "python"]
    for variable in (f"PYTHONPATH={PYTHONPATH}", "OMP_NUM_THREADS=1"):
        options += ["--export", variable]
    with contextlib.chdir(tree):
        number = str(cluster.json("run", *options, "train.py", *STEPS, "--pause", "1")["id"])
    directory = Layout(cache_dir(), NAME).shared / JOBS.removeprefix("/shared/") / number
    return Stopped(Cell("python", "spot", 0), number, directory)


def undisturbed(tree: Path, directory: Path) -> list[dict[str, Any]]:
    """The script on this machine, without Slurm and without a stop, with the very torch of the nodes."""
    packages = Layout(cache_dir(), NAME).shared / PYTHONPATH.removeprefix("/shared/")
    variables = {"PYTHONPATH": f"{packages}:{ROOT / 'src'}", "OMP_NUM_THREADS": "1", "SHOAL_JOB_DIR": str(directory)}
    line = [sys.executable, tree / "train.py", *STEPS, "--pause", "0"]
    done = subprocess.run(line, env={**os.environ, **variables}, capture_output=True, text=True, timeout=LIMIT)
    assert done.returncode == 0, done.stderr
    return [json.loads(text) for text in done.stdout.splitlines() if text.startswith('{"turn"')]


def play(cluster: Cluster, url: str, job: Stopped, whole: list[dict[str, Any]]) -> Story:
    """Take the job's machine away in the middle of its work, and see it through to its end."""
    cluster.wait("it is at work", lambda: job.step() >= AT_WORK)
    [machine] = [entry for entry in bill(url)["machines"] if not entry["ended"]]
    preempt(url, machine["id"])
    cluster.wait("it is queued again", lambda: int(shown(cluster, job.id)["Restarts"]) > 0)
    newest = job.newest()
    job.checkpoint, job.reason = newest or (None, "")
    # Slurm would let it wait for two minutes. While it is still leaving its node, this is refused.
    hurry = f"scontrol update JobId={job.id} StartTime=now"
    cluster.wait("it starts again", lambda: job.turns() > 1 or cluster.ssh("controller", hurry).returncode == 0)
    cluster.wait("it ends", lambda: shown(cluster, job.id)["JobState"] not in UNFINISHED)
    cluster.wait("its machines go", lambda: ended(url))
    return Story(job, job.lines(), whole, shown(cluster, job.id), bill(url)["machines"])


def test_job_is_warned_in_time_to_save_a_checkpoint(story: Story) -> None:
    assert story.job.reason == "SIGUSR1"
    assert story.job.checkpoint is not None and story.job.checkpoint > AT_WORK


def test_job_is_requeued_and_continues_on_another_machine(story: Story) -> None:
    assert (story.record["JobState"], story.record["Restarts"]) == ("COMPLETED", "1")
    assert len({machine["id"] for machine in story.machines}) == len(story.machines) == 2
    assert {machine["market"] for machine in story.machines} == {"spot"}
    assert {line["turn"] for line in story.told} == {0, 1}


def test_at_most_a_single_step_is_lost(story: Story) -> None:
    steps = Counter(line["step"] for line in story.told if "step" in line)
    assert sorted(steps) == list(range(int(STEPS[1])))
    assert sum(steps.values()) - len(steps) <= 1


def test_result_equals_uninterrupted_training_bit_for_bit(story: Story) -> None:
    def learned(lines: list[dict[str, Any]]) -> tuple[dict[int, str], list[str]]:
        losses = {line["step"]: line["loss"] for line in lines if "step" in line}
        return losses, [line["digest"] for line in lines if "digest" in line]

    losses, digests = learned(story.told)
    assert len(losses) == int(STEPS[1]) and len(digests) == 1
    assert (losses, digests) == learned(story.whole)
