"""Where a target leads once `~/.ssh/config` has been asked: address, port, user, keys, jump hosts."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncssh.config import ConfigParseError, SSHClientConfig
from asyncssh.misc import IllegalUserName

from shoal.errors import HostError
from shoal.hosts.api import Target
from shoal.hosts.sudo import login_name

_DEFAULT_KEYS = ("id_ed25519", "id_ecdsa", "id_rsa", "id_ed25519_sk", "id_ecdsa_sk")


@dataclass(frozen=True)
class Route:
    """How to get to a host, with nothing left to look up but names in DNS."""

    name: str
    host: str
    port: int
    user: str
    identities: tuple[Path, ...]
    """Key files to offer, in this order."""
    chosen: bool
    """Somebody named these identities, so one that cannot be read is an error; the default ones may be missing."""
    agent: str | None
    """The socket of the ssh-agent; None when it is not to be asked."""
    only: bool
    """The agent may offer these identities only, not every key it holds."""
    jumps: tuple[Target, ...]
    proxy_command: str
    """The command that leads there, for the user's shell; empty where none is needed."""


class SshConfig:
    """The user's SSH config. The file is not read where there is none."""

    def __init__(self, path: Path | None, *, agent: bool) -> None:
        default = Path("~/.ssh/config").expanduser()
        self._path = path or (default if default.exists() else None)
        self._agent = agent
        self._user = login_name()

    def route(self, target: Target) -> Route:
        """Raises HostError when the config cannot be read or understood."""
        alias = target.address or target.name
        get = self._section(target, alias).get
        identities, chosen = _identities(target, get("IdentityFile"))
        jump = _set(get("ProxyJump"))
        command = _set(get("ProxyCommand"))
        return Route(
            name=target.name,
            host=str(get("Hostname") or alias),
            port=target.port or int(get("Port") or 22),
            user=target.user or str(get("User") or self._user),
            identities=identities,
            chosen=chosen,
            agent=self._agent_socket(get("IdentityAgent")),
            only=target.identity is not None or bool(get("IdentitiesOnly")),
            jumps=tuple(_jump(target, part.strip()) for part in jump.split(",")) if jump else (),
            proxy_command=command if not jump else "",
        )

    def _section(self, target: Target, alias: str) -> Any:
        arguments = (self._user, target.user or (), alias, target.port or ())
        paths = [self._path] if self._path else []
        try:
            return SSHClientConfig.load(None, paths, False, False, False, *arguments)
        except OSError as error:
            what = f"cannot read the SSH config {self._path}: {error.strerror or error}"
            raise HostError(target.name, what, hint=f"make {self._path} a file you may read") from error
        except (ConfigParseError, IllegalUserName, ValueError, IndexError) as error:
            # An option without its value ends in asyncssh's parser as a bare IndexError.
            cause = str(error) if not isinstance(error, IndexError) else f"{self._path}: an option has no value"
            what = f"cannot understand the SSH config: {cause}"
            raise HostError(target.name, what, hint=f"fix that line; `ssh -G {target.name}` checks it") from error

    def _agent_socket(self, configured: object) -> str | None:
        if not self._agent:
            return None
        if configured and configured != "SSH_AUTH_SOCK":
            return str(Path(str(configured)).expanduser())
        return os.environ.get("SSH_AUTH_SOCK") or None


def _identities(target: Target, configured: Any) -> tuple[tuple[Path, ...], bool]:
    if target.identity is not None:
        return (target.identity.expanduser(),), True
    if configured:
        # OpenSSH passes over an IdentityFile that is not there; so do we.
        return tuple(path for path in (Path(name).expanduser() for name in configured) if path.exists()), False
    home = Path("~/.ssh").expanduser()
    return tuple(path for path in (home / name for name in _DEFAULT_KEYS) if path.exists()), False


def _set(value: object) -> str:
    """A setting's text; "" where there is none, or where `none` takes an earlier one back."""
    text = str(value or "").strip()
    return "" if text.lower() == "none" else text


def _jump(target: Target, text: str) -> Target:
    """A part of `user@host:port,host2` as a target, which is looked up in the config in its turn."""
    user, _, place = text.removeprefix("ssh://").rpartition("@")
    name, port = place, None
    if place.startswith("["):
        name, _, tail = place[1:].partition("]")
        port = tail.removeprefix(":") or None
    elif place.count(":") == 1:
        name, _, port = place.partition(":")
    if not name or (port is not None and not port.isdigit()):
        what = f"cannot understand ProxyJump {text!r} in the SSH config"
        raise HostError(target.name, what, hint="write it as user@host:port")
    return Target(name, user=user or None, port=int(port) if port else None)
