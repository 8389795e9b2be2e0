"""An image of a registry that a user has not used before, over a host in memory: it is pulled, and that is shown."""

from __future__ import annotations

import json

from shoal.contract import VERSION
from shoal.hosts.api import Target
from shoal.jobs.model import job_from_options
from shoal.plan.progress import NoProgress
from shoal.slurm.state import NodeState
from shoal.spec.cluster_record import ClusterRecord
from shoal.verbs.images import job_image
from shoal_simulators.fake_host import FakeHost, FakeProgram

REFERENCE = "registry.example.org/lab/train:3"
PULLED = {"name": REFERENCE, "digest": "sha256:1", "id": "1", "architecture": "amd64"}


class Recorder(NoProgress):
    def __init__(self) -> None:
        self.seen: list[tuple[str, str]] = []

    def update(self, host: str, text: str) -> None:
        self.seen.append((host, text))

    def done(self, host: str, error: str = "") -> None:
        self.seen.append((host, "done"))


async def answer(program: FakeProgram) -> int:
    words = program.call.argv[6:]
    lines: list[object] = [{"root": "/data/shoal-jobs/ann"}]
    if words[0] == "find":
        lines = [None]
    if words[0] == "pull":
        lines = [{"progress": "120 MB"}, PULLED]
    for line in lines:
        await program.print(json.dumps(line).encode() + b"\n")
    return 0


async def test_pull_at_the_first_use_of_a_reference_is_shown() -> None:
    host = FakeHost(Target("desktop"), {("python3",): answer})
    job, progress = job_from_options({"script": "train.py", "image": REFERENCE}), Recorder()
    record = ClusterRecord("reef", VERSION, "c1", jobs="/data/shoal-jobs")
    nodes = [NodeState("n1", ("IDLE",), features=("images", "images-amd64"))]
    used = await job_image(host, record, job, nodes, progress)
    assert (used.image.name, used.image.digest) == (REFERENCE, "sha256:1")
    assert progress.seen == [("desktop", "120 MB"), ("desktop", "done")]
