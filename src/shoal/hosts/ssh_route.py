"""The way to a host: what `ssh` is told of it, and what the user's SSH config says."""

from __future__ import annotations

import asyncio
import atexit
import functools
import glob
import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from shoal.errors import HostError, Unreachable
from shoal.hosts.api import Target

# The fastest first: OpenSSH's own choice takes 150 ms of CPU on either side.
ALGORITHMS = {
    "KexAlgorithms": "^curve25519-sha256,curve25519-sha256@libssh.org,ecdh-sha2-nistp256",
    "Ciphers": "^aes128-gcm@openssh.com,aes256-gcm@openssh.com",
    "MACs": "^hmac-sha2-256-etm@openssh.com,hmac-sha2-256",
}
KEEPALIVE_MISSED = 3
KEEP_JUMP_S = 10
"""How long the connection to a jump host stays without hosts behind it."""
READ_TIMEOUT_S = 30
_ALWAYS: Mapping[str, object] = {
    "BatchMode": "yes",
    "ForwardAgent": "no",
    "ForwardX11": "no",
    "GSSAPIDelegateCredentials": "no",
    "GlobalKnownHostsFile": os.devnull,
    "HashKnownHosts": "no",
    "NoHostAuthenticationForLocalhost": "no",
    "PermitLocalCommand": "no",
    "RemoteCommand": "none",
    "ServerAliveCountMax": KEEPALIVE_MISSED,
    "Tunnel": "no",
    "UpdateHostKeys": "no",
    "VerifyHostKeyDNS": "no",
}
"""What the user's config may say for a person at a terminal, and Shoal's programs have no use for."""


@dataclass(frozen=True)
class SshOptions:
    """How the hosts of a cluster are reached."""

    config: Path | None = None
    """The user's SSH config, instead of `~/.ssh/config`; /dev/null for none."""
    agent: bool = True
    """Whether keys of the ssh-agent are offered."""
    keep: bool = True
    """Whether a connection stays for the next command."""
    timeout: float = 10.0
    keepalive: float = 5.0
    """A host that misses three keepalives, so many seconds apart, counts as lost."""

    @property
    def user_config(self) -> Path | None:
        path = self.config or Path("~/.ssh/config").expanduser()
        return path if path.is_file() else None  # /dev/null is none

    @property
    def config_state(self) -> tuple[str, int, int] | None:
        """Differs where the config does; files that it includes are not looked at."""
        if path := self.user_config:
            return str(path), path.stat().st_mtime_ns, path.stat().st_size
        return None


@dataclass(frozen=True)
class Route:
    """Where `ssh` goes for a host, once the config has been asked."""

    host: str
    port: int
    user: str
    jump: str
    """The jump hosts, as ProxyJump has them; empty where there is none."""
    proxy_command: str


async def read_route(target: Target, options: SshOptions, known_hosts: Path) -> Route:
    """Raises HostError where the config cannot be understood."""
    command = ["ssh", "-G", "-T", *route_options(target, options, known_hosts), "--", address(target)]
    result = await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, timeout=READ_TIMEOUT_S, env=environment(), check=False
    )
    if result.returncode != 0:
        cause = next(iter(result.stderr.strip().splitlines()), f"`ssh -G` ended with {result.returncode}")
        if str(options.user_config) in cause:
            what = f"cannot understand the SSH config: {cause}"
            raise HostError(target.name, what, hint=f"correct it there; `ssh -G {target.name}` checks it")
        what = f"{address(target)} is not an address: {cause}"
        raise Unreachable(target.name, what, hint="correct the host's address or port")
    said = dict(line.split(" ", 1) for line in result.stdout.splitlines() if " " in line)
    jump, command_text = said.get("proxyjump", "none"), said.get("proxycommand", "none")
    return Route(
        said.get("hostname", address(target)),
        int(said.get("port", target.port or 22)),
        said.get("user", ""),
        "" if jump == "none" else jump,
        "" if command_text == "none" else command_text,
    )


def address(target: Target) -> str:
    """What `ssh` is given: an address, or an alias in the config."""
    return target.address or target.name


