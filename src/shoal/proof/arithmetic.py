"""The arithmetic of a comparison, on the elements of parameters: with torch where this Python has it.

A Python without torch may compare as well, as the script may run elsewhere. It takes a minute for 100 million elements
instead of a second.
"""

from __future__ import annotations

import functools
import importlib.util
import math
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

MANY = 100_000
"""Elements from which on it is quicker to wait until torch is imported."""
STRETCH = 1 << 22
"""Elements that are worked on at once, so that no second copy of a large parameter is made."""


def joined(pieces: Sequence[memoryview[float]]) -> memoryview[float]:
    """One piece after the other."""
    if len(pieces) == 1:
        return pieces[0]
    return memoryview(bytearray().join(pieces)).cast("f" if pieces[0].format == "f" else "d")


def largest_value(values: memoryview[float]) -> float:
    """The largest absolute value; infinite where one is no number."""
    if torch := _torch_for(values):
        return max((_largest(part) for part in _stretches(torch, values)), default=0.0)
    return _largest_of(values)


def largest_difference(one: memoryview[float], other: memoryview[float]) -> float:
    """The largest absolute difference of two elements; infinite where one is no number."""
    if torch := _torch_for(one):
        both = zip(_stretches(torch, one), _stretches(torch, other), strict=True)
        return max((_largest(ours - theirs) for ours, theirs in both), default=0.0)
    return _largest_of(map(operator.sub, one, other))


def _torch_for(values: memoryview[float]) -> Any:
    return _torch() if len(values) >= MANY else None


@functools.cache
def _torch() -> Any:
    return importlib.import_module("torch") if importlib.util.find_spec("torch") else None


def _stretches(torch: Any, values: memoryview[float]) -> Iterator[Any]:
    tensor = torch.frombuffer(values, dtype={"d": torch.float64, "f": torch.float32}[values.format])
    return (part.double() for part in tensor.split(STRETCH))


def _largest(part: Any) -> float:
    found = float(part.abs().max())
    return found if found == found else math.inf


def _largest_of(values: Iterable[float]) -> float:
    """As `max`, which would pass over what is no number."""
    found = 0.0
    for value in map(abs, values):
        if not value <= found:
            found = value if value == value else math.inf
    return found
