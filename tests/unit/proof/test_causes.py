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


def test_missing_loss_is_a_cause_even_if_the_others_agree() -> None:
    assert cause(many(losses=(2.0,))).startswith(
        "one process reported 2 losses, 2 reported 1 (step 2 is among those of one alone): what was not reported "
        "cannot be compared"
    )
    first, second = many().ranks
    uneven = RunRecord((first, dataclasses.replace(second, losses={"progress": second.losses["progress"][:1]})))
    assert cause(uneven).startswith("one process reported 2 losses, 2 reported 1")


@cases(
    "run, said",
    (reading("xy", "xy"), "every rank reads the same 2 samples, none of which one process reads then"),
    (
        reading(BATCH, "ijklmnop"),
        "each of the 2 ranks reads 8 samples, 16 together, and one process 8: the batch is stated for a rank;"
        " state it for the job, 8 // world_size a rank (or Loader(global_batch=8))",
    ),
    (
        reading("abcd", "defg"),
        "no rank reads number 8 of the 8 samples that one process reads; ranks 0 and 1 read the same: number 4",
    ),
    (
        reading("abcd", "efxy"),
        "rank 1 reads 2 samples that one process does not read then: their data is shuffled, split or changed at"
        " random by each rank for itself; draw the order from one seed for all ranks",
    ),
)
def test_wrong_samples_are_named(run: RunRecord, said: str) -> None:
    assert said in cause(run)


def test_gradients_n_times_too_small_are_divided_twice() -> None:
    said = cause(many(4, gradients=(9.0 / 16, 4.0), losses=(0.5, 1.0)))
    assert said.startswith(
        "the first gradient is 1/4 of that of one process, as is the reported loss: it is divided by"
    )


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


def test_equal_seeds_are_told_from_other_numbers() -> None:
    run = many(2, losses=(2.5, 1.0), dropout=("e",))
    equal = RunRecord(tuple(dataclasses.replace(rank, random_state="aa") for rank in run.ranks))
    assert "e (Dropout) draws the same numbers on every rank, because their seeds are equal" in cause(equal)
    assert "e (Dropout) draws other numbers on each rank" in cause(run)


def test_gradient_with_another_factor_is_reported_as_modified() -> None:
    assert "the first gradient is 1.66667 times that of one process: something changes gradients" in cause(
        many(2, gradients=(25.0, 4.0))
    )


def test_different_start_parameters_are_the_first_cause() -> None:
    said = cause(many(2, start=(1.0, 2.5), losses=(7.0, 7.0)))
    assert said.startswith("the parameters differ before the first step (w): every run starts from another model")


def test_rank_dependent_layers_are_named() -> None:
    said = cause(many(2, losses=(2.5, 1.0), batch_norm=("a", "b", "c", "d"), dropout=("e",)))
    assert "on the same samples: a, b, c and 1 more (BatchNorm) looks at the samples of its own rank only" in said
    assert "e (Dropout) draws other numbers on each rank" in said


def test_unexplained_difference_of_the_first_loss_is_shown() -> None:
    said = cause(many(2, losses=(2.5, 1.0)))
    assert "the first loss differs, on the same samples and parameters: 2 with one process, 2.5 with 2" in said


def test_loss_reported_only_by_rank_0_differs_from_a_wrong_loss() -> None:
    first, second = many(2, losses=(2.5, 1.5)).ranks
    said = cause(RunRecord((first, dataclasses.replace(second, losses={}))))
    assert said.startswith(
        "only rank 0 of 2 reported a loss, and it is that of its own part of the batch; the gradients agree"
    )


def test_unequal_batches_are_counted() -> None:
    parts = (("abcde", "abcd"), ("fgh", "efgh"))
    ranks = (rank(at, 2, samples=part, end=(3.0, 4.1)) for at, part in enumerate(parts))
    assert cause(RunRecord(tuple(ranks))).startswith(
        "step 1: the ranks have 5, 3 samples, and their gradients are averaged"
    )


def test_different_number_of_steps_is_reported() -> None:
    short = [dataclasses.replace(rank, steps=rank.steps[:1]) for rank in many(2).ranks]
    assert cause(RunRecord(tuple(short))).startswith(
        "one process took 2 steps, 2 took 1: the data of an epoch is divided"
    )


def test_nan_loss_cannot_be_compared() -> None:
    said = cause(many(2, losses=(2.0, math.nan)), RunRecord((rank(losses=(2.0, math.nan)),)))
    assert said.startswith("the loss of one process is nan at step 2: that training diverges, and cannot be compared")


def test_accumulated_rounding_differs_from_a_mistake() -> None:
    assert "rounding that grew" in cause(many(2, end=(3.0, 4.0 + 1e-9)))
    assert "agree, and then the runs part" in cause(many(2, end=(3.0, 5.0)))


def test_sample_numbers_are_written_as_ranges() -> None:
    assert "no rank reads numbers 1, 4-5, 7-8 of the 8" in cause(reading("bc", "ff"))
