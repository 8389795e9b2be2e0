"""What a person is told when a proof's jobs cannot be queued, take too long or leave records that nobody can read."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.unit.jobs.test_job_verbs import PARTITION, Reef

from shoal.errors import UsageError
from shoal.jobs.load import job_of
from shoal.plan.progress import Silence
from shoal.proof.model import Asked, RunFailed, Trial
from shoal.verbs.prove_jobs import ClusterRunner


async def run(reef: Reef, place: Path, asked: Asked, **options: object) -> None:
    (place / "train.py").touch()
    runner = ClusterRunner(asked, reef.context, job_of({"script": "train.py", **options}), place)
    with Silence().phase("srun ddp", 1) as phase:
        await runner.run(Trial("srun", "ddp", asked.processes), place, phase)


async def test_more_processes_than_gpus_are_sent_to_more_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as caught:
        await run(Reef(), tmp_path, Asked("train.py", processes=4))
    assert caught.value.message == "4 processes a node would share 2 GPUs: two of them on one"
    assert caught.value.hint == "say -N 2, or --gpus-per-node 0 for none at all"


async def test_a_partition_that_allows_less_time_names_the_option_of_a_proof(tmp_path: Path) -> None:
    reef = Reef()
    reef.partition = PARTITION.replace("MaxTime=UNLIMITED", "MaxTime=00:05:00")
    with pytest.raises(UsageError) as caught:
        await run(reef, tmp_path, Asked("train.py"))
    assert caught.value.hint == "say --timeout 300, or choose another partition"


async def test_a_short_timeout_leaves_room_for_slurms_warning(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["COMPLETED"]
    await run(reef, tmp_path, Asked("train.py", timeout=45))
    assert "#SBATCH --time=2\n" in reef.submitted["script"]


async def test_a_run_that_takes_too_long_is_given_more_by_the_proofs_own_option(tmp_path: Path) -> None:
    reef = Reef()
    reef.states = ["TIMEOUT"]
    with pytest.raises(RunFailed, match="job 17: the job reached its time limit") as caught:
        await run(reef, tmp_path, Asked("train.py"))
    assert caught.value.hint == "give it more with --timeout"
    with pytest.raises(RunFailed) as caught:
        await run(reef, tmp_path, Asked("train.py"), time="5")
    assert caught.value.hint.startswith("give it more with --time, ")
