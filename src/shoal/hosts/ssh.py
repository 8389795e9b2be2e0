"""Hosts over OpenSSH's own client: `~/.ssh/config`, agents, hardware keys and jump hosts work as they do in a terminal.

One `ssh` for each host logs in (`ssh_login.py`), and programs run over its connection. Host keys are kept for each
cluster. What `ssh` says of a failure becomes an error of Shoal's in `ssh_errors.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial
from pathlib import Path

from shoal.errors import UsageError
from shoal.hosts import sudo
from shoal.hosts.api import Host, Result, Target
from shoal.hosts.host_keys import HostKeys
from shoal.hosts.local import LocalChannel
from shoal.hosts.process import LineHost, LineProcess, program_name, timeout_error
from shoal.hosts.ssh_channel import KILL_COMMAND, RUN_COMMAND, SshChannel
from shoal.hosts.ssh_errors import cannot_connect, cannot_start_ssh, connection_lost, require_ssh
from shoal.hosts.ssh_login import Login, Question, take_login
from shoal.hosts.ssh_route import SshOptions, read_route

KEPT_ANSWER_S = 3.0
"""After this, a connection that was kept counts as lost: the machine or its network may have changed since."""
MAX_SESSIONS, MAX_KILLERS = 6, 3
"""sshd allows ten sessions a connection; ours for the login is one, and programs that kill others need some."""
REFUSED_AGAIN_S = (0.05, 0.2, 0.5)
"""sshd may still count a session whose end we have seen."""


class SshConnector:
    """Opens SSH connections for one cluster."""

    def __init__(self, known_hosts: Path, options: SshOptions | None = None, *, may_sudo: bool = True) -> None:
        """`known_hosts` is the cluster's own file. Without `may_sudo` every program runs as the login user."""
        self._host_keys = HostKeys(known_hosts)
        self._options = options or SshOptions()
        self._may_sudo = may_sudo
        self._first_done: dict[str, asyncio.Event] = {}
        """For each jump host: whether the first host behind it has been tried."""

    async def connect(self, target: Target) -> Host:
        require_ssh()
        login = take_login(target, self._host_keys.path)
        user = await self._wait(login) if login else None
        if login is None or user is None:
            async with self._turn(target):
                login, user = await self._log_in(target)
        return SshHost(target, user, login, may_sudo=self._may_sudo)

    async def _log_in(self, target: Target) -> tuple[Login, str]:
        login = self._begin(target)
        user = await self._wait(login)
        if user is None and login.is_reused:
            login = self._begin(target, anew=True)
            user = await self._wait(login)
        if user is None:
            raise await cannot_connect(login)
        return login, user

    def _begin(self, target: Target, *, anew: bool = False) -> Login:
        try:
            return Login(target, self._host_keys, self._options, anew=anew)
        except OSError as error:
            raise cannot_start_ssh(error) from error

    async def _wait(self, login: Login) -> str | None:
        """Who is logged in. None, and it is closed, where that failed or took too long."""
        seconds = min(KEPT_ANSWER_S, self._options.timeout) if login.is_reused else self._options.timeout
        try:
            async with asyncio.timeout(seconds * login.target.slowness):
                if user := await login.user():
                    return user
        except TimeoutError:
            login.too_late = True
        except BaseException:
            login.close()
            raise
        if login.is_reused:
            login.control("-O", "exit")
        login.close()
        return None

    @contextlib.asynccontextmanager
    async def _turn(self, target: Target) -> AsyncIterator[None]:
        """Hosts behind a jump host wait for the first of them: they share its connection to the jump host."""
        options = self._options
        jump = (await read_route(target, options, self._host_keys.path)).jump if options.user_config else ""
        if jump and (done := self._first_done.get(jump)):
            await done.wait()
        done = self._first_done.setdefault(jump, asyncio.Event())
        try:
            yield
        finally:
            done.set()


