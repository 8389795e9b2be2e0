"""Real ranks that train in a proof: correct scripts agree with one process, and each faulty one is detected."""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cases import cases
from tests.unit.proof.train import TOTAL, train
from tests.unit.train.procs import fresh_ranks

from shoal.proof.causes import likely_cause
from shoal.proof.compare import Comparison, compare
from shoal.proof.records import RunRecord, describe_missing_record, read_run
from shoal.train.checkpoint import Checkpointer
from shoal.train.proof_watch import begin_proof, digests

WORLD = 2


@dataclass(frozen=True)
class Case:
    fault: str = ""
    parallel: str = "ddp"
    dtype: str = "float64"
    steps: int = 0
    options: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def name(self) -> str:
        return f"{self.fault}-{self.parallel}-{self.dtype}-{self.steps}".replace(" ", "_")


RIGHT = [
    Case(),
    Case(parallel="fsdp", options={"mixed_precision": "bf16", "activation_checkpointing": True}),
    Case(options={"mixed_precision": "bf16"}, steps=5),
    Case(dtype="float32"),
    Case(dtype="float32", parallel="fsdp"),
    Case("no seed"),
    Case("tracker"),
    Case("sampler"),
]
WRONG = {
    Case("same samples"): "step 1: every rank reads the same 8 samples, numbers 1-8 of the 16 that one process"
    " reads; no rank reads numbers 9-16: give each rank its own part of the batch",
    Case("same samples", "fsdp"): "step 1: every rank reads the same 8 samples",
    Case("whole batch"): "step 1: every rank reads all 16 samples that one process reads",
    Case("drops samples"): "step 1: no rank reads number 16 of the 16 samples that one process reads; rank 1 reads 7,"
    " others 8",
    Case("batch a rank"): "step 1: each of the 2 ranks reads 16 samples, 32 together, and one process 16",
    Case(
        "own shuffle"
    ): "rank 1 reads 7 samples that one process does not read then, but at another step (7 of them): the"
    " ranks do not follow one order of the samples",
    Case("sums"): "the first gradient is 2 times that of one process; the loss itself agrees: gradients are summed over"
    " the 2 ranks instead of averaged",
    Case("sums", "fsdp", "float32"): "gradients are summed over the 2 ranks instead of averaged",
    Case("divides twice"): "the first gradient is 1/2 of that of one process; the loss itself agrees: it is divided by"
    " the number of ranks twice",
    Case("divides twice", "fsdp"): "it is divided by the number of ranks twice",
    Case("not wrapped"): "the ranks hold different parameters at the end: 0.weight of rank 1 is not that of rank 0",
    Case("scaled rate"): "step 1: the learning rate is 0.1 with 2 processes and 0.05 with one",
    Case("rank 0 tells"): "only rank 0 of 2 reported a loss",
    Case("batch norm"): "the first loss differs, on the same samples: 1 (BatchNorm) looks at the samples of its own",
    Case("accumulates"): "the first gradient is 2/4 of that of one process; the loss itself agrees: one process"
    " accumulates the gradients of 4 batches for a step, 2 accumulate 2 each, and backward() adds them up",
    Case(
        "equal seeds"
    ): "3 (Dropout) draws the same numbers on every rank, because their seeds are equal: seed each rank",
    Case("sampler without epochs"): "the DistributedSampler shuffles every epoch alike: set_epoch() does not change its"
    " order; call sampler.set_epoch(epoch) before each epoch",
    Case("sampler without epochs", steps=5): "the DistributedSampler shuffles every epoch alike",
    Case("dropout"): "the first loss differs, on the same samples: 3 (Dropout) draws other numbers on each rank",
}


def _train(rank: int, root: str, cases: list[Case], world: int) -> None:
    """All cases in one process: to start one takes longer than to train."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})
    os.environ.update({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", "LOCAL_WORLD_SIZE": str(world)})
    for case in cases:
        os.environ["SHOAL_PROOF_DIR"] = f"{root}/{case.name}"
        os.environ["SHOAL_PROOF_DTYPE"] = case.dtype
        os.environ["SHOAL_PROOF_STEPS"] = str(case.steps or TOTAL)
        os.environ["SHOAL_PROOF_PARALLEL"] = "ddp" if world == 1 else case.parallel
        begin_proof()
        try:
            train(case.fault, "fsdp" if case.parallel == "ddp" else "ddp", **case.options)  # the proof decides
            assert not case.steps, "it goes on after the proof has seen enough"
        except SystemExit as leaving:
            assert case.steps and leaving.code == 0


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made, cases = tmp_path_factory.mktemp("proof"), [*RIGHT, *WRONG]
    fresh_ranks(1, _train, str(made / "one"), cases, 1)
    fresh_ranks(WORLD, _train, str(made / "many"), cases, WORLD)
    return made


def runs(directory: Path, case: Case) -> tuple[RunRecord, RunRecord, Comparison]:
    one, many = read_run(directory / "one" / case.name), read_run(directory / "many" / case.name)
    assert describe_missing_record(one, 1) is None and describe_missing_record(many, WORLD) is None
    return one, many, compare(one, many)


@cases("case", *RIGHT, ids=lambda case: case.name)
def test_correct_script_agrees_except_for_rounding(directory: Path, case: Case) -> None:
    one, many, found = runs(directory, case)
    assert found.within(1e-12 if case.dtype == "float64" else 1e-6), found
    assert one.steps == many.steps == len(many.losses) == (case.steps or TOTAL)
    assert [rank.parallel for rank in many.ranks] == [case.parallel] * WORLD
    assert one.end != one.start, "it has learned something"


@cases("case", *WRONG, ids=lambda case: case.name)
def test_wrong_script_fails_with_its_cause(directory: Path, case: Case) -> None:
    one, many, found = runs(directory, case)
    tolerance = 1e-12 if case.dtype == "float64" else 1e-6
    assert not found.within(tolerance) and WRONG[case] in likely_cause(one, many, found, tolerance)


def test_proof_does_not_use_checkpoints_of_the_real_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_PROOF_DIR", str(tmp_path / "proof"))
    assert Checkpointer(tmp_path / "real").directory == tmp_path / "proof" / "checkpoints"
    monkeypatch.delenv("SHOAL_PROOF_DIR")
    assert Checkpointer(tmp_path / "real").directory == tmp_path / "real"


def test_samples_have_digests_in_any_batch_structure() -> None:
    batch = torch.arange(6.0).reshape(3, 2)
    names = digests((("text", {"x": batch}), {}))
    assert names == digests((batch,)) == digests(batch.T.contiguous().T) and len(set(names)) == 3
    assert digests(((), {})) == digests((torch.tensor(1.0),)) == []
