"""Asking a slurmctld that may not run: Slurm's own commands wait for half a minute before they say so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.hosts.api import Host
from shoal.verbs.status import running_version

T = TypeVar("T")

SOON = 0.5
"""Seconds in which a slurmctld that is well has answered."""


async def while_it_runs(controller: Host, *questions: Coroutine[Any, Any, T]) -> list[T]:
    """The answers to questions that slurmctld must answer. Raises SlurmError soon when it does not run.

    Whether it runs is asked only when the answers take long: in a cluster that is well this costs nothing.
    """
    asking = [asyncio.ensure_future(question) for question in questions]
    try:
        await asyncio.wait(asking, timeout=SOON, return_when=asyncio.FIRST_EXCEPTION)
        if not all(answer.done() for answer in asking) and not any(_failed(answer) for answer in asking):
            await running_version(controller)
        return [await answer for answer in asking]
    finally:
        for answer in asking:
            answer.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


def _failed(answer: asyncio.Future[T]) -> bool:
    return answer.done() and answer.exception() is not None
