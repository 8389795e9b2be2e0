"""Says what is wrong where `ssh` cannot log in, or loses the connection: from its own words, with a cause and a fix."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from shoal.errors import AuthenticationFailed, ConnectionLost, HostError, HostKeyChanged, ShoalError, Unreachable
from shoal.hosts.host_keys import host_key_changed
from shoal.hosts.ssh_login import Login
from shoal.hosts.ssh_route import Route, jump_keys, read_route

_FIREWALL = "check that the host is up and that no firewall blocks SSH"
_NETWORK = "check that the host is up and that you are on its network (VPN, jump host)"
_SOCKET_ERRORS = {
    "Connection refused": ("{place} refused the connection", "start sshd there, or set its `port:` in the spec"),
    "Connection timed out": ("{place} does not answer", _FIREWALL),
    **dict.fromkeys(
        ("No route to host", "Network is unreachable", "Network is down", "Host is down"),
        ("no route to {place}", _NETWORK),
    ),
}
"""Cause and fix, by what the kernel says."""
_ENCRYPTED = "SSH2_MSG_NEWKEYS received"
_HOST_KEY = "Host key verification failed"
_LOCKED = "is protected by a passphrase"
_NO_KEY = "no key: none was found"
_CONNECT = re.compile(r"^ssh: connect to host (\S+) port (\d+): (.*)$", re.M)
_RESOLVE = re.compile(r"^ssh: Could not resolve hostname (.*?): (.*)$", re.M)
_SHOWN_KEY = re.compile(r"^debug1: Server host key: (\S+) (\S+)$", re.M)
_DENIED = re.compile(r"^(?:(\S+@\S+): Permission denied|.*Too many authentication failures)", re.M)
_LOGGED_IN = re.compile(r"^(?:debug1: )?(?:Authenticated to |Authentication succeeded)", re.M)
_NOT_SSH = re.compile(r"(no matching .*|Protocol major versions differ.*|banner line contains invalid.*)")
_NO_FORWARDING = re.compile(
    r"open failed: (?:connect failed: |administratively prohibited: )?(.*)|tdio forwarding (?:request )?failed"
)
_OFFERED = re.compile(r"^debug1: Offering public key: (.*?) \S+ SHA256:\S*( explicit)?( agent)?$", re.M)
_ACCEPTED = re.compile(r"^debug1: Server accepts key: (.*?) \S+ SHA256:", re.M)
_TRIED = re.compile(r"^debug1: Trying private key: (.*)$", re.M)
_UNUSABLE = re.compile(r'^(?:Load key "|no such identity: )(.*?)"?: (.*)$', re.M)


def require_ssh() -> None:
    """Raise ShoalError, as it concerns all hosts."""
    if shutil.which("ssh") is None:
        raise ShoalError("this machine has no ssh command", hint="install openssh-client")


def cannot_start_ssh(error: OSError) -> ShoalError:
    return ShoalError(f"cannot start ssh: {error.strerror or error}", hint="the machine may be out of memory or files")


def connection_lost(name: str, doing: str, said: str) -> HostError:
    """The host went away while it ran a program for us, or did not start it."""
    if "refused by peer" in said:
        hint = "raise MaxSessions in its sshd_config: its default is 10, and Shoal needs 8"
        return Unreachable(name, f"cannot start {doing}: the host opens no session", hint=hint)
    hint = "check that the host is up, then run the same again"
    return ConnectionLost(name, f"the connection broke while it ran {doing}", hint=hint)


async def cannot_connect(login: Login) -> HostError:
    """Why a login, which is closed, did not succeed."""
    target = login.target
    route = await read_route(target, login.options, login.host_keys.path)
    if route.jump and (error := _jump_error(login, route)):
        return error
    if _HOST_KEY in login.log and login.expected and (shown := _SHOWN_KEY.search(login.log)):
        key, path = f"{shown[1]} key {shown[2]}", login.host_keys.path
        return host_key_changed(target.name, login.expected, key, path, pinned=target.host_key is not None)
    if _LOGGED_IN.search(login.log) and not login.too_late:
        said = f": {login.greeting}" if login.greeting else ""
        cause = f"the login shell of {route.user} runs no commands{said}"
        return Unreachable(target.name, cause, hint=f"compare with: ssh {target.name} true; give {route.user} a shell")
    if denied := _DENIED.search(login.log):
        return _authentication_failed(login, route, denied[0])
    if route.proxy_command:
        return _no_proxy(login, route)
    via = f" (through {route.jump})" if route.jump else ""
    return _unreachable(target.name, login, f"{route.host}:{route.port}{via}", login.log)


def _unreachable(name: str, login: Login, place: str, said: str) -> HostError:
    if unresolved := _RESOLVE.search(said):
        cause = f"no address is known for {unresolved[1]!r}: {unresolved[2]}"
        hint = f"check the spelling, give the host an `address:` in the spec, or a `Host {name}` in ~/.ssh/config"
    elif login.too_late:
        seconds = login.options.timeout * login.target.slowness
        cause, hint = f"{place} does not answer within {seconds:g} s", _FIREWALL
        if _ENCRYPTED in said:
            cause = f"{place} answers, and the login did not end within {seconds:g} s"
            hint = "a hardware key may wait to be touched, or an ssh-agent for your answer; or the host is overloaded"
    elif failed := _CONNECT.search(said):
        other = (f"cannot connect to {{place}}: {failed[3]}", f"compare with: ssh -v {name}")
        cause, hint = _SOCKET_ERRORS.get(failed[3], other)
        cause = cause.replace("{place}", place)
    elif foreign := _NOT_SSH.search(said):
        cause, hint = f"{place} does not speak SSH: {foreign[1]}", f"is this the SSH port? compare with: ssh -v {name}"
    else:
        cause = f"{place} closed the connection before the login"
        hint = "try again; if it stays so, look at sshd's log on the host (MaxStartups, fail2ban, a full disk)"
    return Unreachable(name, cause, hint=hint)


def _jump_error(login: Login, route: Route) -> HostError | None:
    """What a jump host is the reason for; its `ssh` writes to our standard error."""
    name, said = route.jump, login.errors
    if _HOST_KEY in said:
        kept = jump_keys(login.host_keys.path)
        hint = (
            f"if the host was reinstalled, delete its line in {kept}; if not, someone may be between you and the host"
        )
        shown = _SHOWN_KEY.search(said)
        key = f"the {shown[1]} key {shown[2]}" if shown else "a key"
        return HostKeyChanged(name, f"shows {key}, not the one recorded first", hint=hint)
    if denied := _DENIED.search(said):
        cause = f"authentication failed for {denied[1] or name} (tried {_tried(said)})"
        return AuthenticationFailed(name, cause, hint=f"see that `ssh {name} true` works")
    if refused := _NO_FORWARDING.search(said):
        why = f": {refused[1]}" if refused[1] else ""
        cause = f"{name} cannot reach {route.host}:{route.port}{why}"
        hint = f"check the address as seen from {name}, and that it allows TCP forwarding"
        return Unreachable(login.target.name, cause, hint=hint)
    if failed := _CONNECT.search(said):
        return _unreachable(name, login, f"{failed[1]}:{failed[2]}", said)
    if _RESOLVE.search(said):
        return _unreachable(name, login, name, said)
    return None


def _authentication_failed(login: Login, route: Route, why: str) -> AuthenticationFailed:
    name, user = login.target.name, f"{route.user}@{route.host}"
    if login.target.identity and (unusable := _unusable_keys(login.log)):
        path, problem = next(iter(unusable.items()))
        is_locked = problem == _LOCKED
        text = f"the key {path} {problem}" + (" and no ssh-agent has it" if is_locked else "")
        return AuthenticationFailed(name, text, hint=_key_fix(path, problem))
    tried = _tried(login.log)
    if "Too many" in why:
        what = f"authentication failed for {user}: too many keys: {tried}"
        hint = "name the right key: `identity:` in the spec, or IdentityFile and IdentitiesOnly in ~/.ssh/config"
        return AuthenticationFailed(name, what, hint=hint)
    make = "make a key with ssh-keygen, then " if tried == _NO_KEY else ""
    copy = f"put your public key there: ssh-copy-id -p {route.port} {user}"
    hint = f"{make}{copy}; or name another `user:` or `identity:` in the spec"
    return AuthenticationFailed(name, f"authentication failed for {user}:{route.port} (tried {tried})", hint=hint)


def _tried(said: str) -> str:
    unusable = _unusable_keys(said)
    files = [match[1] for match in _OFFERED.finditer(said) if not match[3] and match[1] not in unusable]
    agent = sum(1 for match in _OFFERED.finditer(said) if match[3])
    tried = [*files, *(f"not {path}: it {problem}" for path, problem in unusable.items() if Path(path).exists())]
    return ", ".join([*tried, *([f"{agent} from the ssh-agent"] if agent else [])]) or _NO_KEY


def _unusable_keys(said: str) -> dict[str, str]:
    """Keys that `ssh` could not use, with what is wrong with them."""
    found = {match[1]: _key_problem(match[2]) for match in _UNUSABLE.finditer(said)}
    # It says nothing of a passphrase that it may not ask for.
    for match in (*_ACCEPTED.finditer(said), *_TRIED.finditer(said)):
        if Path(match[1]).is_file():
            found.setdefault(match[1], _LOCKED)
    return found


def _key_problem(said: str) -> str:
    match said:
        case "No such file or directory":
            return "does not exist"
        case "bad permissions":
            return "can be read by others"
        case "invalid format" | "error in libcrypto" | "unknown or unsupported key type":
            return "is not a private key"
    return f"cannot be read: {said}"


def _key_fix(path: str, problem: str) -> str:
    if problem == "does not exist":
        return f"make it with: ssh-keygen -t ed25519 -f {path}"
    if problem == _LOCKED:
        return f"load it into the ssh-agent: ssh-add {path}"
    if problem == "is not a private key":
        return "name the private key, not the .pub file"
    return f"make {path} readable to you alone: chmod 600 {path}"


def _no_proxy(login: Login, route: Route) -> Unreachable:
    why = "ended before the login"
    if login.too_late:
        why = f"did not lead to {route.host}:{route.port} within {login.options.timeout * login.target.slowness:g} s"
    said = [line.strip() for line in login.errors.splitlines() if line.strip()]
    cause = f"its ProxyCommand `{route.proxy_command.split()[0]}` {why}" + (f": {said[-1]}" if said else "")
    name = login.target.name
    return Unreachable(
        name, cause, hint=f"correct ProxyCommand for {name} in ~/.ssh/config; compare with: ssh -v {name}"
    )
