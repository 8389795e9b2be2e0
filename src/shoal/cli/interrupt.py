"""Ctrl-C: the first one lets every host finish the step it is at, the second one leaves at once."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.errors import Interrupted

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None) -> T:
    """Run a verb to its end, on a loop that has begun already or on a new one.

    Raises Interrupted after a Ctrl-C or a SIGTERM, when all is put away.
    """
    try:
        with asyncio.Runner(loop_factory=(lambda: loop) if loop else None) as runner:
            return runner.run(_watched(work))
    except asyncio.CancelledError:
        raise Interrupted("stopped", hint="run the same command again to go on from here") from None


async def _watched(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.current_task()
    assert task is not None
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            # Agents notice that nobody listens any more and stop after the item in hand.
            os._exit(Interrupted.exit_code)
        print("\nstopping: each host finishes the step it is at; Ctrl-C again leaves at once", file=sys.stderr)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await work
