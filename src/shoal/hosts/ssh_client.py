"""What a connection is asked while it is made: whether the host's key is right, and which of our keys to offer next."""

from __future__ import annotations

import contextlib
import socket
from typing import Any

from shoal.hosts.host_keys import HostKey
from shoal.hosts.slim_asyncssh import asyncssh
from shoal.hosts.ssh_config import Route
from shoal.hosts.ssh_keys import KeyFile, agent_keys
from shoal.hosts.ssh_proxy import Proxy


class SshClient(asyncssh.SSHClient):
    """Answers asyncssh's questions while it connects: is this host key right, and which key comes next?"""

    def __init__(self, route: Route, files: list[KeyFile], expected: HostKey | None) -> None:
        self._route = route
        self._files = files
        self._expected = expected
        self._sources = [self._file_keys, self._agent_keys]
        self._agent: asyncssh.SSHAgentClient | None = None
        self._socket: Any = None
        self.shown: HostKey | None = None
        self.tried: list[str] = []
        self._proxy: Proxy | None = None

    def start_proxy(self) -> socket.socket:
        self._proxy = Proxy(self._route.proxy_command)
        return self._proxy.socket

    def end_proxy(self) -> str:
        """End the ProxyCommand, where there is one; what it said last."""
        if self._proxy is None:
            return ""
        self._proxy.end()
        return self._proxy.last_words

    def connection_lost(self, exc: Exception | None) -> None:
        self.end_proxy()

    def connection_made(self, conn: asyncssh.SSHClientConnection) -> None:
        self._socket = conn.get_extra_info("socket")

    def debug_msg_received(self, msg: str, lang: str, always_display: bool) -> None:
        # sshd sends a few small packets behind the login, and Nagle's algorithm keeps its next answer back until they
        # are acknowledged. Doing so at once saves the usual 40 ms on every host.
        if self._socket is not None and hasattr(socket, "TCP_QUICKACK"):
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def validate_host_public_key(self, host: str, addr: str, port: int, key: asyncssh.SSHKey) -> bool:
        self.shown = HostKey.parse(key.export_public_key().decode())
        return self._expected is None or self.shown == self._expected

    async def public_key_auth_requested(self) -> Any:
        # Files before the agent: a server gives up after a handful of keys, and an agent may hold many.
        while self._sources:
            if keys := await self._sources.pop(0)():
                return keys
        return None

    def close_agent(self) -> None:
        if self._agent:
            self._agent.close()

    async def _file_keys(self) -> list[Any]:
        self.tried += [str(file.path) if file.offer else f"not {file.path}: it {file.problem}" for file in self._files]
        return [file.offer for file in self._files if file.offer]

    async def _agent_keys(self) -> list[Any]:
        if not self._route.agent:
            return []
        only = [file.public for file in self._files if file.public] if self._route.only else None
        try:
            keys, self._agent = await agent_keys(self._route.agent, only)
        except OSError:
            self.tried.append(f"no ssh-agent: {self._route.agent} does not answer")
            return []
        self.tried.append(f"{len(keys)} from the ssh-agent")
        return keys
