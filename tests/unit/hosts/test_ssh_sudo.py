"""Becoming root over SSH, with a server whose sudo answers as the real one does."""

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.programs import stand_in
from tests.support.sshd_server import running_sshd

from shoal.errors import SudoDenied
from shoal.hosts import sudo
from shoal.hosts.api import Result, Target
from shoal.hosts.local import LocalHost
from shoal.hosts.ssh import SshConnector, SshHost

WILLING = """\
[ "$1" = -n ] && [ "$2" = -- ] || { echo "sudo: wrong arguments: $*" >&2; exit 1; }
shift 2
command -v "$1" >/dev/null || { echo "sudo: $1: command not found" >&2; exit 1; }
AS_ROOT=yes exec "$@"
"""
LINE = "echo 'ubuntu ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/90-shoal"


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A PATH with a few programs and, where a test puts one there, a sudo."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("env", "cat", "sh", "printenv", "true", "echo", "id"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return folder


@pytest.fixture
async def host(tmp_path: Path, programs: Path) -> AsyncIterator[SshHost]:
    """Logged in as `ubuntu`, which is not root."""
    with running_sshd(tmp_path / "sshd", environment=f"PATH={programs}") as server:
        async with await SshConnector(tmp_path / "known_hosts").connect(server.target("gpu01")) as host:
            assert isinstance(host, SshHost)
            host._user = "ubuntu"  # there may be no other account here
            yield host


async def test_commands_run_through_sudo_unless_not_as_root(host: SshHost, programs: Path) -> None:
    stand_in(programs / "sudo", WILLING)
    assert await host.run(["printenv", "AS_ROOT"]) == Result(0, b"yes\n")
    assert (await host.run(["printenv", "AS_ROOT"], root=False)).status == 1
    assert (await host.run(["echo", "a b", "$(x)"])).stdout == b"a b $(x)\n"
    assert (await host.run(["cat"], stdin=b"data")).stdout == b"data"
    assert (await host.run(["no-such-program"])).status == 127
    failed = await host.run(["sh", "-c", "echo no >&2; exit 1"])
    assert failed == Result(1, b"", b"no\n"), "it was not denied"


REFUSALS = [
    ("sudo: a password is required", "sudo asks for a password"),
    ("sudo: interactive authentication is required", "sudo asks for a password"),
    ("sudo: sorry, you must have a tty to run sudo", "sudo asks for a password"),
    ("ubuntu is not in the sudoers file.", "sudo says: ubuntu is not in the sudoers file."),
    ("Sorry, user ubuntu may not run sudo on gpu01.", "sudo says: Sorry, user ubuntu may not run sudo on gpu01."),
    (
        "Sorry, user ubuntu is not allowed to execute '/bin/true' as root on gpu01.",
        "sudo says: Sorry, user ubuntu is not allowed to execute '/bin/true' as root on gpu01.",
    ),
]


@cases("says, told", *REFUSALS)
async def test_denial_has_the_cause_and_the_sudoers_line(host: SshHost, programs: Path, says: str, told: str) -> None:
    stand_in(programs / "sudo", f'echo "{says}" >&2\nexit 1')
    with pytest.raises(SudoDenied) as caught:
        await host.run(["true"], stdin=bytes(100_000))
    assert caught.value.message == f"gpu01: ubuntu may not become root: {told}" and LINE in caught.value.hint


async def test_denial_is_raised_from_an_open_process(host: SshHost, programs: Path) -> None:
    stand_in(programs / "sudo", 'echo "sudo: a password is required" >&2\nexit 1')
    process = await host.start(["cat"])
    await process.write(b"hello\n")
    with pytest.raises(SudoDenied):
        await process.wait()
    process = await host.start(["sh", "-c", "echo hello"])
    await process.write(b"x\n")
    reading, ended = asyncio.create_task(process.readline()), asyncio.create_task(process.wait())
    results = await asyncio.gather(reading, ended, return_exceptions=True)
    assert [type(result) for result in results] == [SudoDenied, SudoDenied]


async def test_host_without_sudo_is_reported(host: SshHost) -> None:
    with pytest.raises(SudoDenied) as caught:
        await host.run(["true"])
    assert caught.value.message == "gpu01: ubuntu is not root and there is no usable sudo on the host"
    assert caught.value.hint.startswith("install sudo on gpu01 and allow ubuntu to use it")


async def test_local_host_uses_sudo_without_root(programs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(programs / "sudo", WILLING)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    host = LocalHost(Target("here"), through_sudo=True)
    assert (await host.run(["printenv", "AS_ROOT"])).text == "yes\n"
    assert (await host.run(["printenv", "AS_ROOT"], root=False)).status == 1


def test_denial_quotes_the_relevant_line() -> None:
    result = Result(1, b"", b"sudo: unable to resolve host gpu01\nubuntu is not in the sudoers file.\nreported\n")
    with pytest.raises(SudoDenied, match=r"sudo says: ubuntu is not in the sudoers file\.\n"):
        sudo.check_sudo_result("gpu01", "ubuntu", ["true"], result)


def test_command_with_output_was_not_denied() -> None:
    result = Result(1, b"output", b"sudo: a password is required\n")
    assert sudo.check_sudo_result("gpu01", "ubuntu", ["make", "install"], result) is result
