"""One program on a host, over the connection of an `ssh` that is logged in."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable

from shoal.errors import HostError
from shoal.hosts.local import LocalChannel
from shoal.hosts.process import KILLED

_KILL_TIMEOUT_S = 4.0
LOST = 255
"""How `ssh` ends when the connection does, or when no program was started."""

# sshd does not pass signals on to root's programs, so a shell announces its process id, and another program kills it.
# It waits for the program, because `ssh` reports one that a signal ended as a lost connection, and says so where the
# program's own status is that of a loss.
_RUN = 'echo "shoal-pid $$" >&2; (exec "$@"); status=$?; [ $status != 255 ] || echo shoal-255 >&2; exit $status'
RUN_COMMAND = ("sh", "-c", _RUN, "sh")
# After the name of the program, which is `sh`: state, parent, group.
_KILL = 'read -r stat < "/proc/$1/stat" && set -- "$1" ${stat##*) } && kill -s KILL -- "-$4"; kill -s KILL "$1"; true'
KILL_COMMAND = ("sh", "-c", _KILL, "sh")
_PID_LINE = re.compile(rb"shoal-pid (\d+)\n")
_LOST_LINE = b"shoal-255\n"
_REFUSED = b"refused by peer"


class SshChannel(LocalChannel):
    """The pipes of the `ssh` that runs the program."""

    def __init__(
        self,
        lost: Callable[[str], HostError],
        kill: Callable[[int], Awaitable[None]],
        on_end: Callable[[LocalChannel], None],
        *,
        whole_stderr: bool,
    ) -> None:
        super().__init__(on_end, whole_stderr=whole_stderr)
        self._lost = lost
        self._kill = kill
        self.pid: int | None = None
        """The program's process id on the host, once announced: from then on, it is sure to run."""
        self._begun, self._over = asyncio.Event(), asyncio.Event()
        self._before_pid: bytearray | None = bytearray()

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        if fd == 1 or self._before_pid is None:
            super().pipe_data_received(fd, data)
            return
        # What a login shell has to say may come first.
        self._before_pid += data
        if announcement := _PID_LINE.search(self._before_pid):
            self.pid = int(announcement[1])
            rest = bytes(self._before_pid[: announcement.start()] + self._before_pid[announcement.end() :])
            self._before_pid = None
            self._begun.set()
            super().pipe_data_received(fd, rest)

    async def wait_begun(self) -> None:
        """Returns when the program has started, or could not be."""
        await self._begun.wait()

    async def wait_ended(self) -> None:
        await self._over.wait()

    @property
    def was_refused(self) -> bool:
        """The host did not open a session for it."""
        return self.pid is None and self.status == LOST and _REFUSED in self.stderr.value()

    async def kill(self) -> None:
        """End the program now. One that cannot be killed in time loses its input and output all the same."""
        if self._over.is_set():
            return
        self.killed = True
        try:
            async with asyncio.timeout(_KILL_TIMEOUT_S):
                await self._begun.wait()
                if self.pid is not None and not self._over.is_set():
                    await self._kill(self.pid)
        except TimeoutError:
            pass
        finally:
            await super().kill()

    def _judge_end(self) -> HostError | None:
        if self._before_pid is not None:
            self.stderr.feed(bytes(self._before_pid))
        self._begun.set()
        self._over.set()
        if self.status != LOST or self.stderr.cut(_LOST_LINE):
            return None
        if self.killed:
            self.status = KILLED
            return None
        return self._lost(self.stderr.value().decode("utf-8", "replace"))
