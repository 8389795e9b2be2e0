"""The host keys a cluster has met: trusted on first use, refused when they change.

One OpenSSH `known_hosts` file per cluster, one line a host: `name,[address]:port type key`. The name decides; the
address is there for people and for OpenSSH's own client. Another host may get the address of a former one.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import HostError, HostKeyChanged, ShoalError
from shoal.remote.agent.file_io import write_atomic


@dataclass(frozen=True)
class HostKey:
    """A host's public key: its type (`ssh-ed25519`) and its base64 text."""

    type: str
    text: str

    @classmethod
    def parse(cls, line: str) -> HostKey:
        """From `ssh-ed25519 AAAA... comment`. Raises ValueError."""
        fields = line.split()
        if len(fields) < 2:
            raise ValueError("a public key is two words: its type and its base64 text")
        key = cls(fields[0], fields[1])
        _ = key.fingerprint
        return key

    def __str__(self) -> str:
        return f"{self.type} key {self.fingerprint}"

    @property
    def fingerprint(self) -> str:
        """As `ssh-keygen -l` shows it."""
        digest = hashlib.sha256(base64.b64decode(self.text, validate=True)).digest()
        return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


class HostKeys:
    """The keys in one known_hosts file, read once and kept in step by `remember`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._keys: dict[str, HostKey] | None = None

    def find(self, name: str) -> HostKey | None:
        if self._keys is None:
            self._keys = _keys(self._read())
        return self._keys.get(name)

    def remember(self, name: str, address: str, port: int, key: HostKey, *, pinned: bool = False) -> None:
        """Keep a key we have just met. Raises HostKeyChanged when another process met another key in the meantime.

        A pinned key, reported by the provider, replaces the known one.
        """
        if self.find(name) == key:
            return
        with self._lock():
            lines = self._read()
            current = _keys(lines).get(name)
            if current and current != key and not pinned:
                raise host_key_changed(name, current, str(key), self.path)
            if current != key:
                others = [line for line in lines if not _is_of(line, name)]
                self._write([*others, f"{name},[{address}]:{port} {key.type} {key.text}"])
        assert self._keys is not None
        self._keys[name] = key

    def forget(self, name: str) -> bool:
        """Forget a host's key, so that the next connection trusts what it finds. False when none was kept."""
        if not self.path.exists():
            return False
        with self._lock():
            lines = self._read()
            others = [line for line in lines if not _is_of(line, name)]
            if len(others) != len(lines):
                self._write(others)
        self._keys = None
        return len(others) != len(lines)

    def _read(self) -> list[str]:
        try:
            return self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise _unusable(self.path, error) from error

    def _write(self, lines: list[str]) -> None:
        text = "".join(f"{line}\n" for line in lines)
        write_atomic(str(self.path), text.encode(), 0o600, os.geteuid(), os.getegid())

    @contextlib.contextmanager
    def _lock(self) -> Iterator[None]:
        """Alone with the file, across processes. The lock is a file of its own: the keys' is replaced."""
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = os.open(self.path.with_name(self.path.name + ".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield
            finally:
                os.close(lock)
        except OSError as error:
            raise _unusable(self.path, error) from error


def host_key_changed(name: str, recorded: HostKey, shown: str, path: Path, *, pinned: bool = False) -> HostKeyChanged:
    """The refusal, with both fingerprints and the way out."""
    origin = "its provider reported" if pinned else "recorded first"
    hint = (
        "the address may belong to another machine now, or someone is between you and the host; ask the provider"
        if pinned
        else f"if the host was reinstalled, forget its old key: shoal ssh --forget-key {name} "
        f"(kept in {path}); if not, someone may be between you and the host"
    )
    return HostKeyChanged(name, f"shows the {shown}, not the {recorded} {origin}", hint=hint)


def pinned_key(name: str, text: str) -> HostKey:
    try:
        return HostKey.parse(text)
    except ValueError as error:
        what = f"the host key given for it is not a public key: {error}"
        raise HostError(name, what, hint="give it as `ssh-ed25519 AAAA...`") from error


def _keys(lines: list[str]) -> dict[str, HostKey]:
    keys: dict[str, HostKey] = {}
    for line in lines:
        fields = line.split()
        if len(fields) < 3 or line.startswith(("#", "@", "|")):
            continue
        # A line that is not a key was edited by hand; it stays in the file and is not trusted.
        with contextlib.suppress(ValueError):
            keys[fields[0].split(",")[0]] = HostKey.parse(" ".join(fields[1:3]))
    return keys


def _is_of(line: str, name: str) -> bool:
    return line.split(",", 1)[0] == name or line.split(" ", 1)[0] == name


def _unusable(path: Path, error: OSError) -> ShoalError:
    return ShoalError(
        f"cannot use the file of known host keys {path}: {error.strerror or error}",
        hint=f"make {path.parent} a directory you own and may write to; XDG_STATE_HOME names another",
    )
