"""`prove` runs the script with one process and with each launcher and method, and reports every result."""

from array import array
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.errors import ShoalError
from shoal.plan.progress import NoProgress, Phase
from shoal.proof.types import ProofRun, ProofSettings, ScriptFailed
from shoal.train.proof_record import ParameterPart, ProofRecorder
from shoal.verbs.prove import prove

SAMPLES = "abcdefgh"


class FakeRunner:
    """Records what a script would: a right one, unless the way it is run has a mistake."""

    where = "nowhere"

    def __init__(self, **mistakes: str) -> None:
        self.mistakes = mistakes
        self.trials: list[ProofRun] = []

    async def run(self, trial: ProofRun, directory: Path, phase: Phase) -> None:
        self.trials.append(trial)
        mistake = self.mistakes.get(f"{trial.launcher}_{trial.parallel}", "")
        if mistake == "fails":
            raise ScriptFailed("it ended with status 3:\n  ValueError: x", hint="run the script by itself first")
        for rank in range(trial.processes if mistake != "silent" else 0):
            self._record(rank, trial, directory, mistake)

    def _record(self, rank: int, trial: ProofRun, directory: Path, mistake: str) -> None:
        size = len(SAMPLES) // trial.processes
        ranks = {"RANK": str(rank), "WORLD_SIZE": str(trial.processes)}
        record = ProofRecorder(directory, {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"})
        record.model(trial.parallel, [], [])
        record.record_start([ParameterPart("w", False, array("d", [1.0]).tobytes())])
        record.add_samples(SAMPLES[rank * size : (rank + 1) * size] if mistake != "samples" else SAMPLES[:size])
        record.step(0.1, 1.0, 0.0)
        record.loss("progress", 1, 0.25)
        record.record_end([ParameterPart("w", False, array("d", [2.0]).tobytes())])


ASKED = ProofSettings("train.py", processes=4, launchers=("torchrun", "spawn"))


async def test_every_run_is_compared_with_the_single_process() -> None:
    runner = FakeRunner()
    result = await prove(ASKED, runner, NoProgress())
    assert runner.trials[0] == ProofRun("python", "ddp", 1)
    ways = [("torchrun", "ddp"), ("torchrun", "fsdp"), ("spawn", "ddp"), ("spawn", "fsdp")]
    assert [(trial.launcher, trial.parallel) for trial in runner.trials[1:]] == ways
    assert [(row.launcher, row.parallel, row.passed) for row in result.rows] == [(*way, True) for way in ways]
    assert result.passed and result.losses == (0.25,) and result.steps == 1


async def test_unwritable_record_directory_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ShoalError) as caught:
        await prove(ASKED, FakeRunner(), NoProgress(), tmp_path / "file")
    assert caught.value.message == f"cannot make {tmp_path}/file/one-process: Not a directory"
    assert caught.value.hint == "choose a directory that you may write to with --keep"


async def test_failed_run_does_not_stop_the_others() -> None:
    runner = FakeRunner(torchrun_ddp="samples", torchrun_fsdp="fails", spawn_ddp="silent")
    result = await prove(ASKED, runner, NoProgress())
    assert not result.passed
    differs, fails, silent, right = result.rows
    assert differs.found is not None and differs.cause.startswith("step 1: every rank reads the same 2 samples")
    assert fails.cause == "it ended with status 3:\n  ValueError: x\n  fix: run the script by itself first"
    assert silent.cause == (
        "the script recorded nothing: it never called shoal.train.init()\n  fix: call shoal.train.init() at its start"
    )
    assert right.passed


@cases(
    "mistake, said",
    ("fails", "the script fails with one process: it ended with status 3:\n  ValueError: x"),
    ("silent", "the script recorded nothing: it never called shoal.train.init()"),
)
async def test_failed_single_process_run_is_an_error(mistake: str, said: str) -> None:
    with pytest.raises(ShoalError) as raised:
        await prove(ASKED, FakeRunner(python_ddp=mistake), NoProgress())
    assert raised.value.message == said and raised.value.hint


async def test_records_are_kept_in_the_requested_directory(tmp_path: Path) -> None:
    asked, kept = ProofSettings("train.py", launchers=("spawn",), parallels=("ddp",)), tmp_path / "kept"
    await prove(asked, FakeRunner(), NoProgress(), kept)
    assert sorted(path.name for path in kept.iterdir()) == ["one-process", "spawn-ddp"]
    assert (kept / "spawn-ddp/rank-1.jsonl").exists()