class SshHost(LineHost):
    """A host that an `ssh` of ours is logged in to."""

    def __init__(self, target: Target, user: str, login: Login, *, may_sudo: bool = True) -> None:
        self.target = target
        self._user = user
        self._login = login
        self._may_sudo = may_sudo
        self._sessions, self._killers = asyncio.Semaphore(MAX_SESSIONS), asyncio.Semaphore(MAX_KILLERS)
        self._running: set[LocalChannel] = set()
        self._forwarded: list[str] = []

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        answer = self._login.take_answer(Question(tuple(argv), root and self._may_sudo))
        if answer is not None:
            with timeout_error(self.name, argv, timeout):
                async with asyncio.timeout(timeout):
                    result = await answer
            if result is not None:
                return result
        return await super().run(argv, stdin=stdin, timeout=timeout, root=root)

    async def close(self) -> None:
        await asyncio.gather(*(channel.kill() for channel in list(self._running)))
        for forward in self._forwarded:
            self._login.control("-O", "cancel", "-L", forward)
        self._login.close()

    async def forward(self, address: str, port: int, local_port: int = 0) -> int:
        """Listen on a port of this machine's loopback, for as long as the connection lasts, and pass on what comes to
        `address` and `port` as the host sees them. Returns the port; `local_port` is the one to take, 0 for any."""
        try:
            with socket.create_server(("127.0.0.1", local_port)) as free:
                local_port = free.getsockname()[1]
        except OSError as error:
            what = f"cannot listen on port {local_port}: {error.strerror}"
            raise UsageError(what, hint="name another with --port") from None
        forward = f"127.0.0.1:{local_port}:{f'[{address}]' if ':' in address else address}:{port}"
        result = self._login.control("-O", "forward", "-L", forward)
        if result.returncode != 0:
            raise connection_lost(self.name, f"the tunnel from port {local_port}", result.stderr)
        self._forwarded.append(forward)
        return local_port

    async def wait_closed(self) -> None:
        """Returns when the connection has ended."""
        await self._login.wait_ended()

    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        through_sudo = root and self._may_sudo and self._user != "root"
        for wait in (*REFUSED_AGAIN_S, 0.0):
            await self._sessions.acquire()
            channel = await self._start(argv, through_sudo, whole_stderr, self._release)
            if not channel.was_refused:
                break
            await asyncio.sleep(wait)

        def judge(result: Result) -> Result:
            # A program that announced its process id was not refused.
            refusable = through_sudo and channel.pid is None
            return sudo.check_sudo_result(self.name, self._user, argv, result) if refusable else result

        return LineProcess(channel, judge)

    async def _start(
        self, argv: Sequence[str], through_sudo: bool, whole_stderr: bool, on_end: Callable[[LocalChannel], None]
    ) -> SshChannel:
        command = [*RUN_COMMAND, *argv]
        line = self._login.session(shlex.join(sudo.as_root(command) if through_sudo else command))
        lost = partial(connection_lost, self.name, program_name(argv))
        channel = SshChannel(lost, partial(self._kill, through_sudo), on_end, whole_stderr=whole_stderr)
        self._running.add(channel)
        try:
            await channel.start(line)
            await channel.wait_begun()
        except BaseException as error:
            if channel.is_open:
                await channel.kill()
            else:
                on_end(channel)
            if isinstance(error, OSError):
                raise cannot_start_ssh(error) from error
            raise
        return channel

    async def _kill(self, through_sudo: bool, pid: int) -> None:
        """Kill a program and its group by its process id; a lost connection leaves nothing to do."""
        async with self._killers:
            killer = await self._start([*KILL_COMMAND, str(pid)], through_sudo, False, self._running.discard)
            try:
                await killer.wait_ended()
            finally:
                await LocalChannel.kill(killer)

    def _release(self, channel: LocalChannel) -> None:
        if channel in self._running:
            self._running.discard(channel)
            self._sessions.release()
