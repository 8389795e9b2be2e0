"""This machine as a host, for an operator who sits on the controller."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from shoal.errors import HostError, Unreachable
from shoal.hosts import sudo
from shoal.hosts.api import Target
from shoal.hosts.process import KILLED, LineHost, LineProcess, ProgramChannel, program_name

# One that sudo made root's may take its time to notice that its pipes are gone.
_REAP_TIMEOUT_S = 1.0
# A shell starts the program, as it does over SSH, so that a missing one is status 127 here as well.
_SHELL = ("/bin/sh", "-c", 'exec "$@"', "sh")


class LocalConnector:
    """Gives every target as this machine."""

    async def connect(self, target: Target) -> LocalHost:
        return LocalHost(target)


class LocalHost(LineHost):
    """This machine. `through_sudo` says whether root is reached by sudo; by default, when we are not root."""

    def __init__(self, target: Target, *, through_sudo: bool | None = None) -> None:
        self.target = target
        self._through_sudo = os.geteuid() != 0 if through_sudo is None else through_sudo
        self._running: set[LocalChannel] = set()

    async def close(self) -> None:
        """End what still runs, as the end of an SSH connection would."""
        await asyncio.gather(*(channel.kill() for channel in self._running))

    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        through_sudo = root and self._through_sudo
        judge = partial(sudo.check_sudo_result, self.name, sudo.login_name(), argv) if through_sudo else None
        channel = LocalChannel(self._running.discard, whole_stderr=whole_stderr)
        try:
            await channel.start([*_SHELL, *(sudo.as_root(argv) if through_sudo else argv)])
        except asyncio.CancelledError:
            await channel.kill()
            raise
        except OSError as error:
            cause = f"cannot start {program_name(argv)}: {error.strerror or error}"
            hint = "check that the machine is not out of memory or processes"
            raise Unreachable(self.name, cause, hint=hint) from error
        self._running.add(channel)
        return LineProcess(channel, judge)


class LocalChannel(ProgramChannel, asyncio.SubprocessProtocol):
    """The pipes of a child process."""

    def __init__(self, on_end: Callable[[LocalChannel], None], *, whole_stderr: bool) -> None:
        super().__init__(
            lambda: self._pipe(1).pause_reading(), lambda: self._pipe(1).resume_reading(), whole_stderr=whole_stderr
        )
        self._on_end = on_end
        self._transport: Any = None
        self._ended = False
        self._reaped = asyncio.Event()

    async def start(self, command: Sequence[str]) -> None:
        """Start the process. It runs even if this is cancelled."""
        loop = asyncio.get_running_loop()
        starting = asyncio.ensure_future(loop.subprocess_exec(lambda: self, *command, start_new_session=True))
        try:
            await asyncio.shield(starting)
        except asyncio.CancelledError:
            # asyncio waits forever for a process whose start is cancelled before its pipes are connected.
            while not starting.done():
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.wait([starting])
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        (self.stdout if fd == 1 else self.stderr).feed(data)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        if fd == 0:
            self._writable.set()

    def process_exited(self) -> None:
        self._reaped.set()
        if not self._pipe(0).is_closing():
            self._pipe(0).abort()  # a child that it left may hold the other end

    def connection_lost(self, exc: Exception | None) -> None:
        """The process has ended and its pipes are drained."""
        if self._ended:
            return
        self._ended = True
        code = self._transport.get_returncode()
        self.status = KILLED if code is None else code if code >= 0 else 128 - code
        self.stdout.end(self._judge_end())
        self._writable.set()
        self._transport.close()
        self._on_end(self)

    @property
    def is_open(self) -> bool:
        return self._transport is not None and not self._ended

    def _judge_end(self) -> HostError | None:
        """What the reader is told in the end, where the program did not end by itself."""
        return None

    def close_input(self) -> None:
        if not self._pipe(0).is_closing():
            self._pipe(0).write_eof()

    async def kill(self) -> None:
        if not self.is_open:
            return
        self.killed = True
        # The whole session: the program's children hold its pipes too. One that sudo made root's is not ours to kill;
        # it loses its pipes.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._transport.get_pid(), signal.SIGKILL)
        try:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_REAP_TIMEOUT_S):
                    await self._reaped.wait()  # or closing the transport would take its end from asyncio
        finally:
            self._transport.close()
            self.connection_lost(None)

    def _write(self, chunk: bytes) -> bool:
        if self._ended or self._pipe(0).is_closing():
            return False
        self._pipe(0).write(chunk)
        return True

    def _pipe(self, fd: int) -> Any:
        return self._transport.get_pipe_transport(fd)
