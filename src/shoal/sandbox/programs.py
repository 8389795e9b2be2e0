"""Running the machine's own programs (ip, nft, mmdebstrap). Arguments are a list; no shell is in between."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from shoal.errors import ProviderError

LAST_LINES = 15
COLOURS = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


async def call(
    *argv: str | Path, stdin: str | bytes = "", check: bool = True, shown: str = "", apart: bool = False
) -> str:
    """Run a program to its end and return what it printed. Raises ProviderError with its last lines when it fails.

    `shown` is what the error calls it, in place of the beginning of its command line. `apart`: a signal to the group of
    this process, such as that of a closed terminal, does not reach it.
    """
    pipe = asyncio.subprocess.PIPE
    async with _running(argv, stdin=pipe, stdout=pipe, apart=apart) as process:
        output, _ = await process.communicate(stdin if isinstance(stdin, bytes) else stdin.encode())
    text = output.decode("utf-8", "replace")
    if check and process.returncode != 0:
        command = shown or " ".join(str(word) for word in argv[:6])
        raise ProviderError(f"`{command}` ended with status {process.returncode}: {last_lines(text)}")
    return text


async def call_logged(*argv: str | Path, log: Path, env: dict[str, str] | None = None) -> int:
    """Run a long program with its output in a log file, and return its status."""
    with log.open("ab") as sink:
        async with _running(argv, stdin=asyncio.subprocess.DEVNULL, stdout=sink.fileno(), env=env) as process:
            return await process.wait()


def last_lines(text: str) -> str:
    """The end of a program's output, for an error message."""
    lines = [line for line in COLOURS.sub("", text).splitlines() if line.strip()]
    return "\n".join(lines[-LAST_LINES:]) or "(it printed nothing)"


@asynccontextmanager
async def _running(
    argv: tuple[str | Path, ...], *, stdin: int, stdout: int, env: dict[str, str] | None = None, apart: bool = False
) -> AsyncIterator[asyncio.subprocess.Process]:
    """A program that does not outlive the block, even when that is cancelled."""
    try:
        process = await asyncio.create_subprocess_exec(
            *argv,
            stdin=stdin,
            stdout=stdout,
            stderr=asyncio.subprocess.STDOUT,
            env={**os.environ, "LC_ALL": "C", "DEBIAN_FRONTEND": "noninteractive", **(env or {})},
            start_new_session=apart,
        )
    except FileNotFoundError as error:
        raise ProviderError(f"the program {argv[0]} is not installed", hint="run `shoal check`") from error
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
