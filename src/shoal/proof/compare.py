"""How far a run with many processes is from the same run with one: a pure function of both records."""

from __future__ import annotations

import math
import operator
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from shoal.proof.records import RunRecord
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
    start: Difference
    """The same before the first step."""
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
        parameters(one.start, many.start),
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


def parameters(one: Mapping[str, array[float]], many: Mapping[str, array[float]]) -> Difference:
    """The parameter that differs most. One that is missing, or has another size, differs without bound."""
    if odd := [name for name in (*one, *many) if len(one.get(name, ())) != len(many.get(name, ()))]:
        return Difference(math.inf, odd[0])
    # Bit for bit, as at the start, is several times quicker than number by number. What is no number never agrees.
    odd = [name for name in one if one[name].tobytes() != many[name].tobytes() or not math.isfinite(sum(one[name]))]
    if not odd:
        return Difference(0.0)
    largest = {name: _largest(values) for name, values in one.items()}
    floor = SMALL * max(largest.values())
    worst = Difference(0.0)
    for name in odd:
        apart = _largest(map(operator.sub, one[name], many[name]))
        scale = max(largest[name], floor)
        amount = apart / scale if math.isfinite(apart) and scale else math.inf
        if amount > worst.relative:
            worst = Difference(amount, name)
    return worst


def _losses(one: RunRecord, many: RunRecord) -> Difference:
    worst = Difference(0.0)
    for ours, theirs in zip(one.losses, many.losses, strict=False):
        amount = relative(ours.value, theirs.value)
        if amount > worst.relative:
            worst = Difference(amount, f"step {theirs.step}")
    return worst


def _largest(values: Iterable[float]) -> float:
    """The largest absolute value; infinite where one is no number, which `max` would pass over."""
    found = 0.0
    for value in map(abs, values):
        if not value <= found:
            found = value if value == value else math.inf
    return found
