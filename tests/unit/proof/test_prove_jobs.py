"""Runs as jobs: what is submitted to Slurm, what is read from the nodes, and what is said when that fails."""

import asyncio
import io
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.jobs.test_job_verbs import PARTITION, Reef

from shoal.errors import PartialFailure, UsageError
from shoal.hosts.api import Result
from shoal.jobs.model import job_from_options
from shoal.plan.progress import NoProgress
from shoal.proof.types import ProofRun, ProofSettings, ScriptFailed
from shoal.verbs.context import open_context
from shoal.verbs.prove import ClusterRunner, unpack
from shoal_simulators.fake_host import Call


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ClusterRunner:
    monkeypatch.chdir(tmp_path)
    options = {"script": "train.py", "nodes": 2, "nodelist": "n[1-2]", "export": {"DATA": "/x"}, "partition": "p"}
    job = job_from_options(options)
    return ClusterRunner(
        ProofSettings("train.py", processes=8, steps=3, timeout=90), open_context(None, "reef"), job, tmp_path
    )


def test_processes_are_divided_over_the_nodes(runner: ClusterRunner) -> None:
    job = runner.spec(ProofRun("srun", "fsdp", 8))
    assert (job.launcher, job.nodes, job.ntasks_per_node, job.nodelist) == ("srun", 2, 4, "n[1-2]")
    assert (job.name, job.partition, job.time, job.requeue) == ("prove-train", "p", "2", False)
    assert job.export["DATA"] == "/x"
    assert (job.export["SHOAL_PROOF_PARALLEL"], job.export["SHOAL_PROOF_STEPS"]) == ("fsdp", "3")
    assert job.export["SHOAL_PROOF_DIR"] == "proof", "below the job's own directory, wherever Slurm puts that"
    alone = runner.spec(ProofRun("python", "ddp", 1))
    assert (alone.launcher, alone.nodes, alone.ntasks_per_node, alone.nodelist) == ("python", 1, 1, None)


def test_only_records_are_unpacked_from_a_node(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        for name in ("proof/rank-3.jsonl", "proof/../../evil", "proof/rank-0.jsonl.sh", "/etc/rank-1.end"):
            info = tarfile.TarInfo(name)
            info.size = 2
            tar.addfile(info, io.BytesIO(b"ok"))
        link = tarfile.TarInfo("proof/rank-2.end")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    inside = tmp_path / "records"
    inside.mkdir()
    unpack(buffer.getvalue(), inside)
    unpack(b"", inside)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["rank-1.end", "rank-3.jsonl", "records"]


class Interrupting(Reef):
    """A cluster whose user presses Ctrl-C while sbatch is at work."""

    proof: asyncio.Task[None]

    def _submit(self, call: Call) -> bytes | Result:
        self.proof.cancel()
        return super()._submit(call)


async def test_interrupt_during_submission_cancels_the_job(tmp_path: Path) -> None:
    reef = Interrupting()
    reef.states = ["RUNNING"]
    reef.proof = asyncio.create_task(run(reef, tmp_path, ProofSettings("train.py"), nodes=2))
    with pytest.raises(asyncio.CancelledError):
        await reef.proof
    assert ("scancel", "17") in reef.controller.argvs


async def run(reef: Reef, place: Path, asked: ProofSettings, **options: object) -> None:
    (place / "train.py").touch()
    runner = ClusterRunner(asked, reef.context, job_from_options({"script": "train.py", **options}), place)
    with NoProgress().phase("srun ddp", 1) as phase:
        await runner.run(ProofRun("srun", "ddp", asked.processes), place, phase)


async def test_too_few_gpus_and_too_little_time_are_reported_with_the_option(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        await run(Reef(), tmp_path, ProofSettings("train.py", processes=4))
    assert caught.value.message == "4 processes a node would share 2 GPUs: two of them on one"
    assert caught.value.hint == "use -N 2, or --gpus-per-node 0 for none at all"
    reef = Reef()
    reef.partition = PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=00:05:00")
    with pytest.raises(UsageError) as caught:
        await run(reef, tmp_path, ProofSettings("train.py"))
    assert caught.value.hint == "use --timeout 300, or choose another partition"


async def test_job_timeout_is_reported_with_the_proof_option(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["TIMEOUT"]
    with pytest.raises(ScriptFailed, match="job 17: the job reached its time limit") as caught:
        await run(reef, tmp_path, ProofSettings("train.py", timeout=45))
    assert caught.value.hint == "give it more with --timeout"
    assert "#SBATCH --time=2\n" in reef.submitted["script"], "Slurm warns a job before its end"
    with pytest.raises(ScriptFailed) as caught:
        await run(reef, tmp_path, ProofSettings("train.py"), time="5")
    assert caught.value.hint.startswith("give it more with --time, ")


def _without_tar(shell: Callable[[Call], bytes | Result]) -> Callable[[Call], bytes | Result]:
    return lambda call: Result(2, stderr=b"tar: disk error\n") if "tar -c" in call.argv[2] else shell(call)


async def test_every_node_with_unreadable_records_is_named(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["COMPLETED"]
    for node in reef.nodes.values():
        node.answers = {**node.answers, ("sh",): _without_tar(node.answers[("sh",)])}
    with pytest.raises(PartialFailure) as caught:
        await run(reef, tmp_path, ProofSettings("train.py"), nodes=2)
    place = "/var/lib/shoal/jobs/reef/17/proof"
    assert caught.value.message == (
        f"cannot read all records of job 17: n1: cannot read {place}: tar: disk error;"
        f" n2: cannot read {place}: tar: disk error"
    )


async def test_cancelled_proof_leaves_no_records_on_the_nodes(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["RUNNING"]
    queued, scontrol = asyncio.Event(), reef._scontrol

    def asked(call: Call) -> bytes | Result:
        if call.argv[-1] == "17":
            queued.set()
        return scontrol(call)

    reef.controller.answers = {**reef.controller.answers, ("scontrol",): asked}
    proof = asyncio.create_task(run(reef, tmp_path, ProofSettings("train.py"), nodes=2))
    await queued.wait()
    proof.cancel()
    with pytest.raises(asyncio.CancelledError):
        await proof
    assert ("scancel", "17") in reef.controller.argvs
    for node in reef.nodes.values():
        assert "rm -rf" in node.argvs[-1][2] and node.argvs[-1][4:] == ("/var/lib/shoal/jobs/reef/17", "proof")
