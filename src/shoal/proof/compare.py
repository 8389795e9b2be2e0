"""How far a run with many processes is from the same run with one: a pure function of both records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from shoal.proof.arithmetic import joined, largest_difference, largest_value
from shoal.proof.records import RunRecord, Values
from shoal.proof.samples import same_samples

SMALL = 1e-3
"""A parameter smaller than this part of the model's largest is compared with that: where the true value is zero, as in
the bias of an attention's keys, both runs have nothing but rounding in it."""


@dataclass(frozen=True)
class Difference:
    """The largest relative difference of something, and where it is."""

    relative: float
    where: str = ""


@dataclass(frozen=True)
class Comparison:
    """What differs between a run with many processes and one with a single process."""

    losses: Difference
    """Over all steps."""
    gradient: Difference
    """The norm of the first step's: an optimizer that takes no notice of its scale would hide a wrong one for long."""
    parameters: Difference
    """After the last step: the largest difference within a parameter, relative to the largest value in it."""
    start: str
    """A parameter that was another before the first step already; empty where none was."""
    steps: tuple[int, int]
    """Steps that one process took, and that many took."""
    losses_told: bool
    """Both told the loss of the same steps."""
    apart: bool
    """Ranks that should hold the same parameters do not."""
    samples: bool
    """All ranks together read what one process reads, step by step. Where every rank reads all of it the numbers agree
    too, and N processes are no faster than one."""

    def within(self, tolerance: float) -> bool:
        """Whether the two runs are the same but for rounding."""
        differences = (self.losses, self.gradient, self.parameters)
        same = all(difference.relative <= tolerance for difference in differences)
        whole = self.samples and self.losses_told and self.steps[0] == self.steps[1]
        return same and whole and not self.apart


def compare(one: RunRecord, many: RunRecord) -> Comparison:
    """Compare two whole records (see `what_is_missing`)."""
    gradient = relative(one.gradient(0), many.gradient(0))
    return Comparison(
        _losses(one, many),
        Difference(gradient, "step 1"),
        parameters(one.end, many.end),
        next((name for name, digest in one.start.items() if many.start.get(name) != digest), ""),
        (one.steps, many.steps),
        [loss.step for loss in one.losses] == [loss.step for loss in many.losses],
        many.apart is not None,
        all(same_samples(one, many, step) for step in range(min(one.steps, many.steps))),
    )


def relative(one: float, other: float) -> float:
    """The difference of two numbers relative to the larger; infinite where either is no finite number."""
    if not (math.isfinite(one) and math.isfinite(other)):
        return math.inf
    return abs(one - other) / max(abs(one), abs(other)) if one != other else 0.0


def parameters(one: Mapping[str, Values], many: Mapping[str, Values]) -> Difference:
    """The parameter that differs most. One that is missing, or has another size, differs without bound."""
    for name in (*one, *many):
        if sum(map(len, one.get(name, ()))) != sum(map(len, many.get(name, ()))):
            return Difference(math.inf, name)
    largest = {name: largest_value(joined(values)) for name, values in one.items()}
    floor = SMALL * max(largest.values(), default=0.0)
    worst = Difference(0.0)
    for name, values in one.items():
        if apart := largest_difference(joined(values), joined(many[name])):
            scale = max(largest[name], floor)
            amount = apart / scale if scale and math.isfinite(apart) else math.inf
            worst = Difference(amount, name) if amount > worst.relative else worst
    return worst


def _losses(one: RunRecord, many: RunRecord) -> Difference:
    worst = Difference(0.0)
    for ours, theirs in zip(one.losses, many.losses, strict=False):
        amount = relative(ours.value, theirs.value)
        if amount > worst.relative:
            worst = Difference(amount, f"step {theirs.step}")
    return worst
