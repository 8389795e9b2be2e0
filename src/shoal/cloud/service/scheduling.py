"""The clock, due times, and calls to providers that run in the background of the steps.

A step starts the calls that are due and waits briefly for them. A call that takes longer goes on by itself, so a
provider that hangs delays no other. At most one call runs per key.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any, Protocol


class Clock(Protocol):
    """The time, passed in so that tests of hours take milliseconds."""

    def now(self) -> float:
        """Seconds since 1970."""


MAX_DELAY_S = 4000.0
"""Nothing is ever delayed for longer."""


def is_due(at: float, now: float, longest: float = MAX_DELAY_S) -> bool:
    """Whether a time has come. A time too far in the future is from a clock that was set back since."""
    return not now < at <= now + longest


class SystemClock:
    """This machine's clock."""

    def now(self) -> float:
        return time.time()


log = logging.getLogger("shoal.elastic")

STEP_WAIT_S = 2.0
"""How long a step waits for a call."""


@dataclass
class BackgroundCalls:
    """The running calls of one kind, by key."""

    step_wait_s: float = STEP_WAIT_S
    wake: Callable[[], None] = lambda: None
    """Called when a call ends that is no longer waited for."""
    _calls: dict[Hashable, tuple[asyncio.Task[None], float]] = field(default_factory=dict)
    """The running calls, and until when they are waited for, by the loop's clock."""
    _errors: list[BaseException] = field(default_factory=list)
    """Errors of ended calls, until the next `wait`."""

    @property
    def running(self) -> frozenset[Hashable]:
        return frozenset(key for key, (task, _) in self._calls.items() if not task.done())

    def start(self, key: Hashable, call: Coroutine[Any, Any, None]) -> None:
        """Start a call. None of this key may be running."""
        assert key not in self.running
        self._collect()
        until = asyncio.get_running_loop().time() + self.step_wait_s
        self._calls[key] = (asyncio.create_task(call), until)

    async def wait(self, key: Hashable = None) -> None:
        """Wait until this call, or all, have ended or taken too long.

        Raises the first error of an ended call; others are logged.
        """
        now = asyncio.get_running_loop().time()
        calls = self._calls.values() if key is None else [self._calls[key]]
        waited = {task: until for task, until in calls if until > now}
        if waited:
            _, late = await asyncio.wait(waited, timeout=max(waited.values()) - now)
            for task in late:
                task.add_done_callback(lambda _: self.wake())
        self._collect()
        errors, self._errors = self._errors, []
        for error in errors[1:]:
            log.error("another call failed", exc_info=error)
        if errors:
            raise errors[0]

    async def close(self) -> None:
        """Cancel the running calls: the next start finds out their result."""
        tasks = [task for task, _ in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._calls.clear()

    def _collect(self) -> None:
        ended = {key: task for key, (task, _) in self._calls.items() if task.done()}
        self._calls = {key: call for key, call in self._calls.items() if key not in ended}
        self._errors += [error for task in ended.values() if (error := task.exception()) is not None]