def terminal_command(target: Target, known_hosts: Path, options: Iterable[str] = ()) -> list[str]:
    """An `ssh` for a person, with the keys of the cluster. What follows it is the command, whatever it looks like."""
    command = ["ssh", "-o", f"UserKnownHostsFile={quoted(known_hosts)}", "-o", "StrictHostKeyChecking=yes"]
    command += ["-o", f"HostKeyAlias={target.name}"]
    if target.port:
        command += ["-p", str(target.port)]
    if target.user:
        command += ["-l", target.user]
    if target.identity:
        command += ["-i", str(target.identity), "-o", "IdentitiesOnly=yes"]
    return [*command, *options, "--", address(target)]


def route_options(target: Target, options: SshOptions, known_hosts: Path) -> list[str]:
    """The options of `ssh` that say where a host is and how to log in; the config says what these do not."""
    config = options.user_config
    settings: dict[str, object] = {**_ALWAYS, "ClearAllForwardings": "yes", **({} if config else ALGORITHMS)}
    if target.user:
        settings["User"] = target.user
    if target.port:
        settings["Port"] = target.port
    if target.identity:
        settings["IdentityFile"], settings["IdentitiesOnly"] = quoted(target.identity.expanduser().absolute()), "yes"
    if not options.agent:
        settings["IdentityAgent"] = "none"
    file = str(_shared_config(config.absolute(), known_hosts)) if config else "none"
    return ["-F", file, *(f"-o{name}={value}" for name, value in settings.items())]


def _shared_config(user_config: Path, known_hosts: Path) -> Path:
    """A config that includes the user's. Unlike options, `ssh` hands it on to the `ssh` of a jump host.

    Hosts behind one jump host share a connection to it, and its key is kept beside those of the cluster.
    """
    settings = {
        **_ALWAYS,
        **_newer_settings(),
        "StrictHostKeyChecking": "accept-new",
        "UserKnownHostsFile": f"{quoted(jump_keys(known_hosts))} ~/.ssh/known_hosts",  # it writes to the first
        "ControlMaster": "auto",
        "ControlPath": f"{directory()}/%C",
        "ControlPersist": KEEP_JUMP_S,
        "ServerAliveInterval": 5,
    }
    lines = [f"{name} {value}" for name, value in settings.items()]
    lines += [f'Include "{glob.escape(str(user_config))}"', "Match all"]  # the user's own algorithms come first
    lines += [f"{name} {value}" for name, value in ALGORITHMS.items()]
    text = "".join(f"{line}\n" for line in lines)
    path = Path(directory(), f"{hashlib.sha256(text.encode()).hexdigest()[:16]}.config")
    if not path.exists():
        known_hosts.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return path


@functools.cache
def _newer_settings() -> Mapping[str, str]:
    """What the config of a person may change since OpenSSH 8.7, and would be no help to a program."""
    names = {"KnownHostsCommand": "none", "SessionType": "default", "StdinNull": "no", "ForkAfterAuthentication": "no"}
    command = ["ssh", "-G", "-F", "none", *(f"-o{name}={value}" for name, value in names.items()), "--", "host"]
    known = subprocess.run(command, capture_output=True, timeout=READ_TIMEOUT_S, check=False).returncode == 0
    return names if known else {}


def quoted(path: Path) -> str:
    """A path as `ssh` takes it, which reads `%h` and the like in it."""
    text = str(path).replace("%", "%%")
    return f'"{text}"' if " " in text else text


def jump_keys(known_hosts: Path) -> Path:
    """The host keys of jump hosts."""
    return known_hosts.absolute().with_name(f"{known_hosts.name}.jumps")


def environment() -> dict[str, str]:
    """What `ssh` gets: without a language, which a config may send along, and in which programs would answer."""
    return {name: value for name, value in os.environ.items() if name not in ("LANG", "LANGUAGE") and name[:3] != "LC_"}


_directories: list[str] = []


def directory() -> str:
    """Where sockets are, which only we can open. Not below TMPDIR: the path of a socket is short."""
    if not _directories or not Path(_directories[-1]).is_dir():  # a service outlives what others remove from /tmp
        _directories.append(tempfile.mkdtemp(prefix="shoal-ssh-", dir="/tmp"))  # nosec B108 - it makes a new one
        atexit.register(remove_directory)
    return _directories[-1]


def remove_directory() -> None:
    """At the end, also before another program takes our place."""
    while _directories:
        shutil.rmtree(_directories.pop(), ignore_errors=True)
