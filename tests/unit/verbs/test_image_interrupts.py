"""Jobs of `shoal image` on nodes, over a host in memory: Slurm keeps none when a person does not wait any more."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable
from typing import Any

import pytest

from shoal.contract import VERSION
from shoal.errors import CommandFailed, UsageError
from shoal.hosts.api import Result, Target
from shoal.plan.progress import NoProgress
from shoal.slurm.state import NODES_COMMAND
from shoal.spec.cluster_record import ClusterRecord, RecordMember
from shoal.verbs.context import Context
from shoal.verbs.images import ImageStore, remove_container, save
from shoal.verbs.joined_cluster import JoinedCluster, Login
from shoal_simulators.fake_host import FakeConnector, FakeHost, FakeProgram

RECORD = ClusterRecord("reef", VERSION, "c1", (RecordMember("c1", "10.0.0.1", ("controller",)),), jobs="/data/jobs")
NODE = b"NodeName=n1 Arch=x86_64 AvailableFeatures=images ActiveFeatures=images State=IDLE Partitions=main \n"


class Controller(FakeHost):
    """The host that the user logs in to, and a node that does not come to an end."""

    def __init__(self) -> None:
        self.started = asyncio.Event()
        programs = {("python3",): self.answer, ("srun",): self.hang}
        super().__init__(Target("c1"), {**programs, ("scancel",): b"", NODES_COMMAND: NODE})

    async def answer(self, program: FakeProgram) -> int:
        if "receive" in program.call.argv:
            return await self.hang(program)
        await program.print(json.dumps({"root": "/data/jobs/ann"}).encode() + b"\n")
        return 0

    async def hang(self, program: FakeProgram) -> int:
        self.started.set()
        await asyncio.sleep(600)
        return 0


@pytest.mark.parametrize("verb", ["save", "remove"])
async def test_job_of_an_interrupted_command_is_cancelled(verb: str) -> None:
    c1 = Controller()
    context = Context(JoinedCluster(RECORD, Login("c1", "ann")), connector=FakeConnector(c1))
    work: Awaitable[Any] = (
        save(context, "tuned", "mine", "n1", None) if verb == "save" else remove_container(context, "mine", "n1")
    )
    task = asyncio.ensure_future(work)
    await c1.started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    [name] = {word for argv in c1.argvs for word in argv if word.startswith("--job-name=")}
    assert name.startswith(f"--job-name=shoal-image-{verb}-")
    assert ("scancel", name.replace("job-name", "name")) in c1.argvs
    assert any(word.startswith("--time=") for argv in c1.argvs for word in argv)
    assert [argv[6] for argv in c1.argvs if argv[0] == "python3"][-1] == ("sweep" if verb == "save" else "make")


@pytest.mark.parametrize(("status", "words"), [(3, "fix: correct it and try again"), (1, "a fault of Shoal")])
async def test_failure_of_the_program_is_not_the_persons(status: int, words: str) -> None:
    c1 = Controller()
    c1.answers = {**c1.answers, ("python3",): Result(status, stderr=b"Traceback\n  line 1\nKeyError: 'x'\n")}
    with pytest.raises(UsageError if status == 3 else CommandFailed) as caught:
        await ImageStore(c1, "/data", RECORD).fetch("pull", "/x.tar", "x", NoProgress())
    assert words in str(caught.value) and "KeyError" in str(caught.value)
