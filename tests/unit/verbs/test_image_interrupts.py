"""Jobs of `shoal image` on nodes, over a host in memory: Slurm keeps none when a person does not wait any more."""

import asyncio
import json
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.contract import VERSION
from shoal.errors import CommandFailed, UsageError
from shoal.hosts.api import Result, Target
from shoal.jobs.model import job_from_options
from shoal.plan.progress import NoProgress, ProgressReporter
from shoal.slurm.state import NODES_COMMAND
from shoal.spec.cluster_record import ClusterRecord, RecordMember
from shoal.verbs import images
from shoal.verbs.context import Context
from shoal.verbs.image_build import build
from shoal.verbs.images import ImageStore, remove_container, save
from shoal.verbs.joined_cluster import JoinedCluster, Login
from shoal_simulators.fake_host import Call, FakeConnector, FakeHost, FakeProgram

RECORD = ClusterRecord("reef", VERSION, "c1", (RecordMember("c1", "10.0.0.1", ("controller",)),), jobs="/data/jobs")
NODE = b"NodeName=n1 Arch=x86_64 AvailableFeatures=images ActiveFeatures=images State=IDLE Partitions=main \n"


class Controller(FakeHost):
    """The host that the user logs in to, and a node that does not come to an end."""

    def __init__(self) -> None:
        self.started, self.runs = asyncio.Event(), asyncio.Event()
        self.input = b""
        """What `receive` got until its end."""
        self.reason = b"PENDING Resources\n"
        programs = {("python3",): self.answer, ("srun",): self.hang}
        super().__init__(Target("c1"), {**programs, ("scancel",): b"", ("squeue",): self.queue, NODES_COMMAND: NODE})

    def queue(self, call: Call) -> bytes:
        if self.reason.startswith(b"RUNNING"):
            self.runs.set()
        return self.reason

    async def answer(self, program: FakeProgram) -> int:
        if "receive" in program.call.argv:
            self.started.set()
            self.input = await program.read()
            return 3
        answer: object = [] if "list" in program.call.argv else {"root": "/data/jobs/ann"}
        await program.print(json.dumps(answer).encode() + b"\n")
        return 0

    async def hang(self, program: FakeProgram) -> int:
        self.started.set()
        await asyncio.sleep(600)
        return 0


async def interrupt(c1: Controller, work: Coroutine[Any, Any, object], when: asyncio.Event | None = None) -> None:
    task = asyncio.ensure_future(work)
    await (when or c1.started).wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def context_of(c1: Controller, progress: ProgressReporter | None = None) -> Context:
    joined = JoinedCluster(RECORD, Login("c1", "ann"))
    return Context(joined, connector=FakeConnector(c1), progress=progress or NoProgress())


def options_of(c1: Controller) -> set[str]:
    """Of the jobs."""
    return {word for argv in c1.argvs if "srun" in argv for word in argv if word.startswith("--")}


async def test_job_of_an_interrupted_removal_is_cancelled() -> None:
    c1 = Controller()
    await interrupt(c1, remove_container(context_of(c1), "mine", "n1"))
    [name] = [word for word in options_of(c1) if word.startswith("--job-name=shoal-image-remove-")]
    assert ("scancel", name.replace("job-name", "name")) in c1.argvs
    assert any(word.startswith("--time=") for word in options_of(c1))


async def test_node_that_is_not_rented_now_is_not_rented_for_its_containers() -> None:
    c1 = Controller()
    c1.answers |= {NODES_COMMAND: NODE.replace(b"State=IDLE", b"State=IDLE+CLOUD+POWERED_DOWN")}
    for work in (remove_container(context_of(c1), "mine", "n1"), save(context_of(c1), "tuned", "mine", "n1", None)):
        with pytest.raises(UsageError, match="n1 is not rented now"):
            await work
    assert not options_of(c1)


async def test_input_of_an_interrupted_save_ends_so_that_its_job_does() -> None:
    c1 = Controller()
    await interrupt(c1, save(context_of(c1), "tuned", "mine", "n1", None))
    [call] = [call for call in c1.calls if "receive" in call.argv]
    assert not call.killed, "it had the time to cancel its job"
    assert [argv[6] for argv in c1.argvs if argv[0] == "python3"][-1] == "sweep"
    assert {word for word in options_of(c1) if word.startswith("--job-name=shoal-image-save-")}


@cases(
    "limits, options",
    ({}, {"--time=60", "--cpus-per-task=1", "--partition=main"}),
    (
        {"time": "2:00:00", "cpus_per_task": 4, "mem": "16G", "partition": "big"},
        {"--time=2:00:00", "--cpus-per-task=4", "--mem=16G", "--partition=big"},
    ),
)
async def test_build_has_an_hour_or_what_is_asked_for(
    tmp_path: Path, limits: dict[str, object], options: set[str]
) -> None:
    (tmp_path / "Containerfile").write_text("FROM r.example.org/mini\n")
    c1 = Controller()
    job = job_from_options({"script": "-", **limits})
    await interrupt(c1, build(context_of(c1), "new", str(tmp_path), None, None, job))
    kinds = {option.partition("=")[0] for option in options} | {"--mem"}
    assert {option for option in options_of(c1) if option.partition("=")[0] in kinds} == options
    assert c1.input and str(len(c1.input)) in next(call for call in c1.calls if "receive" in call.argv).argv


class Shown(NoProgress):
    def __init__(self, c1: Controller) -> None:
        self.c1 = c1
        self.texts: list[str] = []

    def update(self, host: str, text: str) -> None:
        self.texts.append(text)
        self.c1.reason = b"RUNNING None\n"


async def test_what_a_build_waits_for_is_shown_until_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "QUEUE_INTERVAL_S", 0.0)
    (tmp_path / "Containerfile").write_text("FROM r.example.org/mini\n")
    c1 = Controller()
    shown, job = Shown(c1), job_from_options({"script": "-"})
    await interrupt(c1, build(context_of(c1, shown), "new", str(tmp_path), None, None, job), c1.runs)
    assert shown.texts == ["waits in the queue: Resources", "ends its job"]


@cases("status, words", (3, "fix: correct it and try again"), (1, "a fault of Shoal"))
async def test_failure_of_the_program_is_not_the_persons(status: int, words: str) -> None:
    c1 = Controller()
    c1.answers |= {("python3",): Result(status, stderr=b"Traceback\n  line 1\nKeyError: 'x'\n")}
    with pytest.raises(UsageError if status == 3 else CommandFailed) as caught:
        await ImageStore(c1, "/data", RECORD).fetch("pull", "/x.tar", "x", NoProgress())
    assert words in str(caught.value) and "KeyError" in str(caught.value)
