"""A run that differs is explained by its first error, with a fix."""

import dataclasses
import math

from tests.support.cases import cases
from tests.unit.proof.records import BATCH, ONE, many, rank, reading

from shoal.proof.causes import likely_cause
from shoal.proof.compare import compare
from shoal.proof.records import RunRecord

TOLERANCE = 1e-12


def cause(run: RunRecord, one: RunRecord = ONE) -> str:
    found = compare(one, run)
    assert not found.within(TOLERANCE)
    return likely_cause(one, run, found, TOLERANCE)


def test_equal_runs_have_no_cause() -> None:
    assert compare(ONE, many()).within(TOLERANCE)
    assert compare(ONE, many(4, end=(3.0, 4.0 + 1e-13))).within(TOLERANCE)


def other_rank(run: RunRecord, **fields: object) -> RunRecord:
    """The run with other fields of its second rank."""
    return RunRecord((run.ranks[0], dataclasses.replace(run.ranks[1], **fields)))  # type: ignore[arg-type]


UNEQUAL = (("abcde", "abcd"), ("fgh", "efgh"))


@cases(
    "run, said",
    (reading("xy", "xy"), "step 1: every rank reads the same 2 samples, none of which one process reads then"),
    (
        reading(BATCH, "ijklmnop"),
        "step 1: each of the 2 ranks reads 8 samples, 16 together, and one process 8: the batch is stated for a rank;"
        " state it for the job, 8 // world_size a rank (or Loader(global_batch=8))",
    ),
    (
        reading("abcd", "defg"),
        "step 1: no rank reads number 8 of the 8 samples that one process reads; ranks 0 and 1 read the same: number 4",
    ),
    (
        reading("abcd", "efxy"),
        "step 1: rank 1 reads 2 samples that one process does not read then: their data is shuffled, split or changed"
        " at random by each rank for itself; draw the order from one seed for all ranks",
    ),
    (reading("bc", "ff"), "step 1: no rank reads numbers 1, 4-5, 7-8 of the 8"),
    (
        many(losses=(2.0,)),
        "one process reported 2 losses, 2 reported 1 (step 2 is among those of one alone): what was not reported "
        "cannot be compared",
    ),
    (
        other_rank(many(), losses={"progress": many().ranks[1].losses["progress"][:1]}),
        "one process reported 2 losses, 2 reported 1",
    ),
    (
        many(4, gradients=(9.0 / 16, 4.0), losses=(0.5, 1.0)),
        "the first gradient is 1/4 of that of one process, as is the reported loss: it is divided by",
    ),
    (
        many(2, gradients=(25.0, 4.0)),
        "the first loss agrees, and the first gradient is 1.66667 times that of one process: something changes",
    ),
    (
        many(2, start=(1.0, 2.5), losses=(7.0, 7.0)),
        "the parameters differ before the first step (w): every run starts from another model",
    ),
    (
        many(2, losses=(2.5, 1.0)),
        "the first loss differs, on the same samples and parameters: 2 with one process, 2.5 with 2",
    ),
    (
        other_rank(many(2, losses=(2.5, 1.5)), losses={}),
        "only rank 0 of 2 reported a loss, and it is that of its own part of the batch; the gradients agree",
    ),
    (
        RunRecord(tuple(rank(at, 2, samples=part, end=(3.0, 4.1)) for at, part in enumerate(UNEQUAL))),
        "step 1: the ranks have 5, 3 samples, and their gradients are averaged",
    ),
    (
        RunRecord(tuple(dataclasses.replace(rank, steps=rank.steps[:1]) for rank in many(2).ranks)),
        "one process took 2 steps, 2 took 1: the data of an epoch is divided",
    ),
    (many(2, end=(3.0, 4.0 + 1e-9)), "all agree at the first step, and differ by 2.5e-10 at most: rounding that grew"),
    (many(2, end=(3.0, 5.0)), "samples, learning rate, first loss and first gradient agree, and then the runs part"),
)
def test_first_error_is_named(run: RunRecord, said: str) -> None:
    assert cause(run).startswith(said)


def test_nan_loss_cannot_be_compared() -> None:
    said = cause(many(2, losses=(2.0, math.nan)), RunRecord((rank(losses=(2.0, math.nan)),)))
    assert said.startswith("the loss of one process is nan at step 2: that training diverges, and cannot be compared")


def test_rank_dependent_layers_are_named_and_equal_seeds_told_from_other_numbers() -> None:
    run = many(2, losses=(2.5, 1.0), batch_norm=("a", "b", "c", "d"), dropout=("e",))
    assert "on the same samples: a, b, c and 1 more (BatchNorm) looks at the samples of its own rank only" in cause(run)
    assert "e (Dropout) draws other numbers on each rank" in cause(run)
    equal = RunRecord(tuple(dataclasses.replace(rank, random_state="aa") for rank in run.ranks))
    assert "e (Dropout) draws the same numbers on every rank, because their seeds are equal" in cause(equal)


def test_wrong_gradient_size_fails_even_if_the_optimizer_hides_the_size() -> None:
    found = compare(ONE, many(2, gradients=(36.0, 4.0)))
    assert (found.losses.relative, found.parameters.relative) == (0.0, 0.0) and not found.within(TOLERANCE)


def test_undivided_accumulation_is_not_taken_for_a_second_division() -> None:
    def with_batches(run: RunRecord, batches: int) -> RunRecord:
        steps = [tuple(dataclasses.replace(step, batches=batches) for step in rank.steps) for rank in run.ranks]
        return RunRecord(
            tuple(dataclasses.replace(rank, steps=own) for rank, own in zip(run.ranks, steps, strict=True))
        )

    said = cause(with_batches(many(4, gradients=(9.0 / 16, 4.0)), 2), with_batches(ONE, 8))
    assert said.startswith("the first gradient is 2/8 of that of one process; the loss itself agrees: one process")
    assert "divide the loss by the number of batches of a step" in said
