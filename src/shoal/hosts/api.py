"""The interface to a host. Everything that talks to a machine goes through these few names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self


@dataclass(frozen=True)
class Target:
    """Where a host is and how to log in. Whatever is None comes from `~/.ssh/config`, then from SSH's own defaults."""

    name: str
    """The name Shoal and Slurm know the host by; also the alias looked up in `~/.ssh/config` when `address` is None."""
    address: str | None = None
    port: int | None = None
    user: str | None = None
    identity: Path | None = None
    host_key: str | None = None
    """The host's public key, where the provider reports it; otherwise the key is trusted on first use."""
    slowness: int = 1
    """How many times as long as others it may take to answer: more than 1 for emulated machines."""


@dataclass(frozen=True)
class Result:
    """How a command ended."""

    status: int
    stdout: bytes = b""
    stderr: bytes = b""

    @property
    def text(self) -> str:
        return self.stdout.decode("utf-8", "replace")

    @property
    def error_text(self) -> str:
        return self.stderr.decode("utf-8", "replace")


class Process(Protocol):
    """A running program on a host, spoken to line by line."""

    async def write(self, data: bytes) -> None:
        """Send bytes to its standard input; waits while the other side is slow. Raises ConnectionLost."""

    async def readline(self) -> bytes:
        """The next line of its standard output, newline included; b"" at the end. Raises ConnectionLost."""

    async def wait(self) -> Result:
        """Close its input, wait for its end. stdout is what readline left over; stderr the last 64 KiB."""

    async def kill(self) -> None:
        """End it now."""


class Host(ABC):
    """A machine we can run programs on. Arguments are a list, never a shell line: an implementation that has to
    pass through a remote shell quotes every one of them."""

    target: Target

    @property
    def name(self) -> str:
        return self.target.name

    @abstractmethod
    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        """Run a program to its end. A non-zero status is a Result, not an error.

        Raises CommandTimeout when `timeout` runs out, ConnectionLost when the host goes away, SudoDenied when `root` is
        asked for and the login user may not have it.
        """

    @abstractmethod
    async def start(self, argv: Sequence[str], *, root: bool = True) -> Process:
        """Start a program and speak with it."""

    @abstractmethod
    async def close(self) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()


class Connector(Protocol):
    """Opens connections to hosts."""

    async def connect(self, target: Target) -> Host:
        """Raises Unreachable, AuthenticationFailed or HostKeyChanged, each with what to do about it."""
