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

_FIREWALL = "check that the host is up and that no firewall blocks SSH"
_NO_ROUTE = ("no route to {place}", "check that the host is up and that you are on its network (VPN, jump host)")
_SOCKET_ERRORS = {
    errno.ECONNREFUSED: ("{place} refused the connection", "start sshd there, or set its `port:` in the spec"),
    errno.ETIMEDOUT: ("{place} does not answer", _FIREWALL),
    **dict.fromkeys((errno.EHOSTUNREACH, errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTDOWN), _NO_ROUTE),
}
"""Cause and fix, by the number of the error."""


def cannot_connect(
    route: Route, error: BaseException, tried: Sequence[str], *, timeout: float, via: str = "", proxy_error: str = ""
) -> HostError:
    """Why a connection could not be made.

    `tried` names the keys that were offered, `via` the jump host; `proxy_error` is the last line of a ProxyCommand.
    """
    if isinstance(error, asyncssh.PermissionDenied) or "too many authentication failures" in str(error).lower():
        return _authentication_failed(route, str(error), tried)
    if route.proxy_command and isinstance(error, (asyncssh.ConnectionLost, OSError, EOFError)):
        return _no_proxy(route, error, timeout, proxy_error)
    name, address, jump = route.name, f"{route.host}:{route.port}", via or "the jump host"
    place = address + (f" (through {via})" if via else "")
    match error:
        case socket.gaierror():
            cause = f"no address is known for {route.host!r}: {error.strerror}"
            hint = f"check the spelling, give the host an `address:` in the spec, or a `Host {name}` in ~/.ssh/config"
        case TimeoutError():
            cause, hint = f"{place} does not answer within {timeout:g} s", _FIREWALL
        case asyncssh.ChannelOpenError():
            cause = f"{jump} cannot reach {address}: {error.reason}"
            hint = f"check the address as seen from {jump}, and that it allows TCP forwarding"
        case asyncssh.ConnectionLost() | ConnectionResetError() | BrokenPipeError() | EOFError():
            cause = f"{place} closed the connection before the login"
            hint = "try again; if it stays so, look at sshd's log on the host (MaxStartups, fail2ban, a full disk)"
        case asyncssh.Error():
            cause = f"{place} does not speak SSH: {error}"
            hint = f"is this the SSH port? compare with: ssh -v {name}"
        case UnicodeError() | OverflowError():
            cause, hint = f"{place} is not an address: {error}", "correct the host's address or port"
        case _:
            assert isinstance(error, OSError)
            other = ("cannot connect to {place}: " + (error.strerror or str(error)), f"compare with: ssh -v {name}")
            cause, hint = _SOCKET_ERRORS.get(_number(error), other)
            cause = cause.replace("{place}", place)
    return Unreachable(name, cause, hint=hint)


def connection_lost(name: str, doing: str, error: BaseException | None) -> ConnectionLost:
    """The host went away while it ran a program for us."""
    why = f": {error}" if error and str(error) not in ("", "Connection lost") else ""
    hint = "check that the host is up, then run the same again"
    return ConnectionLost(name, f"the connection broke while it ran {doing}{why}", hint=hint)


def cannot_start(name: str, doing: str, error: BaseException) -> HostError:
    """The connection is there, and the host does not start the program."""
    if isinstance(error, asyncssh.ChannelOpenError) and "connection closed" not in str(error).lower():
        hint = "is MaxSessions in its sshd_config 0, or ForceCommand set?"
        return Unreachable(name, f"cannot start {doing}: {error.reason}", hint=hint)
    return connection_lost(name, doing, error)


def _authentication_failed(route: Route, cause: str, tried: Sequence[str]) -> AuthenticationFailed:
    offered = ", ".join(tried) if tried else "no key: none was found"
    login = f"{route.user}@{route.host}"
    if "too many" in cause.lower():
        what = f"authentication failed for {login}: too many keys: {offered}"
        hint = "name the right key: `identity:` in the spec, or IdentityFile and IdentitiesOnly in ~/.ssh/config"
    else:
        what = f"authentication failed for {login}:{route.port} (tried {offered})"
        make = "" if tried else "make a key with ssh-keygen, then "
        copy = f"put your public key there: ssh-copy-id -p {route.port} {login}"
        hint = f"{make}{copy}; or name another `user:` or `identity:` in the spec"
    return AuthenticationFailed(route.name, what, hint=hint)


def _no_proxy(route: Route, error: BaseException, timeout: float, proxy_error: str) -> Unreachable:
    why = "ended before the login"
    if isinstance(error, FileNotFoundError | PermissionError):
        why = f"cannot be started by $SHELL, {error.filename}: {error.strerror}"
    elif isinstance(error, TimeoutError):
        why = f"did not lead to {route.host}:{route.port} within {timeout:g} s"
    cause = f"its ProxyCommand `{route.proxy_command.split()[0]}` {why}" + (f": {proxy_error}" if proxy_error else "")
    hint = f"correct ProxyCommand for {route.name} in ~/.ssh/config; compare with: ssh -v {route.name}"
    return Unreachable(route.name, cause, hint=hint)


def _number(error: OSError) -> int:
    # asyncio folds the errors of several addresses into one without a number.
    first = re.search(r"\[Errno (\d+)\]", str(error))
    return error.errno or (int(first[1]) if first else 0)
