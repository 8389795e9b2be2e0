"""The keys we log in with: files read once, and whatever the ssh-agent holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import asyncssh

from shoal.errors import AuthRefused
from shoal.hosts.ssh_config import Route

Offer = asyncssh.SSHKey | tuple[asyncssh.SSHKey, asyncssh.SSHCertificate]


@dataclass(frozen=True)
class KeyFile:
    """A private key file as we found it."""

    path: Path
    offer: Offer | None
    """The key, with its certificate where `<path>-cert.pub` is there; None when we cannot read it."""
    public: bytes | None = None
    """The public half, by which the agent knows a key whose file is protected by a passphrase."""
    encrypted: bool = False
    problem: str = ""
    fix: str = ""


class KeyRing:
    """Key files, each read and decoded once however many hosts they open."""

    def __init__(self) -> None:
        self._files: dict[Path, KeyFile] = {}

    def files(self, route: Route) -> list[KeyFile]:
        """The key files of a route. Raises AuthRefused when one that was named for this host cannot be used."""
        files = [self._file(path) for path in route.identities]
        if route.chosen:
            for file in files:
                _must_be_usable(route, file)
        return files

    def _file(self, path: Path) -> KeyFile:
        if path not in self._files:
            self._files[path] = _read(path)
        return self._files[path]


async def agent_keys(
    socket: str, only: Sequence[bytes] | None
) -> tuple[list[asyncssh.SSHKeyPair], asyncssh.SSHAgentClient]:
    """The keys an ssh-agent offers, narrowed to `only`. Raises OSError when the agent does not answer."""
    client = await asyncssh.connect_agent(socket)
    try:
        keys = list(await client.get_keys(only)) if only is None or only else []
    except ValueError as error:
        client.close()
        raise OSError(f"the ssh-agent at {socket} gave no list of keys: {error}") from error
    return keys, client


def _read(path: Path) -> KeyFile:
    try:
        key = asyncssh.read_private_key(path)
    except FileNotFoundError:
        return KeyFile(path, None, problem="does not exist", fix=f"make it with: ssh-keygen -t ed25519 -f {path}")
    except OSError as error:
        why = error.strerror or str(error)
        return KeyFile(
            path, None, problem=f"cannot be read: {why}", fix=f"make {path} readable to you: chmod 600 {path}"
        )
    except (asyncssh.KeyImportError, asyncssh.KeyEncryptionError) as error:
        if "passphrase" in str(error).lower():
            fix = f"load it into the ssh-agent: ssh-add {path}"
            return KeyFile(
                path, None, _public_half(path), encrypted=True, problem="is protected by a passphrase", fix=fix
            )
        return KeyFile(
            path, None, problem=f"is not a private key: {error}", fix="name the private key, not the .pub file"
        )
    try:
        certificate = asyncssh.read_certificate(f"{path}-cert.pub")
    except (OSError, asyncssh.KeyImportError):
        return KeyFile(path, key, key.public_data)
    return KeyFile(path, (key, certificate), key.public_data)


def _public_half(path: Path) -> bytes | None:
    for candidate in (f"{path}.pub", str(path)):
        try:
            return asyncssh.read_public_key(candidate).public_data
        except (OSError, asyncssh.KeyImportError):
            continue
    return None


def _must_be_usable(route: Route, file: KeyFile) -> None:
    if file.encrypted and route.agent:
        return
    if file.problem:
        found = file.problem + (" and no ssh-agent is running" if file.encrypted else "")
        raise AuthRefused(route.name, f"the key {file.path} {found}", hint=file.fix)
