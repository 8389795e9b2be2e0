"""Training with torch in a rented container that dies: the job continues in another from a copied checkpoint.

torch is on a share, of which containers have a copy. The script is that of the matrix.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import Iterator
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import Cluster
from tests.e2e.simulated_clouds import UNFINISHED, Cloud, bill, renting, shown
from tests.e2e.torch_env import PYTHONPATH, give_torch
from tests.sandbox_faults import SandboxFaults

COVERS = "cloud/service/job_file_copier remote/job_file_transfer.py train jobs/launchers"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, pytest.mark.timeout(1200)]

NAME = "ee-pods"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  runpod: {{url: "URL-OF-runpod", key: "env:RUNPOD_KEY"}}
storage:
  /data: {{host: controller, read_only: true}}
nodesets:
  pods: {{provider: runpod, type: NVIDIA A40, region: EU-RO-1, max: 1, cpus: 2, memory: 3G, gpus: 1, idle: 30s}}
"""
STEPS, SAVE_EVERY, AT_WORK = 30, 4, 9
"""The container dies when the step AT_WORK has been seen."""


@dataclass(frozen=True)
class Story:
    """What became of the job."""

    told: list[dict[str, Any]]
    """What its ranks printed, over both turns, as the controller has it."""
    record: dict[str, str]
    printed: list[str]
    """The last lines of all, for whoever has to find out why it failed."""
    machines: list[dict[str, Any]]
    """Those that were there for it, as the bill has them."""


@pytest.fixture(scope="module", params=["srun", "torchrun"])
def story(request: pytest.FixtureRequest, trained: Trained) -> Story:
    return trained.story(request.param)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    with renting(tmp_path_factory.mktemp("pods"), SPEC, Cloud("runpod", "rp-0123456789abcdef")) as (cluster, urls):
        give_torch(NAME)
        cluster.on("controller", "cp", "-r", PYTHONPATH, "/data/env")
        yield Trained(cluster, urls["runpod"], tmp_path_factory.mktemp("tree"))


class Trained:
    """A cluster of rented containers with torch."""

    def __init__(self, cluster: Cluster, url: str, tree: Path) -> None:
        self.cluster, self.url, self.tree = cluster, url, tree
        shutil.copy(ROOT / "tests/matrix/train.py", tree)

    def story(self, launcher: str) -> Story:
        gone = [entry["id"] for entry in bill(self.url)["machines"] if entry["ended"]]
        job = self._queue(launcher)
        self.cluster.wait("it is at work", lambda: self._step(job) >= AT_WORK)
        [machine] = [entry["id"] for entry in bill(self.url)["machines"] if not entry["ended"]]
        asyncio.run(SandboxFaults(self.cluster.provider.cache).kill(NAME, f"runpod-{machine}"))
        self.cluster.wait("it is queued again", lambda: int(shown(self.cluster, job)["Restarts"]) > 0)
        self.cluster.wait("it starts again", lambda: self.cluster.starts_soon(job))
        self.cluster.wait("it ends", lambda: shown(self.cluster, job)["JobState"] not in UNFINISHED)
        printed = self.cluster.shoal("logs", job).stdout.splitlines()[-20:]
        used = [entry for entry in bill(self.url)["machines"] if entry["id"] not in gone]
        return Story(self._told(job), shown(self.cluster, job), printed, used)

    def _queue(self, launcher: str) -> str:
        options = ["--launcher", launcher, "--mem", "2500M", "--export", "PYTHONPATH=/data/env"]
        script = ["train.py", "--steps", str(STEPS), "--save-every", str(SAVE_EVERY), "--pause", "1"]
        with chdir(self.tree):
            return str(self.cluster.json("run", *options, *script)["id"])

    def _told(self, job: str) -> list[dict[str, Any]]:
        lines = [line["text"] for line in self.cluster.json("logs", job)["lines"] if line["rank"] == 0]
        return [json.loads(line) for line in lines if line.startswith('{"turn"')]

    def _step(self, job: str) -> int:
        return max((line["step"] for line in self._told(job) if "step" in line), default=-1)


def test_job_completes_in_another_container(story: Story) -> None:
    assert (story.record["JobState"], story.record["Restarts"]) == ("COMPLETED", "1"), story.printed
    assert len(story.machines) == 2


def test_job_resumes_from_a_checkpoint_copied_back_in_time(story: Story) -> None:
    first, second = (
        [line["step"] for line in story.told if line["turn"] == turn and "step" in line] for turn in (0, 1)
    )
    assert first == list(range(len(first))) and second == list(range(second[0], STEPS))
    # The newest one may have been on its way.
    assert second[0] > 0 and len(first) - second[0] <= 2 * SAVE_EVERY


def test_repeated_steps_have_bitwise_equal_losses(story: Story) -> None:
    losses: dict[int, set[str]] = {}
    for line in story.told:
        if "step" in line:
            losses.setdefault(line["step"], set()).add(line["loss"])
    assert {step: len(values) for step, values in losses.items()} == dict.fromkeys(range(STEPS), 1)
