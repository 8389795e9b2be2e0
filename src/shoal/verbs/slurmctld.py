"""Asking a slurmctld that may not run: Slurm's own commands wait for half a minute before they say so."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from shoal.hosts.api import Host
from shoal.verbs.status import PATIENCE, running_version

T = TypeVar("T")


async def while_it_runs(controller: Host, *questions: Coroutine[Any, Any, T]) -> list[T]:
    """The answers to questions that slurmctld must answer. Raises SlurmError at once when it does not run.

    Whether it runs is asked at the same time, not before: in a cluster that is well this costs no time.
    """
    asking = [asyncio.ensure_future(question) for question in questions]
    try:
        state = await controller.run(("systemctl", "is-active", "slurmctld"), timeout=PATIENCE)
        # Where there is no systemd it prints nothing, and Slurm has to be asked itself.
        if state.text.strip() not in ("", "active", "reloading"):
            await running_version(controller)
        return [await answer for answer in asking]
    finally:
        for answer in asking:
            answer.cancel()
        await asyncio.gather(*asking, return_exceptions=True)
