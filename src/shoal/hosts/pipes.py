"""What a running program writes, collected as bytes: lines of any length, with backpressure, and the tail of stderr."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

HIGH_WATER = 1 << 20
"""How much output waits for its reader before the program is held back."""
STDERR_TAIL = 64 << 10


class Inbox:
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
            found = self._buffer.find(b"\n", self._scanned)
            if found >= 0:
                return self._take(found + 1)
            if self._ended:
                self.raise_error()
                return self._take(len(self._buffer))
            # A line longer than the high water mark still has to come in whole.
            self._scanned = len(self._buffer)
            await self._more()

    def keep_all(self) -> None:
        """Hold the program back no more: somebody will ask for everything, after its end."""
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


class Tail:
    """The last bytes of a stream; all of it when `limit` is None."""

    def __init__(self, limit: int | None = STDERR_TAIL) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data
        # Trimmed at twice the limit: cutting at every chunk would copy the tail over and over.
        if self._limit is not None and len(self._buffer) > 2 * self._limit:
            del self._buffer[: -self._limit]

    def value(self) -> bytes:
        return bytes(self._buffer if self._limit is None else self._buffer[-self._limit :])
