"""Every foreign error of an SSH connection becomes one of ours, with cause and fix."""

from __future__ import annotations

import errno
import socket

import asyncssh
import pytest

from shoal.errors import AuthRefused, ConnectionLost, HostError, Unreachable
from shoal.hosts.ssh_config import Route
from shoal.hosts.ssh_errors import cannot_connect, cannot_start, connection_lost

ROUTE = Route("gpu01", "10.0.0.1", 22, "ubuntu", (), False, None, False, (), None)

CASES: list[tuple[BaseException, type[HostError], str]] = [
    (socket.gaierror(-2, "Name or service not known"), Unreachable, "no address is known for '10.0.0.1'"),
    (OSError(errno.ECONNREFUSED, "x"), Unreachable, "10.0.0.1:22 refuses the connection"),
    (OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"), Unreachable, "10.0.0.1:22 refuses the connection"),
    (OSError(errno.EHOSTUNREACH, "x"), Unreachable, "there is no route to 10.0.0.1:22"),
    (OSError(errno.ENETUNREACH, "x"), Unreachable, "there is no route to 10.0.0.1:22"),
    (OSError(errno.EACCES, "Permission denied"), Unreachable, "cannot connect to 10.0.0.1:22: Permission denied"),
    (TimeoutError(errno.ETIMEDOUT, "x"), Unreachable, "10.0.0.1:22 does not answer within 10 s"),
    (TimeoutError(), Unreachable, "10.0.0.1:22 does not answer within 10 s"),
    (ConnectionResetError(errno.ECONNRESET, "x"), Unreachable, "closed the connection before we were logged in"),
    (asyncssh.ConnectionLost("x"), Unreachable, "closed the connection before we were logged in"),
    (asyncssh.KeyExchangeFailed("no common cipher"), Unreachable, "does not speak SSH with us: no common cipher"),
    (asyncssh.ProtocolError("bad packet"), Unreachable, "does not speak SSH with us: bad packet"),
    (asyncssh.PermissionDenied("x"), AuthRefused, "does not let ubuntu@10.0.0.1:22 in (tried no key: none was found)"),
    (asyncssh.DisconnectError(2, "Too many authentication failures"), AuthRefused, "after too many keys: no key"),
    (UnicodeError("label too long"), Unreachable, "10.0.0.1:22 is not an address: label too long"),
]


@pytest.mark.parametrize(("error", "kind", "text"), CASES, ids=lambda value: str(value)[:40])
def test_a_failed_connection_tells_cause_and_fix(error: BaseException, kind: type[HostError], text: str) -> None:
    told = cannot_connect(ROUTE, error, tried=[], timeout=10, via="")
    assert type(told) is kind
    assert told.host == "gpu01"
    assert text in told.message
    assert told.hint


def test_who_has_no_key_is_told_to_make_one() -> None:
    without = cannot_connect(ROUTE, asyncssh.PermissionDenied("x"), tried=[], timeout=10)
    assert without.hint.startswith(
        "make a key with ssh-keygen, then put your public key there: ssh-copy-id -p 22 ubuntu@10.0.0.1; "
    )
    with_one = cannot_connect(ROUTE, asyncssh.PermissionDenied("x"), tried=["~/.ssh/id_ed25519"], timeout=10)
    assert with_one.hint.startswith("put your public key there: ssh-copy-id -p 22 ubuntu@10.0.0.1; ")


def test_the_jump_host_is_named() -> None:
    told = cannot_connect(ROUTE, OSError(errno.EHOSTUNREACH, "x"), tried=[], timeout=10, via="door")
    assert told.message == "gpu01: there is no route to 10.0.0.1:22 (through door)"


def test_a_refused_session_is_not_a_lost_connection() -> None:
    refused = cannot_start("gpu01", "`true`", asyncssh.ChannelOpenError(1, "open failed"))
    assert type(refused) is Unreachable
    assert refused.message == "gpu01: will not start `true`: open failed"
    lost = cannot_start("gpu01", "`true`", asyncssh.ChannelOpenError(2, "SSH connection closed"))
    assert type(lost) is ConnectionLost


def test_a_lost_connection_says_what_was_going_on_and_why() -> None:
    told = connection_lost("gpu01", "`python3`", OSError(errno.EPIPE, "Broken pipe"))
    assert told.message == "gpu01: the connection broke while it ran `python3`: [Errno 32] Broken pipe"
