"""Logging in over SSH: the keys to offer, the check of the host's key, and a ProxyCommand of `~/.ssh/config`."""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import socket
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.errors import AuthenticationFailed
from shoal.hosts.host_keys import HostKey
from shoal.hosts.slim_asyncssh import asyncssh
from shoal.hosts.ssh_config import Route

ClientKey = asyncssh.SSHKey | tuple[asyncssh.SSHKey, asyncssh.SSHCertificate]


@dataclass(frozen=True)
class KeyFile:
    """A private key file as we found it."""

    path: Path
    offer: ClientKey | None
    """The key, with its certificate where `<path>-cert.pub` is there; None when we cannot read it."""
    public: bytes | None = None
    """The public half, by which the agent knows a key whose file is protected by a passphrase."""
    encrypted: bool = False
    problem: str = ""
    fix: str = ""


class KeyRing:
    """Key files, each read and decoded once however many hosts they open."""

    def __init__(self) -> None:
        self._read = functools.cache(_read)

    def files(self, route: Route) -> list[KeyFile]:
        """The key files of a route. Raises AuthenticationFailed when one named for this host is unusable."""
        files = [self._read(path) for path in route.identities]
        for file in files if route.chosen else ():
            if file.problem and not (file.encrypted and route.agent):
                problem = file.problem + (" and no ssh-agent is running" if file.encrypted else "")
                raise AuthenticationFailed(route.name, f"the key {file.path} {problem}", hint=file.fix)
        return files


def _read(path: Path) -> KeyFile:
    try:
        key = asyncssh.read_private_key(path)
    except FileNotFoundError:
        problem, fix = "does not exist", f"make it with: ssh-keygen -t ed25519 -f {path}"
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
        fix = f"make {path} readable to you: chmod 600 {path}"
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        if "passphrase" in str(error).lower():
            problem, fix = "is protected by a passphrase", f"load it into the ssh-agent: ssh-add {path}"
            return KeyFile(path, None, _public_half(path), encrypted=True, problem=problem, fix=fix)
        problem, fix = f"is not a private key: {error}", "name the private key, not the .pub file"
    else:
        try:
            certificate = asyncssh.read_certificate(f"{path}-cert.pub")
        except (OSError, asyncssh.KeyImportError):
            return KeyFile(path, key, key.public_data)
        return KeyFile(path, (key, certificate), key.public_data)
    return KeyFile(path, None, problem=problem, fix=fix)


def _public_half(path: Path) -> bytes | None:
    for candidate in (f"{path}.pub", str(path)):
        try:
            return asyncssh.read_public_key(candidate).public_data
        except (OSError, asyncssh.KeyImportError):
            continue
    return None


_TAIL = 4 << 10


class ProxyCommand:
    """A running ProxyCommand and our end of it.

    We start it ourselves, in the user's shell as OpenSSH does: asyncssh would take its standard error for
    the host's output.
    """

    def __init__(self, command: str) -> None:
        """Raises OSError when there is no such shell."""
        self.last_line = ""
        """The last line of its standard error, once it has ended."""
        self.socket, other_end = socket.socketpair()
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the end of the program
        with other_end:
            try:
                self._process = subprocess.Popen(
                    [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                    stdin=other_end.fileno(),
                    stdout=other_end.fileno(),
                    stderr=self._stderr,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                self._stderr.close()
                raise

    def end(self) -> None:
        """End it, with what it started. Safe to call more than once."""
        if self._stderr.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._stderr:
            self._stderr.seek(max(0, os.fstat(self._stderr.fileno()).st_size - _TAIL))
            lines = self._stderr.read().decode("utf-8", "replace").splitlines()
        self.last_line = next((line.strip() for line in reversed(lines) if line.strip()), "")


class SshClient(asyncssh.SSHClient):
    """Answers asyncssh's questions while it connects: is this host key right, and which key comes next?"""

    def __init__(self, route: Route, files: list[KeyFile], expected: HostKey | None) -> None:
        self.route = route
        self._files = files
        self.expected = expected
        self._sources = [self._file_keys, self._agent_keys]
        self._agent: asyncssh.SSHAgentClient | None = None
        self._socket: Any = None
        self.shown: HostKey | None = None
        self.tried: list[str] = []
        self._proxy: ProxyCommand | None = None

    def start_proxy(self) -> socket.socket:
        self._proxy = ProxyCommand(self.route.proxy_command)
        return self._proxy.socket

    def end_proxy(self) -> str:
        """End the ProxyCommand, if any; the last line of its standard error."""
        if self._proxy is None:
            return ""
        self._proxy.end()
        return self._proxy.last_line

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
        return self.expected is None or self.shown == self.expected

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
        if not self.route.agent:
            return []
        only = [file.public for file in self._files if file.public] if self.route.only else None
        try:
            self._agent = await asyncssh.connect_agent(self.route.agent)
            keys = list(await self._agent.get_keys(only)) if only is None or only else []
        except (OSError, ValueError):  # no answer, or one that is no list of keys
            self.tried.append(f"no ssh-agent: {self.route.agent} does not answer")
            return []
        self.tried.append(f"{len(keys)} from the ssh-agent")
        return keys
