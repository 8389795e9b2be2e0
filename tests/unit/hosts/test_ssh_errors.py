"""Every error of asyncssh becomes an error of Shoal, with cause and fix."""

import errno
import socket

import asyncssh
from tests.support.cases import cases

from shoal.errors import AuthenticationFailed, ConnectionLost, HostError, Unreachable
from shoal.hosts.ssh_config import Route
from shoal.hosts.ssh_errors import cannot_connect, cannot_start, connection_lost

ROUTE = Route("gpu01", "10.0.0.1", 22, "ubuntu", (), False, None, False, (), None)

CASES: list[tuple[BaseException, type[HostError], str]] = [
    (socket.gaierror(-2, "Name or service not known"), Unreachable, "no address is known for '10.0.0.1'"),
    (OSError(errno.ECONNREFUSED, "x"), Unreachable, "10.0.0.1:22 refused the connection"),
    (OSError("Multiple exceptions: [Errno 111] a, [Errno 111] b"), Unreachable, "10.0.0.1:22 refused the connection"),
    (OSError(errno.EHOSTUNREACH, "x"), Unreachable, "no route to 10.0.0.1:22"),
    (OSError(errno.ENETUNREACH, "x"), Unreachable, "no route to 10.0.0.1:22"),
    (OSError(errno.EACCES, "Permission denied"), Unreachable, "cannot connect to 10.0.0.1:22: Permission denied"),
    (TimeoutError(errno.ETIMEDOUT, "x"), Unreachable, "10.0.0.1:22 does not answer within 10 s"),
    (TimeoutError(), Unreachable, "10.0.0.1:22 does not answer within 10 s"),
    (ConnectionResetError(errno.ECONNRESET, "x"), Unreachable, "closed the connection before the login"),
    (asyncssh.ConnectionLost("x"), Unreachable, "closed the connection before the login"),
    (asyncssh.KeyExchangeFailed("no common cipher"), Unreachable, "does not speak SSH: no common cipher"),
    (asyncssh.ProtocolError("bad packet"), Unreachable, "does not speak SSH: bad packet"),
    (
        asyncssh.PermissionDenied("x"),
        AuthenticationFailed,
        "authentication failed for ubuntu@10.0.0.1:22 (tried no key: none was found)",
    ),
    (asyncssh.DisconnectError(2, "Too many authentication failures"), AuthenticationFailed, "too many keys: no key"),
    (UnicodeError("label too long"), Unreachable, "10.0.0.1:22 is not an address: label too long"),
]


@cases("error, kind, text", *CASES, ids=lambda value: str(value)[:40])
def test_failed_connection_has_cause_and_fix(error: BaseException, kind: type[HostError], text: str) -> None:
    error = cannot_connect(ROUTE, error, tried=[], timeout=10, via="")
    assert type(error) is kind and error.host == "gpu01" and text in error.message and error.hint


def test_user_without_a_key_gets_the_ssh_keygen_hint() -> None:
    without = cannot_connect(ROUTE, asyncssh.PermissionDenied("x"), tried=[], timeout=10)
    assert without.hint.startswith(
        "make a key with ssh-keygen, then put your public key there: ssh-copy-id -p 22 ubuntu@10.0.0.1; "
    )
    with_one = cannot_connect(ROUTE, asyncssh.PermissionDenied("x"), tried=["~/.ssh/id_ed25519"], timeout=10)
    assert with_one.hint.startswith("put your public key there: ssh-copy-id -p 22 ubuntu@10.0.0.1; ")


def test_jump_host_is_named() -> None:
    error = cannot_connect(ROUTE, OSError(errno.EHOSTUNREACH, "x"), tried=[], timeout=10, via="door")
    assert error.message == "gpu01: no route to 10.0.0.1:22 (through door)"


def test_rejected_session_is_not_a_lost_connection() -> None:
    refused = cannot_start("gpu01", "`true`", asyncssh.ChannelOpenError(1, "open failed"))
    assert type(refused) is Unreachable and refused.message == "gpu01: cannot start `true`: open failed"
    lost = cannot_start("gpu01", "`true`", asyncssh.ChannelOpenError(2, "SSH connection closed"))
    assert type(lost) is ConnectionLost


def test_lost_connection_has_the_command_and_the_cause() -> None:
    error = connection_lost("gpu01", "`python3`", OSError(errno.EPIPE, "Broken pipe"))
    assert error.message == "gpu01: the connection broke while it ran `python3`: [Errno 32] Broken pipe"
