"""`remote/probes.py` on this machine."""

import os
import pwd
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.remote import probes
from shoal.remote.probes import listeners, require_listener

ME = pwd.getpwuid(os.getuid()).pw_name
LOOPBACK = "0100007F"


@pytest.fixture(params=["127.0.0.1", "0.0.0.0"])  # nosec B104
def port(request: pytest.FixtureRequest) -> Iterator[int]:
    """One that a program of this user listens on."""
    with socket.create_server((request.param, 0)) as server:
        yield server.getsockname()[1]


def test_listener_of_the_service_itself_is_accepted(port: int) -> None:
    require_listener(f"http://127.0.0.1:{port}", ME)
    assert listeners(port, LOOPBACK) == {os.getuid()}


def test_listener_of_another_user_is_named_and_gets_no_password(port: int, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=f"a program of {ME} has port {port} already"):
        require_listener(f"http://127.0.0.1:{port}", "nobody")
    require_listener(f"http://127.0.0.2:{port + 1}", "nobody")
    (tmp_path / "admin").write_text("hunter2")
    code = (
        f"import sys, probes; probes.MLFLOW_SERVICE = 'nobody'; probes.create_accounts({f'http://127.0.0.1:{port}'!r},"
    )
    code += f" {str(tmp_path / 'admin')!r}, {str(tmp_path / 'mark')!r})"
    place = str(Path(probes.__file__).parent)
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "has port" in done.stderr


def test_addresses_of_ipv6_are_compared_too() -> None:
    with socket.socket(socket.AF_INET6) as server:
        try:
            server.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6 on loopback")
        server.listen()
        number = server.getsockname()[1]
        require_listener(f"http://[::1]:{number}", ME)
        with pytest.raises(SystemExit, match="has port"):
            require_listener(f"http://[::1]:{number}", "nobody")
    with socket.socket(socket.AF_INET6) as server:
        server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        server.bind(("::ffff:127.0.0.1", 0))
        server.listen()
        assert listeners(server.getsockname()[1], LOOPBACK) == {os.getuid()}


def test_server_on_another_address_is_none_of_ours() -> None:
    with socket.create_server(("127.0.0.2", 0)) as server:
        number = server.getsockname()[1]
        assert listeners(number, LOOPBACK) == set()
        require_listener(f"http://127.0.0.1:{number}", "nobody")
