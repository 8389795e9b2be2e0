"""How far a run with many processes is from the same run with one process: a pure function of both records.

Parameters are compared with torch where this Python has it. Without torch it takes a minute for 100 million elements
instead of a second. The fields of Comparison are keys of `shoal prove --json`.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shoal.proof.records import RunRecord, Values

SMALL_PARAMETER = 1e-3
"""Scale floor, as a fraction of the model's largest parameter: where the true value is zero, as in the bias of an
attention's keys, both runs hold only rounding."""


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
    """The norm at the first step: an optimizer such as Adam hides a wrong scale for long."""
    parameters: Difference
    """After the last step: the largest difference within a parameter, relative to the largest value in it."""
    start: str
    """A parameter that differed before the first step; empty where none did."""
    steps: tuple[int, int]
    """Steps that one process took, and that many took."""
    losses_told: bool
    """Both runs reported the loss of the same steps."""
    apart: bool
    """Ranks that should hold the same parameters do not."""
    samples: bool
    """At each step all ranks together read what one process reads. If every rank read all of it, the numbers would
    agree too, and N processes would be no faster than one."""
    epochs_alike: bool = False
    """A sampler shuffles every epoch alike: one process may do the same, so the numbers agree."""

    def within(self, tolerance: float) -> bool:
        """Whether the two runs are the same but for rounding."""
        differences = (self.losses, self.gradient, self.parameters)
        has_equal_numbers = all(difference.relative <= tolerance for difference in differences)
        has_equal_steps = self.samples and self.losses_told and self.steps[0] == self.steps[1]
        return has_equal_numbers and has_equal_steps and not self.apart and not self.epochs_alike


def compare(single: RunRecord, many: RunRecord) -> Comparison:
    """Compare two whole records (see `describe_missing_record`)."""
    gradient = relative(single.gradient(0), many.gradient(0))
    return Comparison(
        _losses(single, many),
        Difference(gradient, "step 1"),
        parameters(single.end, many.end),
        next((name for name, digest in single.start.items() if many.start.get(name) != digest), ""),
        (single.steps, many.steps),
        [loss.step for loss in single.losses] == [loss.step for loss in many.losses],
        many.diverged is not None,
        all(same_samples(single, many, step) for step in range(min(single.steps, many.steps))),
        bool(many.repeated_order),
    )


def relative(first: float, second: float) -> float:
    """The difference of two numbers relative to the larger; infinite where either is not finite."""
    if not (math.isfinite(first) and math.isfinite(second)):
        return math.inf
    return abs(first - second) / max(abs(first), abs(second)) if first != second else 0.0


def parameters(single: Mapping[str, Values], many: Mapping[str, Values]) -> Difference:
    """The parameter that differs most. A missing one, or one of another size, differs infinitely."""
    for name in (*single, *many):
        if sum(map(len, single.get(name, ()))) != sum(map(len, many.get(name, ()))):
            return Difference(math.inf, name)
    largest = {name: max_abs(concatenate(values)) for name, values in single.items()}
    floor = SMALL_PARAMETER * max(largest.values(), default=0.0)
    differences = [Difference(0.0)]
    for name, values in single.items():
        if difference := max_abs(concatenate(values), concatenate(many[name])):
            scale = max(largest[name], floor)
            amount = difference / scale if scale and math.isfinite(difference) else math.inf
            differences.append(Difference(amount, name))
    return _largest(differences)


def same_samples(single: RunRecord, many: RunRecord, step: int) -> bool:
    """Whether the ranks together read what one process reads at a step; also where that is not known."""
    batch, parts = single.samples(step)[0], many.samples(step)
    read_counts = Counter(name for part in parts for name in part)
    return not batch or not read_counts or read_counts == Counter(batch)


def _losses(single: RunRecord, many: RunRecord) -> Difference:
    pairs = zip(single.losses, many.losses, strict=False)
    differences = (
        Difference(relative(single_loss.value, many_loss.value), f"step {many_loss.step}")
        for single_loss, many_loss in pairs
    )
    return _largest([Difference(0.0), *differences])


def _largest(differences: Sequence[Difference]) -> Difference:
    return max(differences, key=lambda difference: difference.relative)


TORCH_MIN_ELEMENTS = 100_000
"""From this size on, importing torch pays off."""
CHUNK_ELEMENTS = 1 << 22
"""Elements processed at once, to avoid a second copy of a large parameter."""


def concatenate(pieces: Sequence[memoryview[float]]) -> memoryview[float]:
    """The pieces, one after the other."""
    if len(pieces) == 1:
        return pieces[0]
    return memoryview(bytearray().join(pieces)).cast("f" if pieces[0].format == "f" else "d")


def max_abs(*operands: memoryview[float]) -> float:
    """The largest absolute value, or of two operands the largest difference; infinite where an element is NaN."""
    maxima: Iterable[float]
    if len(operands[0]) >= TORCH_MIN_ELEMENTS and (torch := _torch()):
        chunks = zip(*(_chunks(torch, values) for values in operands), strict=True)
        maxima = (float(functools.reduce(operator.sub, chunk_group).abs().max()) for chunk_group in chunks)
    else:
        maxima = map(abs, operands[0] if len(operands) == 1 else map(operator.sub, *operands))
    largest = 0.0
    for value in maxima:  # not by `max`, which would skip NaN
        if not value <= largest:
            largest = value if value == value else math.inf
    return largest


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _chunks(torch: Any, values: memoryview[float]) -> Iterator[Any]:
    tensor = torch.frombuffer(values, dtype={"d": torch.float64, "f": torch.float32}[values.format])
    return (chunk.double() for chunk in tensor.split(CHUNK_ELEMENTS))
