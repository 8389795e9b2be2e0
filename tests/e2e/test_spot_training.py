"""A training job on a spot machine that its provider preempts, with the notice that this provider gives.

Google's notice is read on the machine, Amazon's in its API; Nebius tells the machine to shut down. Then it is off.

The job is submitted with `shoal run`, and its script uses the training library. It saves only when it is warned: steps
that it did not save in time run again on the next rented machine.

    python -m pytest -s -m matrix tests/e2e/test_spot_training.py    prints the outcome: bench/results/spot-training.txt
"""

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
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, Cluster
from tests.e2e.simulated_clouds import UNFINISHED, Cloud, bill, ended, preempt, renting, shown
from tests.e2e.torch_env import PYTHONPATH, give_torch
from tests.matrix.stopped_jobs import Cell, Stopped

from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

COVERS = "train/stop.py train/checkpoint remote/preemption_notice.py cloud/service/reconcile"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(900), ON_DEBIAN_12]


@dataclass(frozen=True)
class Case:
    """A provider, and the spot machine rented there. Its image is Debian 12, the system that torch's wheel is for."""

    kind: str
    offer: str
    settings: str = ""

    @property
    def nodeset(self) -> str:
        shape = "market: spot, max: 2, idle: 10s, cpus: 1, memory: 2G, gpus: 0"
        return f"  {self.kind}: {{provider: {self.kind}, {self.offer}, {shape}}}\n"

    @property
    def account(self) -> str:
        return f'  {self.kind}: {{url: "URL-OF-{self.kind}", key: "env:{self.kind.upper()}_KEY"{self.settings}}}\n'


CASES = (
    Case("gcp", "type: a3-highgpu-1g, zone: us-central1-a, image: debian-cloud/debian-12", ", project: p"),
    Case("aws", "type: g4dn.xlarge, region: us-east-1, zone: us-east-1a, image: ami-0123456789abcdef0"),
    Case("nebius", "type: gpu-l40s-a 1gpu-8vcpu-32gb, region: eu-north1, image: computeimage-e00debian12"),
)
NAME = "ee-spot"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
slurm: {{from: shoal}}
providers:
{"".join(case.account for case in CASES)}nodesets:
{"".join(case.nodeset for case in CASES)}"""
JOBS = "/shared/jobs"
STEPS = ("--steps", "120", "--save-every", "1000")
"""Far more than pass, one a second, until the notice arrives on a busy machine."""
AT_WORK = 3
"""The step after which its machine is taken away."""


@dataclass(frozen=True)
class Story:
    """What became of the job."""

    kind: str
    job: Stopped
    told: list[dict[str, Any]]
    """What its rank printed, over both turns."""
    whole: list[dict[str, Any]]
    """The same of a run that nobody stopped."""
    record: dict[str, str]
    """The job as Slurm has it at the end."""
    machines: list[dict[str, Any]]
    """The provider's bill."""

    @property
    def steps(self) -> Counter[int]:
        """How often each step was done."""
        return Counter(line["step"] for line in self.told if "step" in line)

    @property
    def lost(self) -> int:
        return self.steps.total() - len(self.steps)

    @property
    def row(self) -> str:
        done = [max(line["step"] for line in self.told if line["turn"] == turn and "step" in line) for turn in (0, 1)]
        same = "same bits" if learned(self.told) == learned(self.whole) else "OTHER BITS"
        return (
            f"{self.kind:8} warned by {self.job.reason or 'nothing'}, checkpoint {self.job.checkpoint}, "
            f"stopped after step {done[0]}, {self.record['JobState']} on machine {len(self.machines)} "
            f"after step {done[1]}, {self.lost} steps lost, {same}"
        )


@dataclass(frozen=True)
class Lab:
    """A cluster that rents from all of the providers."""

    cluster: Cluster
    urls: dict[str, str]
    tree: Path
    """The code of the jobs."""
    whole: list[dict[str, Any]]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    directory = tmp_path_factory.mktemp("spot")
    clouds = [Cloud(case.kind, f"id:key-of-{case.kind}-0123456789") for case in CASES]
    with renting(directory, SPEC, *clouds) as (cluster, urls):
        give_torch(NAME)
        tree = directory / "tree"
        tree.mkdir()
        shutil.copy(ROOT / "tests/matrix/train.py", tree)
        yield Lab(cluster, urls, tree, undisturbed(tree, directory))


@pytest.fixture(scope="module", params=[case.kind for case in CASES])
def story(lab: Lab, request: pytest.FixtureRequest) -> Story:
    made = play(lab, request.param, queue(lab, request.param))
    print(f"\n{made.row}")
    return made


def queue(lab: Lab, kind: str) -> Stopped:
    options = ["--directory", JOBS, "--gpus-per-node", "0", "--mem", "1500M", "--launcher", "python"]
    options += ["--constraint", kind]
    for variable in (f"PYTHONPATH={PYTHONPATH}", "OMP_NUM_THREADS=1"):
        options += ["--export", variable]
    with contextlib.chdir(lab.tree):
        number = str(lab.cluster.json("run", *options, "train.py", *STEPS, "--pause", "1")["id"])
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


def play(lab: Lab, kind: str, job: Stopped) -> Story:
    """Take the job's machine away in the middle of its work, and see it through to its end."""
    cluster, url = lab.cluster, lab.urls[kind]
    cluster.wait("it is at work", lambda: job.step() >= AT_WORK)
    [machine] = [entry for entry in bill(url)["machines"] if not entry["ended"]]
    preempt(url, machine["id"])
    cluster.wait("it is queued again", lambda: int(shown(cluster, job.id)["Restarts"]) > 0)
    newest = job.newest()
    job.checkpoint, job.reason = newest or (None, "")
    cluster.wait("it starts again", lambda: cluster.starts_soon(job.id))
    cluster.wait("it ends", lambda: shown(cluster, job.id)["JobState"] not in UNFINISHED)
    cluster.wait("its machines go", lambda: ended(url))
    return Story(kind, job, job.lines(), lab.whole, shown(cluster, job.id), bill(url)["machines"])


def learned(lines: list[dict[str, Any]]) -> tuple[dict[int, str], list[str]]:
    """The loss of each step, and the digest of the parameters at the end."""
    losses = {line["step"]: line["loss"] for line in lines if "step" in line}
    return losses, [line["digest"] for line in lines if "digest" in line]


def test_job_is_warned_in_time_to_save_a_checkpoint(story: Story) -> None:
    assert story.job.reason == "SIGUSR1"
    assert story.job.checkpoint is not None and story.job.checkpoint > AT_WORK


def test_job_is_requeued_and_continues_on_another_machine(story: Story) -> None:
    assert (story.record["JobState"], story.record["Restarts"]) == ("COMPLETED", "1")
    assert len({machine["id"] for machine in story.machines}) == len(story.machines) == 2
    assert {machine["market"] for machine in story.machines} == {"spot"}
    assert {line["turn"] for line in story.told} == {0, 1}


def test_at_most_a_single_step_is_lost(story: Story) -> None:
    assert sorted(story.steps) == list(range(int(STEPS[1])))
    assert story.lost <= 1


def test_result_equals_uninterrupted_training_bit_for_bit(story: Story) -> None:
    losses, digests = learned(story.told)
    assert len(losses) == int(STEPS[1]) and len(digests) == 1
    assert (losses, digests) == learned(story.whole)
