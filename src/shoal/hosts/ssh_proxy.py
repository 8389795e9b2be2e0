"""A ProxyCommand of `~/.ssh/config`: the program of the user's through which a host is reached."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import tempfile

_TAIL = 4 << 10


class Proxy:
    """A running ProxyCommand and our end of it.

    We start it ourselves, in the user's shell as OpenSSH does: asyncssh would take what it says on its standard error
    for the host's words.
    """

    def __init__(self, command: str) -> None:
        """Raises OSError when there is no such shell."""
        self.last_words = ""
        """The last line it said on its standard error, once it has ended."""
        self.socket, theirs = socket.socketpair()
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the end of the program
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [os.environ.get("SHELL") or "/bin/sh", "-c", f"exec {command}"],
                    stdin=theirs.fileno(),
                    stdout=theirs.fileno(),
                    stderr=self._words,
                    start_new_session=True,
                )
            except OSError:
                self.socket.close()
                self._words.close()
                raise

    def end(self) -> None:
        """End it, with what it started. Safe to call more than once."""
        if self._words.closed:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        with self._words:
            self._words.seek(max(0, os.fstat(self._words.fileno()).st_size - _TAIL))
            lines = self._words.read().decode("utf-8", "replace").splitlines()
        self.last_words = next((line.strip() for line in reversed(lines) if line.strip()), "")
