"""Hosts over SSH: one connection a host, keys and config as OpenSSH has them, host keys kept per cluster."""

from __future__ import annotations

import asyncio
import contextlib
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from shoal.errors import HostError, UsageError
from shoal.hosts import sudo
from shoal.hosts.api import Result, Target
from shoal.hosts.host_keys import HostKey, HostKeys, host_key_changed, pinned_key
from shoal.hosts.openssh import ALGORITHMS
from shoal.hosts.process import LineHost, LineProcess, program_name
from shoal.hosts.slim_asyncssh import asyncssh
from shoal.hosts.ssh_channel import KILL_COMMAND, PRINT_PID_COMMAND, SshChannel
from shoal.hosts.ssh_config import Route, SshConfig
from shoal.hosts.ssh_errors import FOREIGN_ERRORS, cannot_connect, cannot_start, connection_lost
from shoal.hosts.ssh_login import KeyRing, SshClient

Connection = asyncssh.SSHClientConnection

_ALGORITHMS: dict[str, Any] = {
    "kex_algs": ALGORITHMS["KexAlgorithms"],
    "encryption_algs": ALGORITHMS["Ciphers"],
    "mac_algs": ALGORITHMS["MACs"],
    "compression_algs": ["none"],
}
_HOST_KEY_ALGORITHMS = ["ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "rsa-sha2-256", "rsa-sha2-512"]

_KEEPALIVE_MISSED = 3
_CLOSE_TIMEOUT_S = 2
# sshd allows ten sessions a connection (MaxSessions); the rest is for killing, and for those it has not cleared away.
_SESSIONS = 6


class SshConnector:
    """Opens SSH connections for one cluster."""

    def __init__(
        self,
        known_hosts: Path,
        *,
        ssh_config: Path | None = None,
        connect_timeout: float = 10.0,
        agent: bool = True,
        keepalive: float = 5.0,
        may_sudo: bool = True,
    ) -> None:
        """`known_hosts` is the cluster's own file; `ssh_config` is `~/.ssh/config` unless another is given. Without
        `may_sudo` every program runs as the login user.

        A host that misses three keepalives, `keepalive` seconds apart, counts as lost.
        """
        self._host_keys = HostKeys(known_hosts)
        self._config = SshConfig(ssh_config, agent=agent)
        self._keys = KeyRing()
        self._timeout = connect_timeout
        self._keepalive = keepalive
        self._may_sudo = may_sudo
        self._jumps: dict[tuple[Target, ...], _Jump] = {}

    async def connect(self, target: Target) -> SshHost:
        route = self._config.route(target)
        if not route.jumps:
            connection = await self._log_in(route, target.host_key, slowness=target.slowness)
            return SshHost(target, route.user, connection, may_sudo=self._may_sudo)
        jump = self._jumps.setdefault(route.jumps, _Jump(route.jumps))
        tunnel = await jump.take(self)
        try:
            connection = await self._log_in(route, target.host_key, tunnel, via=jump.name, slowness=target.slowness)
        except BaseException:
            await jump.release()
            raise
        return SshHost(target, route.user, connection, jump.release, may_sudo=self._may_sudo)

    async def _log_in(
        self,
        route: Route,
        pinned: str | None = None,
        tunnel: Connection | None = None,
        *,
        via: str = "",
        slowness: int = 1,
    ) -> Connection:
        known_key = pinned_key(route.name, pinned) if pinned else self._host_keys.find(route.name)
        client = SshClient(route, self._keys.files(route), known_key)
        try:
            connection = await self._connect(client, tunnel, slowness)
        except (*FOREIGN_ERRORS, TimeoutError) as error:
            if client.shown and known_key and client.shown != known_key:
                path = self._host_keys.path
                raise host_key_changed(route.name, known_key, client.shown, path, pinned=bool(pinned)) from error
            proxy_error = client.end_proxy()
            raise cannot_connect(
                route, error, client.tried, timeout=self._timeout * slowness, via=via, proxy_error=proxy_error
            ) from error
        except BaseException:
            client.end_proxy()
            raise
        finally:
            client.close_agent()
        try:
            if client.shown:
                self._host_keys.remember(route.name, route.host, route.port, client.shown, pinned=pinned is not None)
        except BaseException:
            connection.abort()
            raise
        return connection

    async def _connect(self, client: SshClient, tunnel: Connection | None, slowness: int) -> Connection:
        route = client.route
        sock = client.start_proxy() if route.proxy_command else ()
        async with asyncio.timeout(self._timeout * slowness):
            return await asyncssh.connect(
                route.host,
                route.port,
                tunnel=tunnel,
                proxy_command=None,
                sock=sock,
                config=None,
                username=route.user,
                client_factory=lambda: client,
                client_keys=None,
                # Not empty, or asyncssh would look into the user's own known_hosts; the client decides.
                known_hosts=([], [], []),
                server_host_key_algs=_host_key_algorithms(client.expected),
                x509_trusted_certs=None,
                gss_host=None,
                preferred_auth=["publickey"],
                keepalive_interval=self._keepalive * slowness,
                keepalive_count_max=_KEEPALIVE_MISSED,
                **_ALGORITHMS,
            )


class SshHost(LineHost):
    """A host we are logged in to."""

    def __init__(
        self,
        target: Target,
        user: str,
        connection: Connection,
        on_close: Callable[[], Any] | None = None,
        *,
        may_sudo: bool = True,
    ) -> None:
        self.target = target
        self._user = user
        self._may_sudo = may_sudo
        self._connection = connection
        self._on_close = on_close
        self._sessions = asyncio.Semaphore(_SESSIONS)
        self._running: set[SshChannel] = set()

    async def close(self) -> None:
        on_close, self._on_close = self._on_close, None
        try:
            await asyncio.gather(*(channel.kill() for channel in self._running))
            await _close(self._connection)
        finally:
            if on_close:
                await on_close()

    async def forward(self, address: str, port: int, local_port: int = 0) -> int:
        """Listen on a port of this machine's loopback, for as long as the connection lasts, and pass on what comes to
        `address` and `port` as the host sees them. Returns the port; `local_port` is the one to take, 0 for any."""
        try:
            listener = await self._connection.forward_local_port("127.0.0.1", local_port, address, port)
        except OSError as error:
            what = f"cannot listen on port {local_port}: {error.strerror}"
            raise UsageError(what, hint="name another with --port") from None
        return listener.get_port()

    async def wait_closed(self) -> None:
        """Returns when the connection has ended."""
        await self._connection.wait_closed()

    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        through_sudo = root and self._may_sudo and self._user != "root"
        await self._sessions.acquire()
        channel = await self._start(
            [*PRINT_PID_COMMAND, *argv], program_name(argv), through_sudo, whole_stderr, self._release
        )

        def judge(result: Result) -> Result:
            # A program that announced its process id was not refused.
            refusable = through_sudo and channel.pid is None
            return sudo.check_sudo_result(self.name, self._user, argv, result) if refusable else result

        return LineProcess(channel, judge)

    async def _start(
        self,
        argv: Sequence[str],
        program: str,
        through_sudo: bool,
        whole_stderr: bool,
        on_end: Callable[[SshChannel], None],
    ) -> SshChannel:
        loss_error = partial(connection_lost, self.name, program)
        channel = SshChannel(loss_error, partial(self._kill, through_sudo), on_end, whole_stderr=whole_stderr)
        self._running.add(channel)
        command = shlex.join(sudo.as_root(argv) if through_sudo else argv)
        try:
            await self._request(channel, command)
        except BaseException as error:
            channel.abandon()
            if isinstance(error, FOREIGN_ERRORS):
                raise cannot_start(self.name, program, error) from error
            raise
        return channel

    async def _request(self, channel: SshChannel, command: str) -> None:
        # sshd may still count a session whose end we have seen.
        for wait in (0.05, 0.2, 0.5, None):
            try:
                await self._connection.create_session(lambda: channel, command, encoding=None, request_pty=False)
                return
            except asyncssh.ChannelOpenError:
                if wait is None or self._connection.is_closed():
                    raise
            await asyncio.sleep(wait)

    async def _kill(self, through_sudo: bool, pid: int) -> None:
        """Kill a program and its group by its process id; a lost connection leaves nothing to do."""
        argv = [*KILL_COMMAND, str(pid)]
        with contextlib.suppress(HostError):
            killer = await self._start(argv, program_name(argv), through_sudo, False, self._running.discard)
            try:
                await killer.ended.wait()
            finally:
                killer.abandon()

    def _release(self, channel: SshChannel) -> None:
        self._running.discard(channel)
        self._sessions.release()


@dataclass
class _Jump:
    """A connection to a jump host (or a chain of them), shared by every host behind it and closed with the last."""

    path: tuple[Target, ...]
    users: int = 0
    hosts: list[Connection] = field(default_factory=list)
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def name(self) -> str:
        return self.path[-1].name

    async def take(self, connector: SshConnector) -> Connection:
        async with self.lock:
            if not self.hosts or self.hosts[-1].is_closed():
                self.hosts = await self._connect(connector)
            self.users += 1
            return self.hosts[-1]

    async def release(self) -> None:
        self.users -= 1
        if self.users == 0:
            hosts, self.hosts = self.hosts, []
            for host in reversed(hosts):
                await _close(host)

    async def _connect(self, connector: SshConnector) -> list[Connection]:
        hosts: list[Connection] = []
        try:
            for target in self.path:
                route = connector._config.route(target)
                hosts.append(await connector._log_in(route, tunnel=hosts[-1] if hosts else None))
        except BaseException:
            for host in reversed(hosts):
                host.abort()
            raise
        return hosts


async def _close(connection: Connection) -> None:
    connection.close()
    try:
        async with asyncio.timeout(_CLOSE_TIMEOUT_S):
            await connection.wait_closed()
    except TimeoutError:
        connection.abort()


def _host_key_algorithms(known_key: HostKey | None) -> list[str]:
    """The known key's own algorithms first, so that a host with several keys shows the one we have met."""
    if known_key is None:
        return _HOST_KEY_ALGORITHMS
    key_algorithms = ["rsa-sha2-256", "rsa-sha2-512"] if known_key.type == "ssh-rsa" else [known_key.type]
    return key_algorithms + [name for name in _HOST_KEY_ALGORITHMS if name not in key_algorithms]
