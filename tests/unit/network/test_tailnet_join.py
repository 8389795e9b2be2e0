"""The program that joins a tailnet: which key it passes, and which cause and fix it prints."""

from __future__ import annotations

import http.server
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from shoal.remote import program_text


@pytest.fixture
def server() -> Iterator[str]:
    """A control server that answers every request with an error."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Quiet) as httpd:
        thread = threading.Thread(target=httpd.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{httpd.server_address[1]}"
        httpd.shutdown()
        thread.join()


class Quiet(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_error(404)

    def log_message(self, format: str, *args: object) -> None: ...


def join(tmp_path: Path, server: str, script: str, key: str = "tskey-auth-abc", ephemeral: str = "false") -> str:
    """Run the program with a stand-in for `tailscale`. It fails, and the key file is removed."""
    program = tmp_path / "bin/tailscale"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\n{script}\nexit 3\n")
    program.chmod(0o755)
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(key)
    options = (server, str(file), ephemeral, "--hostname=lab-n1")
    line = [sys.executable, "-c", program_text("tailnet_join"), *options]
    done = subprocess.run(line, env={"PATH": f"{program.parent}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"], "the key is removed although the host did not join"
    return done.stdout


@pytest.mark.parametrize(
    ("key", "ephemeral", "used"),
    [
        ("tskey-auth-abc", "true", "tskey-auth-abc"),
        ("tskey-client-abc", "false", "tskey-client-abc?ephemeral=false&preauthorized=true"),
        ("tskey-client-abc", "true", "tskey-client-abc?ephemeral=true&preauthorized=true"),
        ("tskey-client-abc?ephemeral=true", "false", "tskey-client-abc?ephemeral=true"),
        ("8a7b6c", "true", "8a7b6c"),
    ],
)
def test_secret_of_an_oauth_client_gets_options(
    tmp_path: Path, server: str, key: str, ephemeral: str, used: str
) -> None:
    script = 'printf "%s\\n" "$@"; file=${2#--auth-key=file:}\nstat -c %a "$file"; cat "$file"'
    *words, mode, secret, _ = join(tmp_path, server, script, key, ephemeral).splitlines()
    assert words == ["up", f"--auth-key=file:{tmp_path}/key", "--hostname=lab-n1", "--timeout=60s"]
    assert (mode, secret) == ("600", used)


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        ("backend error: authkey already used", "this one is for a single host"),
        ("backend error: authkey expired", "this one has expired or was revoked"),
        ("requested tags [tag:x] are invalid or not permitted", "`tagOwners`"),
        ("backend error: invalid pre auth key", "which does not know this one"),
        ("invalid key: unable to validate API key", "which does not know this one"),
        ("something else", "or log the host in by hand"),
    ],
)
def test_each_cause_has_its_fix(tmp_path: Path, server: str, text: str, fix: str) -> None:
    shown, last = join(tmp_path, server, f"echo '{text}'").splitlines()
    assert shown == text and last.startswith("fix: ") and fix in last


def test_server_that_does_not_answer_is_named_instead_of_the_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    shown, last = join(tmp_path, url, "echo 'timeout waiting for Tailscale service'").splitlines()
    assert shown == f"cannot reach {url}: Connection refused"
    assert last == "fix: start the control server, let the host reach it, or correct `network.login_server`"
