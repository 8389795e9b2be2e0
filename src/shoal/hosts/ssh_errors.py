"""Maps the errors of asyncssh and sockets to Shoal's, each with its cause and a fix."""

from __future__ import annotations

import errno
import re
import socket
from collections.abc import Sequence

import asyncssh

from shoal.errors import AuthenticationFailed, ConnectionLost, HostError, Unreachable
from shoal.hosts.ssh_config import Route

# What asyncssh and the socket layer raise; nothing of it may leave this package.
FOREIGN_ERRORS = (OSError, EOFError, asyncssh.Error, UnicodeError, OverflowError)


def cannot_connect(
    route: Route, error: BaseException, tried: Sequence[str], *, timeout: float, via: str = "", proxy_error: str = ""
) -> HostError:
    """Why a connection could not be made.

    `tried` names the keys that were offered, `via` the jump host; `proxy_error` is the last line of a ProxyCommand.
    """
    name, place = route.name, f"{route.host}:{route.port}" + (f" (through {via})" if via else "")
    if isinstance(error, asyncssh.PermissionDenied) or "too many authentication failures" in str(error).lower():
        return _auth_refused(route, str(error), tried)
    if route.proxy_command and isinstance(error, (asyncssh.ConnectionLost, OSError, EOFError)):
        return _no_proxy(route, error, timeout, proxy_error)
    if isinstance(error, socket.gaierror):
        return Unreachable(
            name,
            f"no address is known for {route.host!r}: {error.strerror}",
            hint=f"check the spelling, give the host an `address:` in the spec, or a `Host {name}` in ~/.ssh/config",
        )
    if isinstance(error, TimeoutError):
        return Unreachable(
            name,
            f"{place} does not answer within {timeout:g} s",
            hint="check that the host is up and that no firewall blocks SSH",
        )
    if isinstance(error, asyncssh.ChannelOpenError):
        return Unreachable(
            name,
            f"{via or 'the jump host'} cannot reach {route.host}:{route.port}: {error.reason}",
            hint=f"check the address as seen from {via or 'the jump host'}, and that it allows TCP forwarding",
        )
    if isinstance(error, (asyncssh.ConnectionLost, ConnectionResetError, BrokenPipeError, EOFError)):
        return Unreachable(
            name,
            f"{place} closed the connection before the login",
            hint="try again; if it stays so, look at sshd's log on the host (MaxStartups, fail2ban, a full disk)",
        )
    if isinstance(error, asyncssh.Error):
        return Unreachable(
            name,
            f"{place} does not speak SSH: {error}",
            hint=f"is this the SSH port? compare with: ssh -v {name}",
        )
    if isinstance(error, (UnicodeError, OverflowError)):
        return Unreachable(name, f"{place} is not an address: {error}", hint="correct the host's address or port")
    assert isinstance(error, OSError)
    return _no_socket(name, place, error)


def connection_lost(name: str, doing: str, error: BaseException | None) -> ConnectionLost:
    """The host went away while it ran a program for us."""
    why = f": {error}" if error and str(error) not in ("", "Connection lost") else ""
    return ConnectionLost(
        name,
        f"the connection broke while it ran {doing}{why}",
        hint="check that the host is up, then run the same again",
    )


def cannot_start(name: str, doing: str, error: BaseException) -> HostError:
    """The connection is there, and the host does not start the program."""
    if isinstance(error, asyncssh.ChannelOpenError) and "connection closed" not in str(error).lower():
        return Unreachable(
            name,
            f"will not start {doing}: {error.reason}",
            hint="is MaxSessions in its sshd_config 0, or ForceCommand set?",
        )
    return connection_lost(name, doing, error)


def _auth_refused(route: Route, cause: str, tried: Sequence[str]) -> AuthenticationFailed:
    offered = ", ".join(tried) if tried else "no key: none was found"
    if "too many" in cause.lower():
        return AuthenticationFailed(
            route.name,
            f"authentication failed for {route.user}@{route.host}: too many keys: {offered}",
            hint="name the right key: `identity:` in the spec, or IdentityFile and IdentitiesOnly in ~/.ssh/config",
        )
    make = "" if tried else "make a key with ssh-keygen, then "
    return AuthenticationFailed(
        route.name,
        f"authentication failed for {route.user}@{route.host}:{route.port} (tried {offered})",
        hint=f"{make}put your public key there: ssh-copy-id -p {route.port} {route.user}@{route.host}; "
        "or name another `user:` or `identity:` in the spec",
    )


def _no_proxy(route: Route, error: BaseException, timeout: float, proxy_error: str) -> Unreachable:
    why = "ended before the login"
    if isinstance(error, FileNotFoundError | PermissionError):
        why = f"cannot be started by $SHELL, {error.filename}: {error.strerror}"
    elif isinstance(error, TimeoutError):
        why = f"did not lead to {route.host}:{route.port} within {timeout:g} s"
    return Unreachable(
        route.name,
        f"its ProxyCommand `{route.proxy_command.split()[0]}` {why}" + (f": {proxy_error}" if proxy_error else ""),
        hint=f"correct ProxyCommand for {route.name} in ~/.ssh/config; compare with: ssh -v {route.name}",
    )


def _no_socket(name: str, place: str, error: OSError) -> Unreachable:
    # asyncio folds the errors of several addresses into one without a number.
    first = re.search(r"\[Errno (\d+)\]", str(error))
    number = error.errno or (int(first[1]) if first else 0)
    if number == errno.ECONNREFUSED:
        return Unreachable(
            name, f"{place} refused the connection", hint="start sshd there, or set its `port:` in the spec"
        )
    if number in (errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN):
        return Unreachable(
            name,
            f"no route to {place}",
            hint="check that the host is up and that you are on its network (VPN, jump host)",
        )
    if number == errno.ETIMEDOUT:
        return Unreachable(
            name, f"{place} does not answer", hint="check that the host is up and that no firewall blocks SSH"
        )
    return Unreachable(
        name, f"cannot connect to {place}: {error.strerror or error}", hint=f"compare with: ssh -v {name}"
    )
