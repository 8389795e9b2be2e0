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

STOPPING = "stopping: each host finishes the step it is at; Ctrl-C again leaves at once"
AGAIN = "run the same command again to go on from here"


def run(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop | None = None, *, said: str = STOPPING) -> T:
    """Run a verb to its end, on a loop that has begun already or on a new one. `said` is the answer to a Ctrl-C.

    Raises Interrupted after a Ctrl-C or a SIGTERM, when all is put away.
    """
    try:
        with asyncio.Runner(loop_factory=(lambda: loop) if loop else None) as runner:
            return runner.run(_watched(work, said))
    except asyncio.CancelledError:
        raise Interrupted("stopped", hint=AGAIN) from None


async def _watched(work: Coroutine[Any, Any, T], said: str) -> T:
    task = asyncio.current_task()
    assert task is not None
    asked = 0

    def stop() -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            # Agents notice that nobody listens any more and stop after the item in hand.
            from shoal.verbs.last_words import spoken

            for line in ("", *spoken(), *((f"left; {AGAIN}",) if said else ())):
                print(line, file=sys.stderr, flush=True)
            os._exit(Interrupted.exit_code)
        print(f"\n{said}" if said else "", file=sys.stderr)
        task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop)
    return await work
