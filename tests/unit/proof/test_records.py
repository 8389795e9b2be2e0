"""The records of ranks are merged into that of the job: shards, means, and what is missing."""

from __future__ import annotations

import dataclasses
import math
from array import array
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.unit.proof.records import many

from shoal.proof import compare
from shoal.proof.compare import Difference, concatenate, parameters, relative
from shoal.proof.records import RunRecord, describe_missing_record, read_run
from shoal.train.proof_record import ParameterPart, ProofRecorder, proof_recorder


def recording(directory: Path, rank: int = 0, world: int = 1, steps: int = 0) -> ProofRecorder:
    environ = {"RANK": str(rank), "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    return ProofRecorder(directory, {**(environ if world > 1 else {}), "SHOAL_PROOF_STEPS": str(steps)})


def values(*numbers: float) -> bytes:
    return array("d", numbers).tobytes()


def test_relative_directory_is_below_the_job_directory(tmp_path: Path) -> None:
    assert proof_recorder({}) is None
    made = proof_recorder({"SHOAL_PROOF_DIR": "proof", "SHOAL_JOB_DIR": str(tmp_path), "SHOAL_PROOF_STEPS": "3"})
    assert made is not None and made.directory == tmp_path / "proof"
    assert (made.dtype, made.parallel, made.total_steps) == ("float64", "", 3)


def test_records_of_two_ranks_are_read_as_a_single_run(tmp_path: Path) -> None:
    torch, third = pytest.importorskip("torch"), 1 / 3
    for rank, (loss, samples, shard) in enumerate(((1.0, "ab", (1.0, 2.0)), (third, "cdef", (third,)))):
        made = recording(tmp_path, rank, 2)
        made.model("fsdp", ["norm"], [])
        made.record_start([ParameterPart("w", False, values(1.0, 2.0, rank)), ParameterPart("b", False, values(0.5))])
        made.add_samples(samples)
        made.step(0.1, 1.0, 4.0)
        made.loss("progress", 1, torch.tensor(loss, dtype=torch.float64, requires_grad=True))
        made.metrics({"accuracy": 1.0, "train_loss": 9.0}, 1)
        made.record_end([ParameterPart("w", True, values(*shard)), ParameterPart("b", False, values(0.5))])
    run = read_run(tmp_path)
    assert describe_missing_record(run, 2) is None
    assert (run.world_size, run.steps, run.source, run.reporting_ranks) == (2, 1, "progress", (0, 1))
    assert run.losses[0].value == (1.0 * 2 + third * 4) / 6, "weighted by samples"
    assert run.samples(0) == (("a", "b"), ("c", "d", "e", "f"))
    assert run.gradient(0) == 3.0, "the whole ones once, the shards of every rank"
    assert {name: list(concatenate(pieces)) for name, pieces in run.end.items()} == {"w": [1.0, 2.0, third], "b": [0.5]}
    assert (tmp_path / "rank-1.end").stat().st_size == 8, "what rank 0 has as well is kept once"
    assert list(run.start) == ["w", "b"] and run.start["w"] == ParameterPart("w", False, values(1.0, 2.0, 0)).digest
    assert run.diverged is None and run.ranks[1].batch_norm == ("norm",)


def test_recording_is_complete_after_the_requested_steps(tmp_path: Path) -> None:
    made = recording(tmp_path, steps=2)
    for _ in range(3):
        made.step(0.1, 1.0, 0.0)
    assert made.complete and made.steps == 2


def test_truncated_line_of_a_killed_rank_is_ignored(tmp_path: Path) -> None:
    recording(tmp_path).loss("tracker", 1, 0.5)
    with (tmp_path / "rank-0.jsonl").open("a") as file:
        file.write('{"kind": "loss", "sou')
    assert [loss.value for loss in read_run(tmp_path).losses] == [0.5]


@cases(
    "calls, said, fix",
    (0, "the script recorded nothing: it never called shoal.train.init()", "call shoal.train.init() at its start"),
    (1, "the script recorded no model: it never called shoal.train.parallelize()", "model = parallelize(model"),
    (2, "no optimizer took a step with the model's parameters", "make the optimizer after parallelize()"),
    (3, "the script reported no loss", "progress.step(step, loss) with shoal.train.progress.Progress"),
    (4, "not every rank kept its final parameters", "let the script end by itself"),
)
def test_missing_call_of_the_script_is_named(tmp_path: Path, calls: int, said: str, fix: str) -> None:
    if calls > 0:
        made = recording(tmp_path)
    for call in range(1, calls):
        if call == 1:
            made.model("ddp", [], [])
        elif call == 2:
            made.step(0.1, 1.0, 0.0)
        else:
            made.loss("progress", 1, 1.0)
    missing = describe_missing_record(read_run(tmp_path), 1)
    assert missing is not None and missing[0] == said and fix in missing[1]


def test_rank_without_records_or_steps_is_reported() -> None:
    missing = describe_missing_record(RunRecord(many(4).ranks[:1]), 4)
    assert missing is not None and missing[0] == "of 4 processes only rank 0 recorded anything"
    first, *others = many(4).ranks
    missing = describe_missing_record(RunRecord((first, *(dataclasses.replace(rank, steps=()) for rank in others))), 4)
    assert missing is not None and missing[0] == "rank 1, 2, 3 took no step: its optimizer never ran"


def held(*numbers: float, type: str = "d") -> list[memoryview[float]]:
    return [memoryview(array(type, numbers))]


def test_diverged_parameter_is_detected_by_its_digest(tmp_path: Path) -> None:
    for rank, value in enumerate((0.5, 0.5, 0.25)):
        recording(tmp_path, rank, 3).record_end(
            [ParameterPart("w", False, values(1.0)), ParameterPart("b", False, values(value))]
        )
    assert read_run(tmp_path).diverged == ("b", 2)


def test_non_finite_numbers_differ_infinitely() -> None:
    assert relative(1.0, math.nan) == relative(math.inf, math.inf) == math.inf
    for odd in (math.nan, math.inf):
        for one, other in ((1.0, odd), (odd, 1.0), (odd, odd)):
            assert parameters({"w": held(one)}, {"w": held(other)}) == Difference(math.inf, "w")
    assert parameters({"w": held(1.0)}, {"w": held(1.0, 2.0)}) == Difference(math.inf, "w")
    assert parameters({"w": held(1.0)}, {}).relative == parameters({}, {"w": held(1.0)}).relative == math.inf
    assert parameters({}, {}) == parameters({"w": held(0.0)}, {"w": held(-0.0)}) == Difference(0.0)


def test_parameter_is_compared_relative_to_its_largest_value() -> None:
    one = {"large": held(100.0, 1e-9), "small": held(0.5), "zero": held(1e-17)}
    found = parameters(one, {**one, "small": held(0.5000005), "zero": held(-1e-17)})
    assert found.where == "small" and found.relative == pytest.approx(1e-6)


def test_sharded_parameter_is_compared_with_the_whole() -> None:
    pieces = [*held(1.0, 2.0), *held(), *held(4.5)]
    assert parameters({"w": held(1.0, 2.0, 4.5)}, {"w": pieces}) == Difference(0.0)
    assert parameters({"w": held(1.0, 2.0, 4.0)}, {"w": pieces}) == Difference(0.125, "w")


@cases("type", "d", "f")
@cases("odd", -3.5, math.nan, -math.inf)
def test_torch_and_python_comparisons_agree_at_any_size(type: str, odd: float) -> None:
    """Where this Python has torch, it compares what is large."""
    size = compare.TORCH_MIN_ELEMENTS + 1
    one, other = array(type, [0.5, -0.25]) * (size // 2), array(type, [0.5, -0.125]) * (size // 2)
    assert len(one) >= compare.TORCH_MIN_ELEMENTS > len(one[: size // 2])
    other[-1] = odd
    for largest in (lambda a, b: compare.max_abs(b), compare.max_abs):
        quick = largest(memoryview(one), memoryview(other))
        assert quick == max(
            largest(memoryview(one)[at:][:70], memoryview(other)[at:][:70]) for at in (0, len(one) - 70)
        )
        assert quick in (3.5, 3.25, math.inf)
