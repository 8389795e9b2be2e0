"""Waiting for what another process or thread does."""

import time
from collections.abc import Callable

LIMIT_S = 600.0
"""Generous, as the machine may be busy. Reached only by what hangs."""


def wait_for(condition: Callable[[], object], seconds: float = LIMIT_S) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.02)
