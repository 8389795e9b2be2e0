"""The numbers that a script tells: losses and metrics."""

from __future__ import annotations

from typing import Any


def detached(value: Any) -> Any:
    """A tensor without the gradients that hang on it: a loss as it is before `backward()` is told as often as not.

    torch warns when such a one is made a number, and kept, it keeps what it was computed from.
    """
    detach = getattr(value, "detach", None)
    return detach() if callable(detach) else value
