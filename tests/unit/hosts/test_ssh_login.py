"""Logins that began early: what they answer, what a connection that stays is worth, and what is left of one."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.sshd_server import Sshd, needs_sshd, running_sshd

from shoal.errors import AuthenticationFailed, ConnectionLost, HostKeyChanged, ShoalError, Unreachable
from shoal.hosts import ssh_login
from shoal.hosts.api import Result, Target
from shoal.hosts.host_keys import HostKeys
from shoal.hosts.ssh import SshConnector, SshHost
from shoal.hosts.ssh_login import Question, begin_login

pytestmark = needs_sshd


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture(autouse=True)
def runtime_directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as name:  # a socket's path is short
        monkeypatch.setenv("XDG_RUNTIME_DIR", name)
        yield


@pytest.fixture
def known_hosts(sshd: Sshd, tmp_path: Path) -> Path:
    path = tmp_path / "known hosts"
    path.write_text(f"node {sshd.host_key}\n")
    return path


@asynccontextmanager
async def logged_in(target: Target, known_hosts: Path, *questions: Question) -> AsyncIterator[SshHost]:
    begin_login(target, HostKeys(known_hosts), questions)
    async with await SshConnector(known_hosts).connect(target) as host:
        assert isinstance(host, SshHost)
        yield host


async def test_questions_are_answered_by_the_login_and_once(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    count = tmp_path / "count"
    command = ("sh", "-c", f"echo x >> {count}; wc -l < {count}; printf 'no newline'")
    failing = ("sh", "-c", "echo failed >&2; exit 3")
    questions = Question(command, root=False), Question(failing, root=False)
    async with logged_in(sshd.target("node"), known_hosts, *questions) as host:
        assert (await host.run(command, root=False)).stdout == b"1\nno newline"
        assert (await host.run(command, root=False)).stdout == b"2\nno newline"
        result = await host.run(failing, root=False)
        assert (result.status, result.stderr) == (3, b"failed\n"), "one that failed is run again, with its words"


async def test_failure_of_a_question_may_be_its_answer(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    command = ("sh", "-c", f"echo x >> {tmp_path}/count; cat {tmp_path}/count; exit 4")
    question = Question(command, root=False, may_fail=True)
    async with logged_in(sshd.target("node"), known_hosts, question) as host:
        assert await host.run(command, root=False) == Result(4, b"x\n")


async def test_answer_as_root_is_not_given_to_who_asks_as_the_user(sshd: Sshd, known_hosts: Path) -> None:
    async with logged_in(sshd.target("node"), known_hosts, Question(("echo", "root's"))) as host:
        assert host._login.take_answer(Question(("echo", "root's"), root=False)) is None
        assert host._login.take_answer(Question(("echo", "root's"))) is not None


async def test_key_of_the_provider_counts_without_a_file(sshd: Sshd, tmp_path: Path) -> None:
    async with logged_in(sshd.target("node", host_key=sshd.host_key), tmp_path / "none"):
        pass


@cases(
    "change, error",
    ({"host_key": "ssh-ed25519 AAAA"}, HostKeyChanged),
    ({"port": 1}, Unreachable),
    ({"user": "nobody-here"}, AuthenticationFailed),
)
async def test_login_that_fails_is_explained(
    sshd: Sshd, known_hosts: Path, change: dict[str, object], error: type[ShoalError]
) -> None:
    target = sshd.target("node", **change)
    with pytest.raises(error):
        async with logged_in(target, known_hosts):
            pass


async def test_host_is_met_for_the_first_time(sshd: Sshd, tmp_path: Path) -> None:
    async with logged_in(sshd.target("node"), tmp_path / "none") as host:
        assert (await host.run(["echo", "hello"], root=False)).stdout == b"hello\n"
    assert HostKeys(tmp_path / "none").find("node") is not None


@cases("programs", (), ("sh",))
async def test_missing_ssh_is_named(
    sshd: Sshd, known_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, programs: tuple[str, ...]
) -> None:
    for name in programs:
        (tmp_path / name).symlink_to(shutil.which(name) or "")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ShoalError, match="this machine has no ssh command") as caught:
        async with logged_in(sshd.target("node"), known_hosts):
            pass
    assert "openssh-client" in caught.value.hint


async def test_lost_connection_is_named(sshd: Sshd, known_hosts: Path) -> None:
    async with logged_in(sshd.target("node"), known_hosts) as host:
        end_connection(host)
        with pytest.raises(ConnectionLost, match="node: the connection broke while it ran `true`"):
            await host.run(["true"], root=False)


async def test_next_command_needs_no_login(sshd: Sshd, known_hosts: Path) -> None:
    target = sshd.target("node")
    ports = [await client_port(target, known_hosts) for _ in range(2)]
    assert ports[0] == ports[1], "both went over one connection"


async def test_commands_at_the_same_time_have_each_a_connection(sshd: Sshd, known_hosts: Path) -> None:
    target = sshd.target("node")
    async with logged_in(target, known_hosts) as host:
        port = (await host.run(SHOW_PORT, root=False)).stdout
        assert await client_port(target, known_hosts) != port
    assert await client_port(target, known_hosts) == port


async def test_connection_that_was_lost_between_commands_is_made_anew(sshd: Sshd, known_hosts: Path) -> None:
    target = sshd.target("node")
    async with logged_in(target, known_hosts) as host:
        port = (await host.run(SHOW_PORT, root=False)).stdout
    end_connection(host)
    assert await client_port(target, known_hosts) != port


@cases("squat", "open", "link", "file")
async def test_directory_that_others_can_write_is_not_used(
    sshd: Sshd, known_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, squat: str
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    place = tmp_path / f"shoal-connections-{os.geteuid()}"
    if squat == "open":
        place.mkdir()
        place.chmod(0o777)
    elif squat == "link":
        (tmp_path / "elsewhere").mkdir(mode=0o700)
        place.symlink_to("elsewhere")
    else:
        place.write_text("")
    target = sshd.target("node")
    assert await client_port(target, known_hosts) != await client_port(target, known_hosts)
    assert not place.is_dir() or not list(place.iterdir())


SHOW_PORT = ("sh", "-c", "echo $SSH_CONNECTION")


async def client_port(target: Target, known_hosts: Path) -> bytes:
    """The connection that a command of its own goes over."""
    async with logged_in(target, known_hosts) as host:
        return (await host.run(SHOW_PORT, root=False)).stdout


def end_connection(host: SshHost) -> None:
    """As when the host is switched off."""
    subprocess.run(["ssh", "-O", "exit", "-S", host._login.socket, "node"], check=True, capture_output=True)


async def test_login_that_nobody_takes_ends(sshd: Sshd, known_hosts: Path) -> None:
    target = Target("node", "127.0.0.1", sshd.port, None, sshd.identity)
    begin_login(target, HostKeys(known_hosts))
    login = ssh_login.take_login(target, known_hosts)
    assert login is not None
    login.close()
    assert login._process.poll() is not None


KILLED = """\
import os, pathlib, sys, tempfile, time
from shoal.hosts import ssh_login, ssh_route
from shoal.hosts.api import Target
from shoal.hosts.host_keys import HostKeys
ssh_route._directories.append(tempfile.mkdtemp(prefix="shoal-ssh-", dir=sys.argv[1]))
ssh_login.KEEP_S = 0
target = Target("node", "127.0.0.1", int(sys.argv[2]), None, pathlib.Path(sys.argv[3]))
ssh_login.begin_login(target, HostKeys(pathlib.Path(sys.argv[4])))
while not list(pathlib.Path(sys.argv[1]).glob("shoal-ssh-*/0")):
    time.sleep(0.05)
os.kill(os.getpid(), 9)
"""


def test_killed_command_leaves_no_directory(sshd: Sshd, known_hosts: Path) -> None:
    with tempfile.TemporaryDirectory() as name:  # a socket's path is short
        place = Path(name)
        arguments = (name, str(sshd.port), str(sshd.identity), str(known_hosts))
        # Its exit is not looked for before the directory is gone: until then the killed process is a zombie.
        with subprocess.Popen([sys.executable, "-c", KILLED, *arguments]) as killed:
            for _ in range(1200):
                if is_zombie(killed.pid) and not list(place.iterdir()):
                    break
                time.sleep(0.05)
            assert list(place.iterdir()) == []
        assert killed.returncode == -signal.SIGKILL


def is_zombie(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
