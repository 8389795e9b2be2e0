"""Calls to providers, which may take a minute and more where nobody answers: they run in the background of the steps.

A step starts the calls that are due and waits for them a little; nearly always they have ended by then. One that has
not is left to itself, so that a provider which hangs keeps nobody else waiting. Of one key at most one call runs.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Hashable
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger("shoal.elastic.background")

PATIENCE = 2.0
"""Seconds that a step waits for a call."""


@dataclass
class BackgroundCalls:
    """The calls of one kind that run now, each by its key."""

    patience: float = PATIENCE
    wake: Callable[[], None] = lambda: None
    """Called when a call has ended that was no longer waited for."""
    _calls: dict[Hashable, tuple[asyncio.Task[None], float]] = field(default_factory=dict)
    """What runs, and until when it is waited for, by the loop's clock."""
    _errors: list[BaseException] = field(default_factory=list)
    """Of calls that have ended, until somebody waits."""

    @property
    def running(self) -> frozenset[Hashable]:
        return frozenset(key for key, (task, _) in self._calls.items() if not task.done())

    def start(self, key: Hashable, call: Coroutine[Any, Any, None]) -> None:
        """Begin a call. Of this key none may run."""
        assert key not in self.running
        self._collect()
        until = asyncio.get_running_loop().time() + self.patience
        self._calls[key] = (asyncio.create_task(call), until)

    async def wait(self, key: Hashable = None) -> None:
        """Until this call, or all there are, have ended or taken too long.

        Raises what one that has ended raised; what others raised is in the log.
        """
        now = asyncio.get_running_loop().time()
        asked = self._calls.values() if key is None else [self._calls[key]]
        waited = {task: until for task, until in asked if until > now}
        if waited:
            _, late = await asyncio.wait(waited, timeout=max(waited.values()) - now)
            for task in late:
                task.add_done_callback(lambda _: self.wake())
        self._collect()
        errors, self._errors = self._errors, []
        for error in errors[1:]:
            log.error("another call failed too", exc_info=error)
        if errors:
            raise errors[0]

    async def close(self) -> None:
        """Leave off what runs: the next service finds out what came of it."""
        tasks = [task for task, _ in self._calls.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._calls.clear()

    def _collect(self) -> None:
        ended = {key: task for key, (task, _) in self._calls.items() if task.done()}
        self._calls = {key: call for key, call in self._calls.items() if key not in ended}
        self._errors += [error for task in ended.values() if (error := task.exception()) is not None]
