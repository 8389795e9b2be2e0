"""The time, handed in, so that a test of hours takes milliseconds."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> float:
        """Seconds since 1970."""


class SystemClock:
    """This machine's clock."""

    def now(self) -> float:
        return time.time()
