"""Messages when the jobs of a proof cannot be queued, take too long or leave unreadable records."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.unit.jobs.test_job_verbs import PARTITION, Reef

from shoal.errors import PartialFailure, UsageError
from shoal.hosts.api import Result
from shoal.jobs.model import job_from_options
from shoal.plan.progress import NoProgress
from shoal.proof.types import ProofRun, ProofSettings, ScriptFailed
from shoal.verbs.prove import ClusterRunner
from shoal_simulators.fake_host import Call


async def run(reef: Reef, place: Path, asked: ProofSettings, **options: object) -> None:
    (place / "train.py").touch()
    runner = ClusterRunner(asked, reef.context, job_from_options({"script": "train.py", **options}), place)
    with NoProgress().phase("srun ddp", 1) as phase:
        await runner.run(ProofRun("srun", "ddp", asked.processes), place, phase)


async def test_too_few_gpus_are_reported_with_the_number_of_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        await run(Reef(), tmp_path, ProofSettings("train.py", processes=4))
    assert caught.value.message == "4 processes a node would share 2 GPUs: two of them on one"
    assert caught.value.hint == "use -N 2, or --gpus-per-node 0 for none at all"


async def test_partition_time_limit_is_reported_with_the_timeout_option(tmp_path: Path) -> None:
    reef = Reef()
    reef.partition = PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=00:05:00")
    with pytest.raises(UsageError) as caught:
        await run(reef, tmp_path, ProofSettings("train.py"))
    assert caught.value.hint == "use --timeout 300, or choose another partition"


async def test_short_timeout_leaves_time_for_the_slurm_warning(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["COMPLETED"]
    await run(reef, tmp_path, ProofSettings("train.py", timeout=45))
    assert "#SBATCH --time=2\n" in reef.submitted["script"]


async def test_job_timeout_is_reported_with_the_proof_option(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["TIMEOUT"]
    with pytest.raises(ScriptFailed, match="job 17: the job reached its time limit") as caught:
        await run(reef, tmp_path, ProofSettings("train.py"))
    assert caught.value.hint == "give it more with --timeout"
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
