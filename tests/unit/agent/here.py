"""This machine as a host, for tests of the agent: a program is a child process, and nothing goes over a network."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from shoal.errors import ConnectionLost
from shoal.hosts.api import Result, Target


class ChildProcess:
    def __init__(self, name: str, child: asyncio.subprocess.Process) -> None:
        self.name = name
        self.child = child

    async def write(self, data: bytes) -> None:
        assert self.child.stdin
        try:
            self.child.stdin.write(data)
            await self.child.stdin.drain()
        except (BrokenPipeError, ConnectionResetError):
            raise ConnectionLost(self.name, "the pipe is closed") from None

    async def readline(self) -> bytes:
        assert self.child.stdout
        return await self.child.stdout.readline()

    async def wait(self) -> Result:
        out, err = await self.child.communicate()
        return Result(self.child.returncode or 0, out, err)

    async def kill(self) -> None:
        if self.child.returncode is None:
            self.child.kill()
        await self.child.communicate()


class Here:
    """`prefix` goes before every command: `nsenter ...` to reach a container. `replace` renames programs."""

    def __init__(self, prefix: Sequence[str] = (), replace: dict[str, str] | None = None) -> None:
        self.target = Target("here")
        self.prefix = list(prefix)
        self.replace = replace or {}

    @property
    def name(self) -> str:
        return self.target.name

    async def start(self, argv: Sequence[str], *, root: bool = True) -> ChildProcess:
        command = [*self.prefix, self.replace.get(argv[0], argv[0]), *argv[1:]]
        pipe = asyncio.subprocess.PIPE
        child = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, limit=1 << 24, cwd="/"
        )
        return ChildProcess(self.name, child)

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        process = await self.start(argv, root=root)
        await process.write(stdin)
        return await process.wait()

    async def close(self) -> None:
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
