"""Processes that the service runs on the controller: one, or two connected by pipes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import IO

PIPE, DEVNULL = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
PEER_EXIT_TIMEOUT_S = 2.0
"""How long the other process may go on after one has failed: it may report why."""
_MAX_OUTPUT = 400


@dataclass(frozen=True)
class ProcessResult:
    """The result of a process."""

    status: int
    output: str = ""
    """Its output on success; otherwise its error in one line."""

    @property
    def problem(self) -> str:
        """The error; empty on success."""
        return "" if self.status == 0 else self.output or f"exit status {self.status}"


async def run(argv: Sequence[str], stdin: IO[bytes] | int = DEVNULL) -> ProcessResult:
    """Run a program to its end."""
    return await _end(await _start(argv, stdin, PIPE))


async def run_connected(sender: Sequence[str], taker: Sequence[str]) -> tuple[ProcessResult, ProcessResult]:
    """Run two programs, each connected to the other's input. When one fails, the other is killed."""
    down, up = os.pipe(), os.pipe()
    ends: list[asyncio.Task[ProcessResult]] = []
    try:
        try:
            for argv, stdin, stdout in ((sender, up[0], down[1]), (taker, down[0], up[1])):
                ends.append(asyncio.create_task(_end(await _start(argv, stdin, stdout))))
        finally:
            for handle in (*down, *up):
                os.close(handle)
        waiting: set[asyncio.Task[ProcessResult]] = {*ends}
        while waiting:
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if any(task.result().status != 0 for task in done):
                break
        if waiting:
            await asyncio.wait(waiting, timeout=PEER_EXIT_TIMEOUT_S)
    finally:
        for task in ends:
            task.cancel()
        await asyncio.gather(*ends, return_exceptions=True)
    first, second = (ProcessResult(1) if task.cancelled() else task.result() for task in ends)
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


async def _end(process: asyncio.subprocess.Process) -> ProcessResult:
    try:
        out, errors = await process.communicate()
    except asyncio.CancelledError:
        await _kill(process)
        raise
    if process.returncode == 0:
        return ProcessResult(0, (out or b"").decode("utf-8", "replace"))
    message = (errors or out or b"").decode("utf-8", "replace")
    return ProcessResult(process.returncode or 0, " ".join(message.split())[-_MAX_OUTPUT:])


async def _kill(process: asyncio.subprocess.Process) -> None:
    with suppress(ProcessLookupError):
        process.kill()
    await process.communicate()
