"""The program that joins a tailnet: which key it passes, and which cause and fix it prints."""

import functools
import http.server
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.programs import stand_in
from tests.support.web import serving

from shoal.remote import program_text


@pytest.fixture
def server() -> Iterator[str]:
    """A control server that answers every request with an error."""
    with serving(http.server.BaseHTTPRequestHandler) as url:
        yield url


def join(tmp_path: Path, server: str, script: str, key: str = "tskey-auth-abc", ephemeral: str = "false") -> str:
    """Run the program with a stand-in for `tailscale`. It fails, and the key file is removed."""
    program = stand_in(tmp_path / "bin/tailscale", f"{script}\nexit 3")
    file = tmp_path / "key"
    file.touch(0o600)
    file.write_text(key)
    options = (server, str(file), ephemeral, "--hostname=lab-n1")
    line = [sys.executable, "-c", program_text("tailnet_join"), *options]
    done = subprocess.run(line, env={"PATH": f"{program.parent}:/usr/bin:/bin"}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr == "", done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["bin"], "the key is removed although the host did not join"
    return done.stdout


@cases(
    "key, ephemeral, used",
    ("tskey-auth-abc", "true", "tskey-auth-abc"),
    ("tskey-client-abc", "false", "tskey-client-abc?ephemeral=false&preauthorized=true"),
    ("tskey-client-abc", "true", "tskey-client-abc?ephemeral=true&preauthorized=true"),
    ("tskey-client-abc?ephemeral=true", "false", "tskey-client-abc?ephemeral=true"),
    ("8a7b6c", "true", "8a7b6c"),
)
def test_secret_of_an_oauth_client_gets_options(
    tmp_path: Path, server: str, key: str, ephemeral: str, used: str
) -> None:
    script = 'printf "%s\\n" "$@"; file=${2#--auth-key=file:}\nstat -c %a "$file"; cat "$file"'
    *words, mode, secret, _ = join(tmp_path, server, script, key, ephemeral).splitlines()
    assert words == ["up", f"--auth-key=file:{tmp_path}/key", "--hostname=lab-n1", "--timeout=60s"]
    assert (mode, secret) == ("600", used)


@cases(
    "text, fix",
    ("backend error: authkey already used", "this one is for a single host"),
    ("backend error: authkey expired", "this one has expired or was revoked"),
    ("requested tags [tag:x] are invalid or not permitted", "`tagOwners`"),
    ("backend error: invalid pre auth key", "which does not know this one"),
    ("invalid key: unable to validate API key", "which does not know this one"),
    ("something else", "or log the host in by hand"),
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


KEYRING_NAME = "tailscale-archive-keyring.gpg"


def add_source(tmp_path: Path, address: str, updates: str = "exit 0") -> subprocess.CompletedProcess[str]:
    """Run the program with a stand-in for `apt-get`."""
    program = stand_in(tmp_path / "bin/apt-get", f'echo "$@" >> {tmp_path}/apt\n{updates}')
    paths = (str(tmp_path / "keyrings" / KEYRING_NAME), str(tmp_path / "sources/tailscale.list"))
    line = [sys.executable, "-c", program_text("tailnet_join"), "--source", address, *paths]
    return subprocess.run(line, env={"PATH": f"{program.parent}:/usr/bin:/bin"}, capture_output=True, text=True)


@pytest.fixture
def packages(tmp_path: Path) -> Iterator[str]:
    """Key and list of a release, as Tailscale serves them; the address of the release."""
    served = tmp_path / "served"
    served.mkdir()
    (served / "noble.noarmor.gpg").write_bytes(b"\x99\x01key")
    line = f"deb [signed-by={tmp_path}/keyrings/{KEYRING_NAME}] https://pkgs.tailscale.com/stable/ubuntu noble main\n"
    (served / "noble.tailscale-keyring.list").write_text(f"# Tailscale packages for ubuntu noble\n{line}")

    with serving(functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(served))) as url:
        yield f"{url}/noble"


@cases("updates", "exit 0", "exit 100")
def test_package_source_is_added_with_its_key(tmp_path: Path, packages: str, updates: str) -> None:
    done = add_source(tmp_path, packages, updates)
    assert done.returncode == 0, done.stdout + done.stderr
    key, source = tmp_path / "keyrings" / KEYRING_NAME, tmp_path / "sources/tailscale.list"
    assert key.read_bytes() == b"\x99\x01key" and "ubuntu noble main" in source.read_text()
    assert {path.stat().st_mode & 0o777 for path in (key, source)} == {0o644}
    assert (tmp_path / "apt").read_text() == "-q update\n"


def test_unreachable_or_wrong_package_source_prints_the_commands_and_writes_nothing(
    tmp_path: Path, packages: str
) -> None:
    missing = packages.replace("noble", "oracular")
    done = add_source(tmp_path, missing)
    assert done.returncode == 1 and f"cannot fetch {missing}.noarmor.gpg: " in done.stdout
    keyring, source = tmp_path / "keyrings" / KEYRING_NAME, tmp_path / "sources/tailscale.list"
    assert done.stdout.splitlines()[-1] == (
        f"fix: let the host reach it, or run there as root: curl -fsSL {missing}.noarmor.gpg -o {keyring} && "
        f"curl -fsSL {missing}.tailscale-keyring.list -o {source} && apt-get update"
    )
    (tmp_path / "served/noble.tailscale-keyring.list").write_text("<html>log in to the hotel's network</html>")
    done = add_source(tmp_path, packages)
    assert done.returncode == 1 and "is no package source that is signed by" in done.stdout
    assert not source.exists() and not keyring.exists()


def test_answer_to_the_key_of_a_run_before_is_not_taken_for_this_one(tmp_path: Path, server: str) -> None:
    note = tmp_path / "bin/asked"
    answers = "[ -e {0} ] && echo 'backend error: invalid key' || echo 'backend error: authkey expired'; touch {0}"
    text = join(tmp_path, server, answers.format(note))
    assert text.startswith("backend error: invalid key\nfix: ") and server in text
