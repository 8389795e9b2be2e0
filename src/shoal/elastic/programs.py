"""Programs that the service starts on the controller: alone, or two of them joined by pipes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

PIPE, DEVNULL = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
PATIENCE = 2.0
"""Seconds that one of two has to end by itself when the other has failed: it may know why."""
_SAID = 400


@dataclass(frozen=True)
class Ended:
    """How a program ended."""

    status: int
    said: str = ""
    """What it printed, if all went well; otherwise its complaint in one line."""

    @property
    def problem(self) -> str:
        """What went wrong; nothing where all went well."""
        return "" if self.status == 0 else self.said or f"exit status {self.status}"


async def run(argv: Sequence[str], stdin: IO[bytes] | int = DEVNULL) -> Ended:
    """Run a program to its end."""
    return await _end(await _start(argv, stdin, PIPE))


async def joined(sender: Sequence[str], taker: Sequence[str]) -> tuple[Ended, Ended]:
    """Run two programs, each the other's input. When one fails the other is ended."""
    down, up = os.pipe(), os.pipe()
    ends: list[asyncio.Task[Ended]] = []
    try:
        try:
            for argv, stdin, stdout in ((sender, up[0], down[1]), (taker, down[0], up[1])):
                ends.append(asyncio.create_task(_end(await _start(argv, stdin, stdout))))
        finally:
            for handle in (*down, *up):
                os.close(handle)
        waiting: set[asyncio.Task[Ended]] = {*ends}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result().status != 0 for task in done):
                break
        if waiting:
            await asyncio.wait(waiting, timeout=PATIENCE)
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
    first, second = (Ended(1) if task.cancelled() else task.result() for task in ends)
    return first, second


async def _start(argv: Sequence[str], stdin: IO[bytes] | int, stdout: int) -> asyncio.subprocess.Process:
    starting = asyncio.ensure_future(
        asyncio.create_subprocess_exec(*argv, stdin=stdin, stdout=stdout, stderr=asyncio.subprocess.PIPE)
    )
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        await _kill(await starting)
        raise


async def _end(process: asyncio.subprocess.Process) -> Ended:
    try:
        out, errors = await process.communicate()
    except asyncio.CancelledError:
        await _kill(process)
        raise
    if process.returncode == 0:
        return Ended(0, (out or b"").decode("utf-8", "replace"))
    said = (errors or out or b"").decode("utf-8", "replace")
    return Ended(process.returncode or 0, " ".join(said.split())[-_SAID:])


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.communicate()
