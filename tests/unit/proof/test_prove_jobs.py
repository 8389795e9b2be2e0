"""Runs as jobs: what is submitted to Slurm, and what is read from the nodes. test_prove.py uses a real cluster."""

from __future__ import annotations

import asyncio
import io
import tarfile
from pathlib import Path

import pytest
from tests.unit.jobs.test_job_verbs import Reef

from shoal.hosts.api import Result
from shoal.jobs.model import job_from_options
from shoal.plan.progress import NoProgress
from shoal.proof.types import ProofRun, ProofSettings
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


def test_single_process_runs_on_a_single_node(runner: ClusterRunner) -> None:
    job = runner.spec(ProofRun("python", "ddp", 1))
    assert (job.launcher, job.nodes, job.ntasks_per_node, job.nodelist) == ("python", 1, 1, None)


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
    (tmp_path / "train.py").touch()
    reef = Interrupting()
    reef.states = ["RUNNING"]
    runner = ClusterRunner(
        ProofSettings("train.py"), reef.context, job_from_options({"script": "train.py", "nodes": 2}), tmp_path
    )
    with NoProgress().phase("srun ddp", 1) as phase:
        reef.proof = asyncio.create_task(runner.run(ProofRun("srun", "ddp", 2), tmp_path, phase))
        with pytest.raises(asyncio.CancelledError):
            await reef.proof
    assert ("scancel", "17") in reef.controller.argvs
