"""An image of a registry that a user has not used before, over a host in memory: it is pulled, and that is shown."""

import json

import pytest

from shoal.contract import VERSION
from shoal.errors import UsageError
from shoal.hosts.api import Target
from shoal.jobs.model import job_from_options
from shoal.plan.progress import NoProgress
from shoal.slurm.state import NodeState
from shoal.spec.cluster_record import ClusterRecord, RecordShare
from shoal.verbs.context import Context
from shoal.verbs.images import bundle, job_image
from shoal.verbs.joined_cluster import JoinedCluster, Login
from shoal_simulators.fake_host import FakeConnector, FakeHost, FakeProgram

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


async def test_bundle_of_a_container_that_nodes_have_needs_no_image() -> None:
    written: list[tuple[str, ...]] = []

    async def store(program: FakeProgram) -> int:
        words = program.call.argv[6:]
        if words[0] == "bundle":
            written.append(words)
        await program.print(json.dumps({"root": "/data/shoal-jobs/ann", "path": "/b"}).encode() + b"\n")
        return 0

    nodes = b"NodeName=n1 State=IDLE Partitions=main ActiveFeatures=images,images-arm64\n"
    host = FakeHost(Target("desktop"), {("python3",): store, ("scontrol",): nodes})
    record = ClusterRecord("reef", VERSION, "c1", jobs="/data/shoal-jobs", shares={"/data": RecordShare("nfs")})
    context = Context(JoinedCluster(record, Login("desktop", "ann")), connector=FakeConnector(host))
    assert await bundle(context, job_from_options({"script": "-", "container_name": "mine"}), None) == "/b"
    [[_, place, name, settings, _]] = written
    assert place == "/data/shoal-jobs/ann/images" and name.startswith("mine-")
    assert json.loads(settings)["container"] == "mine" and json.loads(settings)["id"] == ""
    with pytest.raises(UsageError, match="a bundle runs commands in an image"):
        await bundle(context, job_from_options({"script": "-"}), None)
