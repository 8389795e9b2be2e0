"""The time, handed in, so that a test of hours takes milliseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Seconds since 1970."""


LONGEST = 4000.0
"""Seconds. Nothing is ever put off for longer."""


def due(at: float, now: float, longest: float = LONGEST) -> bool:
    """Whether a time has come. What is put off for too long was put off by a clock that has been set back since."""
    return not now < at <= now + longest


class SystemClock:
    """This machine's clock."""

    def now(self) -> float:
        return time.time()
