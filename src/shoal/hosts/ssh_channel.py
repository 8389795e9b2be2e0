"""One program on a host, over one SSH channel."""

from __future__ import annotations

import asyncio
import contextlib
import re
import signal
from collections.abc import Awaitable, Callable

import asyncssh

from shoal.errors import HostError
from shoal.hosts.process import KILLED, ProgramChannel

_KILL_TIMEOUT_S = 2.0

# sshd does not pass signals on to root's programs, so a program announces its process id, and another one kills it.
PRINT_PID_COMMAND = ("sh", "-c", 'echo "shoal-pid $$" >&2; exec "$@"', "sh")
_KILL = 'group=$(ps -o pgid= -p "$1") && kill -s KILL -- "-$((group))"; kill -s KILL "$1" 2>/dev/null; true'
KILL_COMMAND = ("sh", "-c", _KILL, "sh")
_PID_LINE = re.compile(rb"shoal-pid (\d+)\n")


class SshChannel(ProgramChannel, asyncssh.SSHClientSession[bytes]):
    """What the server reports about the program: its output, its end, or a lost connection."""

    def __init__(
        self,
        lost: Callable[[Exception | None], HostError],
        kill: Callable[[int], Awaitable[None]],
        on_end: Callable[[SshChannel], None],
        *,
        whole_stderr: bool,
    ) -> None:
        super().__init__(self._pause, self._resume, whole_stderr=whole_stderr)
        self._lost = lost
        self._kill = kill
        self._on_end = on_end
        self._chan: asyncssh.SSHClientChannel[bytes] | None = None
        self.pid: int | None = None
        """The program's process id on the host, once announced: from then on, it is sure to run."""
        self._pid_known = asyncio.Event()
        self._before_pid: bytearray | None = bytearray()
        self.ended = asyncio.Event()

    def connection_made(self, chan: asyncssh.SSHClientChannel[bytes]) -> None:
        self._chan = chan

    def data_received(self, data: bytes, datatype: asyncssh.DataType) -> None:
        if datatype == asyncssh.EXTENDED_DATA_STDERR:
            self._hear(data)
        else:
            self.stdout.feed(data)

    def eof_received(self) -> bool:
        # Its output is over; its input stays open until we close it. The reader learns of the end together with the
        # status, or a connection lost in between would pass for a program that ended well.
        return True

    def exit_status_received(self, status: int) -> None:
        self.status = status

    def exit_signal_received(self, signal: str, core_dumped: bool, msg: str, lang: str) -> None:
        self.status = 128 + _signal_number(signal)

    def connection_lost(self, exc: Exception | None) -> None:
        if self.ended.is_set():
            return
        if self.status is None and self.killed:
            self.status = KILLED
        self.stderr.feed(bytes(self._before_pid or b""))
        self._pid_known.set()
        self.stdout.end(None if self.status is not None else self._lost(exc))
        self._writable.set()
        self.ended.set()
        self._on_end(self)

    def close_input(self) -> None:
        assert self._chan is not None
        with contextlib.suppress(OSError, asyncssh.Error):
            self._chan.write_eof()

    async def kill(self) -> None:
        """End the program now. One that cannot be killed in time loses its input and output all the same."""
        if self.ended.is_set():
            return
        self.killed = True
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self._pid_known.wait()
                if self.pid is not None and not self.ended.is_set():
                    await self._kill(self.pid)
        except TimeoutError:
            pass
        finally:
            self.abandon()

    def abandon(self) -> None:
        """Close the channel, whatever the program does."""
        if self.ended.is_set():
            return
        self.killed = True
        if self._chan:
            self._chan.abort()
        # The server confirms only when the program has ended, which one that ignores its input may delay.
        self.connection_lost(None)

    def _hear(self, data: bytes) -> None:
        if self._before_pid is None:
            self.stderr.feed(data)
            return
        # What a login shell has to say may come first.
        self._before_pid += data
        if announcement := _PID_LINE.search(self._before_pid):
            self.pid = int(announcement[1])
            self.stderr.feed(bytes(self._before_pid[: announcement.start()] + self._before_pid[announcement.end() :]))
            self._before_pid = None
            self._pid_known.set()

    def _write(self, chunk: bytes) -> bool:
        assert self._chan is not None
        if self.ended.is_set() or self._chan.is_closing():
            return False
        try:
            self._chan.write(chunk)
        except (OSError, asyncssh.Error):
            return False
        return True

    def _pause(self) -> None:
        if self._chan:
            self._chan.pause_reading()

    def _resume(self) -> None:
        if self._chan and not self.ended.is_set():
            self._chan.resume_reading()


def _signal_number(name: str) -> int:
    return int(signal.Signals.__members__.get(f"SIG{name}", signal.SIGKILL))
