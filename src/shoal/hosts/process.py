"""Running programs and speaking with them line by line: the same over SSH, on this machine and in the fake."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

from shoal.errors import CommandTimeout
from shoal.hosts.api import Host, Result

KILLED = 128 + signal.SIGKILL


class LineHost(Host):
    """What every kind of host has in common. Each kind defines how a program starts and how the host closes."""

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        with timeout_error(self.name, argv, timeout):
            async with asyncio.timeout(timeout):
                process = await self._open(argv, root=root, whole_stderr=True)
                try:
                    return await process.finish(stdin)
                finally:  # whatever happens, it does not outlive the call
                    await process.kill()

    async def start(self, argv: Sequence[str], *, root: bool = True) -> LineProcess:
        return await self._open(argv, root=root, whole_stderr=False)

    @abstractmethod
    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        """Start a program. `whole_stderr` keeps all of standard error, not only the end."""


class ProgramChannel(ABC):
    """What carries a program's input and output. `stdout` ends when the program has, with its status known."""

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None], *, whole_stderr: bool) -> None:
        self.stdout = OutputBuffer(pause, resume)
        self.stderr = OutputTail(None if whole_stderr else STDERR_TAIL)
        self.status: int | None = None
        self.killed = False
        self._writable = asyncio.Event()
        self._writable.set()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    async def send(self, data: bytes) -> None:
        """Write with backpressure. What an ended program does not read is dropped: its status has the cause."""
        for start in range(0, len(data), _CHUNK):
            await self._writable.wait()
            if not self._write(data[start : start + _CHUNK]):
                return

    @abstractmethod
    def close_input(self) -> None: ...

    @abstractmethod
    async def kill(self) -> None:
        """End the program now; nothing happens when it has ended already."""

    @abstractmethod
    def _write(self, chunk: bytes) -> bool:
        """Pass on a part of the input; False when nothing takes it any more."""


class LineProcess:
    """A Process over any channel. `judge` distinguishes sudo's refusal from the program's own end."""

    def __init__(self, channel: ProgramChannel, judge: Callable[[Result], Result] | None) -> None:
        self._channel = channel
        self._judge = judge
        self._any_output = False

    async def write(self, data: bytes) -> None:
        await self._channel.send(data)
        self._channel.stdout.raise_error()

    async def readline(self) -> bytes:
        line = await self._channel.stdout.readline()
        self._any_output = self._any_output or bool(line)
        if not line:
            self._result(b"")
        return line

    async def wait(self) -> Result:
        self._channel.close_input()
        return self._result(await self._channel.stdout.rest())

    async def kill(self) -> None:
        await self._channel.kill()

    async def finish(self, stdin: bytes) -> Result:
        """Give the program all of its input and wait for its end, however much it writes meanwhile."""
        self._channel.stdout.keep_all()
        await self._channel.send(stdin)
        return await self.wait()

    def _result(self, stdout: bytes) -> Result:
        assert self._channel.status is not None
        result = Result(self._channel.status, stdout, self._channel.stderr.value())
        return self._judge(result) if self._judge and not (self._any_output or self._channel.killed) else result


@contextlib.contextmanager
def timeout_error(name: str, argv: Sequence[str], timeout: float | None) -> Iterator[None]:
    """Map a TimeoutError."""
    try:
        yield
    except TimeoutError:
        raise CommandTimeout(
            name,
            f"{program_name(argv)} did not end within {timeout:g} s",
            hint=f"the host may be overloaded or hang on a disk; look at it with: shoal ssh {name}",
        ) from None


def program_name(argv: Sequence[str]) -> str:
    """A command as an error names it. Only the program: arguments may be long, and are not ours to repeat."""
    return f"`{argv[0]}`"


HIGH_WATER = 1 << 20
"""How much output waits for its reader before the program is held back."""
STDERR_TAIL = 64 << 10
_CHUNK = 128 << 10


class OutputBuffer:
    """Standard output on its way to a reader. The transport feeds it; `pause` and `resume` hold the transport back."""

    def __init__(self, pause: Callable[[], None], resume: Callable[[], None]) -> None:
        self._pause = pause
        self._resume = resume
        self._paused = False
        self._buffer = bytearray()
        self._scanned = 0
        self._ended = False
        self._error: BaseException | None = None
        self._wakeup: asyncio.Event = asyncio.Event()
        self._wanted = False
        """A reader waits for more than is here: not the time to hold the program back."""
        self._drain = False

    def feed(self, data: bytes) -> None:
        self._buffer += data
        self._wakeup.set()
        if len(self._buffer) > HIGH_WATER and not (self._wanted or self._drain or self._paused):
            self._paused = True
            self._pause()

    def end(self, error: BaseException | None = None) -> None:
        """No more will come. With an error, the reader gets it after what has already arrived."""
        if not self._ended:
            self._ended = True
            self._error = error
            self._wakeup.set()

    def raise_error(self) -> None:
        """Raise what broke the stream, if something has."""
        if self._error:
            raise self._error

    async def readline(self) -> bytes:
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            if end >= 0:
                return self._take(end + 1)
            if self._ended:
                self.raise_error()
                return self._take(len(self._buffer))
            # A line longer than the high water mark still has to come in whole.
            self._scanned = len(self._buffer)
            await self._more()

    def keep_all(self) -> None:
        """Buffer without limit: the reader takes everything after the program's end."""
        self._drain = True
        if self._paused:
            self._unpause()

    async def rest(self) -> bytes:
        """Everything up to the end."""
        self.keep_all()
        while not self._ended:
            await self._more()
        self.raise_error()
        return self._take(len(self._buffer))

    def _take(self, count: int) -> bytes:
        data = bytes(self._buffer[:count])
        del self._buffer[:count]
        self._scanned = 0
        if self._paused and len(self._buffer) <= HIGH_WATER // 2:
            self._unpause()
        return data

    async def _more(self) -> None:
        # Cleared first: a transport may deliver what it holds while it is being resumed.
        self._wakeup.clear()
        self._wanted = True
        if self._paused:
            self._unpause()
        try:
            await self._wakeup.wait()
        finally:
            self._wanted = False

    def _unpause(self) -> None:
        self._paused = False
        if not self._ended:
            self._resume()


class OutputTail:
    """The last bytes of a stream; all of it when `limit` is None."""

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data
        # Trimmed at twice the limit: cutting at every chunk would copy the tail over and over.
        if self._limit is not None and len(self._buffer) > 2 * self._limit:
            del self._buffer[: -self._limit]

    def cut(self, ending: bytes) -> bool:
        """Remove these bytes from the end; False where it ends otherwise."""
        if found := self._buffer.endswith(ending):
            del self._buffer[-len(ending) :]
        return found

    def value(self) -> bytes:
        return bytes(self._buffer if self._limit is None else self._buffer[-self._limit :])
