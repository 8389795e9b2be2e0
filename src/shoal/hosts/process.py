"""Running programs and speaking with them line by line: the same over SSH, on this machine and in the fake."""

from __future__ import annotations

import asyncio
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Protocol, Self

from shoal.errors import TimedOut
from shoal.hosts.api import Result, Target
from shoal.hosts.pipes import Inbox, Tail

KILLED = 128 + signal.SIGKILL


class LineHost(ABC):
    """What every kind of host has in common. Each says for itself how a program is started and how the host is left."""

    target: Target

    @property
    def name(self) -> str:
        return self.target.name

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        process = await self._open(argv, root=root, whole_stderr=True)
        return await run_to_end(self.name, argv, process, stdin, timeout)

    async def start(self, argv: Sequence[str], *, root: bool = True) -> LineProcess:
        return await self._open(argv, root=root, whole_stderr=False)

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @abstractmethod
    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        """Start a program. `whole_stderr` keeps all that it says there, not only the end."""


class Wire(Protocol):
    """What carries a program's input and output. `stdout` ends when the program has, with its status known."""

    stdout: Inbox
    stderr: Tail
    status: int | None
    killed: bool

    async def send(self, data: bytes) -> None:
        """Write with backpressure. What an ended program does not read is dropped: its end says what happened."""

    def close_input(self) -> None: ...

    async def kill(self) -> None:
        """End the program now; nothing happens when it has ended already."""


class LineProcess:
    """A Process over any wire. `judge` tells sudo's refusal from the program's own end."""

    def __init__(self, wire: Wire, judge: Callable[[Result], Result]) -> None:
        self._wire = wire
        self._judge = judge
        self._any_output = False

    async def write(self, data: bytes) -> None:
        await self._wire.send(data)
        self._wire.stdout.raise_error()

    async def readline(self) -> bytes:
        line = await self._wire.stdout.readline()
        self._any_output = self._any_output or bool(line)
        if not line:
            self._ending(b"")
        return line

    async def wait(self) -> Result:
        self._wire.close_input()
        return self._ending(await self._wire.stdout.rest())

    async def kill(self) -> None:
        await self._wire.kill()

    async def finish(self, stdin: bytes) -> Result:
        """Give the program all of its input and wait for its end, however much it writes meanwhile."""
        self._wire.stdout.keep_all()
        await self._wire.send(stdin)
        return await self.wait()

    def _ending(self, stdout: bytes) -> Result:
        assert self._wire.status is not None
        result = Result(self._wire.status, stdout, self._wire.stderr.value())
        return result if self._any_output or self._wire.killed else self._judge(result)


async def run_to_end(
    name: str, argv: Sequence[str], process: LineProcess, stdin: bytes, timeout: float | None
) -> Result:
    """Feed a program its input and wait for its end. Whatever happens, it does not outlive the call."""
    try:
        async with asyncio.timeout(timeout):
            return await process.finish(stdin)
    except TimeoutError:
        raise TimedOut(
            name,
            f"{told(argv)} did not end within {timeout:g} s",
            hint=f"the host may be overloaded or hang on a disk; look at it with: shoal ssh {name}",
        ) from None
    finally:
        await process.kill()


def told(argv: Sequence[str]) -> str:
    """A command as an error names it. Only the program: arguments may be long, and are not ours to repeat."""
    return f"`{argv[0]}`"


def as_it_is(result: Result) -> Result:
    return result
