"""Connecting over SSH to a real sshd: keys, config, host keys, jump hosts, and every way it can fail."""

# ruff: noqa: ASYNC110, ASYNC220, ASYNC221, ASYNC240
# A test has nothing else to do while it looks at a file or waits for ssh-keygen.

import asyncio
import contextlib
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.sshd_server import Sshd, free_port, lock_key, make_key, needs_sshd, running_sshd

from shoal.errors import AuthenticationFailed, CommandTimeout, ConnectionLost, HostError, HostKeyChanged, Unreachable
from shoal.hosts.api import Target
from shoal.hosts.fanout import fan_out
from shoal.hosts.host_keys import HostKey, HostKeys
from shoal.hosts.ssh import SshConnector
from shoal.hosts.ssh_route import SshOptions

pytestmark = needs_sshd


KILL_SERVER = "kill -9 $(ps -o ppid= -p $PPID)"
"""Ends the server of the connection that a program of ours runs over."""


@pytest.fixture(scope="module")
def sshd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sshd]:
    with running_sshd(tmp_path_factory.mktemp("sshd")) as server:
        yield server


@pytest.fixture
def known_hosts(tmp_path: Path) -> Path:
    return tmp_path / "cluster" / "known_hosts"


@pytest.fixture
def no_config(tmp_path: Path) -> Path:
    path = tmp_path / "no_config"
    path.touch()
    return path


def ssh(known_hosts: Path, **options: Any) -> SshConnector:
    return SshConnector(known_hosts, SshOptions(**options))


async def whoami(connector: SshConnector, target: Target) -> str:
    async with await connector.connect(target) as host:
        return (await host.run(["hostname"], root=False)).text


async def test_first_host_key_is_stored_with_mode_600(sshd: Sshd, known_hosts: Path) -> None:
    await whoami(SshConnector(known_hosts), sshd.target("gpu01"))
    kind, text = sshd.host_key.split()[:2]
    assert known_hosts.read_text() == f"gpu01,[127.0.0.1]:{sshd.port} {kind} {text}\n"
    assert stat.S_IMODE(known_hosts.stat().st_mode) == 0o600
    assert stat.S_IMODE(known_hosts.parent.stat().st_mode) == 0o700


async def test_known_hosts_file_is_readable_by_openssh(sshd: Sshd, known_hosts: Path) -> None:
    await whoami(SshConnector(known_hosts), sshd.target("gpu01"))
    found = subprocess.run(["ssh-keygen", "-F", "gpu01", "-f", str(known_hosts)], capture_output=True, check=True)
    assert sshd.host_key.split()[1].encode() in found.stdout


async def test_eight_concurrent_first_connections_store_eight_keys(sshd: Sshd, known_hosts: Path) -> None:
    connector = SshConnector(known_hosts)
    targets = [sshd.target(f"n{number}") for number in range(8)]
    outcomes = await fan_out(targets, lambda target: whoami(connector, target))
    assert [outcome.error for outcome in outcomes.values()] == [None] * 8
    assert {line.split(",")[0] for line in known_hosts.read_text().splitlines()} == {f"n{n}" for n in range(8)}


async def test_changed_host_key_is_rejected_until_forgotten(tmp_path: Path, known_hosts: Path) -> None:
    server = Sshd(tmp_path / "sshd")
    server.start()
    try:
        await whoami(SshConnector(known_hosts), server.target("gpu01"))
        old = HostKey.parse(server.host_key).fingerprint
        server.stop()
        server.new_host_key()
        new = HostKey.parse(server.host_key).fingerprint
        server.start()
        with pytest.raises(HostKeyChanged) as caught:
            await whoami(SshConnector(known_hosts), server.target("gpu01"))
        assert caught.value.message == (
            f"gpu01: shows the ssh-ed25519 key {new}, not the ssh-ed25519 key {old} recorded first"
        )
        assert "shoal ssh --forget-key gpu01" in caught.value.hint and HostKeys(known_hosts).forget("gpu01")
        assert not HostKeys(known_hosts).forget("gpu01")
        await whoami(SshConnector(known_hosts), server.target("gpu01"))
    finally:
        server.stop()


async def test_stored_key_is_requested_from_a_host_with_several_keys(tmp_path: Path, known_hosts: Path) -> None:
    with running_sshd(tmp_path / "rsa", host_key_type="ssh-rsa") as server:
        await whoami(SshConnector(known_hosts), server.target("gpu01"))
        server.stop()
        make_key(server.folder / "second")
        server.host_keys.insert(0, server.folder / "second")
        server.start()
        await whoami(SshConnector(known_hosts), server.target("gpu01"))


async def test_pinned_key_replaces_the_stored_key(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "former")
    former = (tmp_path / "former.pub").read_text().strip()
    known_hosts.parent.mkdir(mode=0o700)
    known_hosts.write_text(f"gpu01,[10.0.0.9]:22 {former}\n")
    await whoami(SshConnector(known_hosts), sshd.target("gpu01", host_key=sshd.host_key))
    assert former not in known_hosts.read_text()
    await whoami(SshConnector(known_hosts), sshd.target("gpu01"))


async def test_host_without_its_pinned_key_is_rejected(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    make_key(tmp_path / "other")
    pinned = (tmp_path / "other.pub").read_text()
    with pytest.raises(HostKeyChanged, match="its provider reported"):
        await SshConnector(known_hosts).connect(sshd.target(host_key=pinned))
    assert not known_hosts.exists()
    with pytest.raises(HostError, match="the host key given for it is not a public key"):
        await SshConnector(known_hosts).connect(sshd.target(host_key="ssh-ed25519 ???"))


async def test_rejected_key_is_reported_with_user_and_tried_keys(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    stranger = tmp_path / "stranger"
    make_key(stranger)
    with pytest.raises(AuthenticationFailed) as caught:
        await SshConnector(known_hosts).connect(sshd.target("gpu01", user="root", identity=stranger))
    place = f"root@127.0.0.1:{sshd.port}"
    assert caught.value.message == f"gpu01: authentication failed for {place} (tried {stranger})"
    assert caught.value.hint.startswith(f"put your public key there: ssh-copy-id -p {sshd.port} root@127.0.0.1")


@cases(
    "make, found",
    (lambda path: None, "does not exist"),
    (lambda path: path.mkdir(0o700), "cannot be read: Is a directory"),
    (lambda path: (path.write_text("hello"), path.chmod(0o600)), "is not a private key"),
    (lambda path: (make_key(path), path.chmod(0o644)), "can be read by others"),
    (lambda path: (make_key(path), lock_key(path)), "is protected by a passphrase and no ssh-agent has it"),
)
async def test_unusable_identity_is_named(
    sshd: Sshd, known_hosts: Path, tmp_path: Path, make: object, found: str
) -> None:
    identity = tmp_path / "identity"
    make(identity)  # type: ignore[operator]
    if (public := tmp_path / "identity.pub").exists():  # the host would let it in
        with (sshd.folder / "authorized_keys").open("a") as authorized:
            authorized.write(public.read_text())
    with pytest.raises(AuthenticationFailed) as caught:
        await ssh(known_hosts, agent=False).connect(sshd.target("gpu01", identity=identity))
    assert caught.value.message.startswith(f"gpu01: the key {identity} {found}") and caught.value.hint


async def test_ssh_agent_signs_for_a_key_with_a_passphrase(
    sshd: Sshd, known_hosts: Path, tmp_path: Path, no_config: Path
) -> None:
    sock = tmp_path / "agent.sock"
    agent = subprocess.Popen(["ssh-agent", "-D", "-a", str(sock)], stdout=subprocess.DEVNULL)
    try:
        while not sock.exists():
            await asyncio.sleep(0.02)
        subprocess.run(["ssh-add", "-q", str(sshd.identity)], env=os.environ | {"SSH_AUTH_SOCK": str(sock)}, check=True)
        config = tmp_path / "config"
        config.write_text(f"Host *\n IdentityAgent {sock}\n")
        locked = tmp_path / "locked"
        locked.write_bytes(sshd.identity.read_bytes())
        lock_key(locked)
        await whoami(ssh(known_hosts, config=config), sshd.target(identity=locked))
        # Any key of the agent will do where no identity is named.
        await whoami(ssh(known_hosts, config=config), sshd.target(identity=None))
    finally:
        agent.terminate()
        agent.wait()


async def test_key_skipped_for_its_passphrase_is_named(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    locked, config = tmp_path / "locked", tmp_path / "config"
    locked.write_bytes(sshd.identity.read_bytes())
    lock_key(locked)
    config.write_text(f"Host *\n IdentityFile {locked}\n")
    with pytest.raises(AuthenticationFailed) as caught:
        await ssh(known_hosts, config=config, agent=False).connect(sshd.target(identity=None))
    assert caught.value.message.endswith(f"(tried not {locked}: it is protected by a passphrase)")


async def test_alias_is_resolved_in_the_ssh_config(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    config, user = tmp_path / "config", sshd.target().user
    config.write_text(
        f"Host gpu*\n HostName 127.0.0.1\n Port {sshd.port}\n User {user}\n IdentityFile {sshd.identity}\n"
    )
    assert await whoami(ssh(known_hosts, config=config), Target("gpu07"))
    assert known_hosts.read_text().startswith(f"gpu07,[127.0.0.1]:{sshd.port} ")


@cases(
    "text, found",
    ("Host gpu01\n Port many\n", "line 2: Bad port 'many'"),
    ("Host gpu01\n Port\n", "cannot understand the SSH config"),
    ('Host "gpu01\n', "cannot understand the SSH config"),
    ("Host gpu01\n ProxyJump user@:x\n", 'line 2: Invalid ProxyJump "user@:x"'),
    ("Host gpu01\n ProxyCommand nc 'a\n", "line 2: invalid quotes"),
)
async def test_invalid_ssh_config_is_reported_with_its_path(
    known_hosts: Path, tmp_path: Path, text: str, found: str
) -> None:
    config = tmp_path / "config"
    config.write_text(text)
    with pytest.raises(HostError) as caught:
        await ssh(known_hosts, config=config).connect(Target("gpu01"))
    assert found in caught.value.message and caught.value.hint


async def test_settings_for_a_person_do_not_disturb(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    config = tmp_path / "config"
    config.write_text(
        "Host *\n ForwardAgent yes\n NoHostAuthenticationForLocalhost yes\n RemoteCommand top\n RequestTTY force\n"
        f" LocalForward {free_port()} 127.0.0.1:1\n ControlMaster auto\n ControlPath {tmp_path}/%C\n LogLevel QUIET\n"
        " PermitLocalCommand yes\n LocalCommand touch /nowhere/at-all\n HashKnownHosts yes\n"
    )
    place = known_hosts.parent / "100%h" / "known_hosts"
    async with await ssh(place, config=config).connect(sshd.target("gpu01")) as host:
        assert (await host.run(["sh", "-c", 'echo "$SSH_AUTH_SOCK"; tty'], root=False)).text == "\nnot a tty\n"
    assert place.read_text().startswith("gpu01,")


async def test_config_that_brings_host_keys_does_not_replace_the_known_one(
    sshd: Sshd, known_hosts: Path, tmp_path: Path
) -> None:
    make_key(tmp_path / "former")
    former, config = (tmp_path / "former.pub").read_text().strip(), tmp_path / "config"
    known_hosts.parent.mkdir(mode=0o700)
    known_hosts.write_text(f"gpu01,[127.0.0.1]:{sshd.port} {former}\n")
    config.write_text(
        f"Host *\n KnownHostsCommand /bin/echo gpu01 {sshd.host_key}\n StdinNull yes\n SessionType none\n"
    )
    connector = ssh(known_hosts, config=config)
    with pytest.raises(HostKeyChanged):
        await connector.connect(sshd.target("gpu01"))
    assert await whoami(connector, sshd.target("gpu02"))
    assert HostKeys(known_hosts).find("gpu02") == HostKey.parse(sshd.host_key)


async def test_programs_are_killed_when_all_sessions_are_used(sshd: Sshd, known_hosts: Path) -> None:
    async with await SshConnector(known_hosts).connect(sshd.target("gpu01")) as host:
        started = [await host.start(["sh", "-c", "echo $$; exec sleep 3602"], root=False) for _ in range(6)]
        pids = [int(await process.readline()) for process in started]
    for _ in range(1200):
        if not any(_runs(pid) for pid in pids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still running: {pids}")


@cases("greeting", "printf hi", "echo hello")
async def test_words_of_a_login_shell_do_not_matter(known_hosts: Path, tmp_path: Path, greeting: str) -> None:
    with running_sshd(tmp_path / "sshd") as server:
        authorized = server.folder / "authorized_keys"
        command = f'command="{greeting}; sh -c \\"$SSH_ORIGINAL_COMMAND\\"" '
        authorized.write_text(command + authorized.read_text())
        async with await SshConnector(known_hosts).connect(server.target("gpu01")) as host:
            assert (await host.run(["true"], root=False)).status == 0


async def test_hosts_behind_a_jump_host_share_its_connection(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        config, user = tmp_path / "config", sshd.target().user
        config.write_text(
            f"Host gpu*\n HostName 127.0.0.1\n Port {sshd.port}\n IdentityFile {sshd.identity}\n ProxyJump door\n"
            f"Host door\n HostName 127.0.0.1\n Port {jump.port}\n IdentityFile {jump.identity}\nHost *\n User {user}\n"
        )
        connector = ssh(known_hosts, config=config)
        outcomes = await fan_out([Target("gpu1"), Target("gpu2")], lambda target: whoami(connector, target))
        assert [outcome.error for outcome in outcomes.values()] == [None, None]
        assert {line.split(",")[0] for line in known_hosts.read_text().splitlines()} == {"gpu1", "gpu2"}
        assert jump.host_key in known_hosts.with_name("known_hosts.jumps").read_text()
        assert (jump.folder / "log").read_text().count("Accepted publickey") == 1
        assert await whoami(connector, Target("gpu1"))


async def test_unreachable_target_differs_from_unreachable_jump_host(known_hosts: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        config = tmp_path / "config"
        config.write_text(
            f"Host gpu1\n HostName 127.0.0.1\n Port {free_port()}\n ProxyJump door\n"
            f"Host door\n HostName 127.0.0.1\n Port {jump.port}\nHost *\n IdentityFile {jump.identity}\n"
        )
        jump.stop()
        with pytest.raises(Unreachable, match=r"door: 127\.0\.0\.1:\d+ refused the connection"):
            await ssh(known_hosts, config=config).connect(Target("gpu1"))
        jump.start()
        with pytest.raises(Unreachable, match=r"gpu1: door cannot reach 127\.0\.0\.1:\d+"):
            await ssh(known_hosts, config=config).connect(Target("gpu1"))


async def test_rejected_key_and_changed_host_key_of_a_jump_host_are_its_own(known_hosts: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "jump") as jump:
        config, stranger = tmp_path / "config", tmp_path / "stranger"
        make_key(stranger)
        config.write_text(
            f"Host gpu1\n HostName 127.0.0.1\n Port {free_port()}\n ProxyJump door\n"
            f"Host door\n HostName 127.0.0.1\n Port {jump.port}\nHost *\n IdentityFile {stranger}\n"
        )
        with pytest.raises(AuthenticationFailed, match=rf"^door: authentication failed for .*\(tried {stranger}\)"):
            await ssh(known_hosts, config=config).connect(Target("gpu1"))
        jump.stop()
        jump.new_host_key()
        jump.start()
        with pytest.raises(HostKeyChanged, match=r"^door: shows the ssh-ed25519 key SHA256:.* not the one recorded"):
            await ssh(known_hosts, config=config).connect(Target("gpu1"))


RELAY = """
import os, socket, sys, threading
link = socket.create_connection((sys.argv[1], int(sys.argv[2])))
with open(sys.argv[3], "a") as log:
    log.write(" ".join(sys.argv[1:3]) + "\\n")
def back():
    while data := link.recv(65536):
        print("data", file=sys.stderr, flush=True)
        os.write(1, data)
    os._exit(0)
threading.Thread(target=back).start()
while data := os.read(0, 65536):
    link.sendall(data)
link.shutdown(socket.SHUT_WR)
"""


def proxied(sshd: Sshd, folder: Path, command: str) -> Path:
    """An SSH config in which every host is reached by a ProxyCommand."""
    (folder / "relay.py").write_text(RELAY)
    config = folder / "config"
    config.write_text(
        f"Host gpu*\n HostName 127.0.0.1\n Port {sshd.port}\n User {sshd.target().user}\n"
        f" IdentityFile {sshd.identity}\n ProxyCommand {command}\n"
    )
    return config


async def test_proxy_command_reaches_the_hosts(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    config = proxied(sshd, tmp_path, f"{sys.executable} {tmp_path}/relay.py %h %p {tmp_path}/used")
    connector = ssh(known_hosts, config=config)
    outcomes = await fan_out([Target("gpu1"), Target("gpu2")], lambda target: whoami(connector, target))
    assert [outcome.error for outcome in outcomes.values()] == [None, None]
    assert (tmp_path / "used").read_text() == f"127.0.0.1 {sshd.port}\n" * 2
    assert {line.split(",")[0] for line in known_hosts.read_text().splitlines()} == {"gpu1", "gpu2"}


async def test_proxy_command_runs_in_the_shell_of_the_user(
    sshd: Sshd, known_hosts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As OpenSSH has it: redirections, `~` and variables mean what they mean to the shell."""
    monkeypatch.setenv("HOME", str(tmp_path))
    command = f'{sys.executable} ~/relay.py %h %p "$HOME/used here" 2>/dev/null'
    for shell in ("/bin/sh", "/bin/bash", ""):
        monkeypatch.setenv("SHELL", shell)
        connector = ssh(known_hosts, config=proxied(sshd, tmp_path, command))
        assert await whoami(connector, Target("gpu1"))
    assert (tmp_path / "used here").read_text() == f"127.0.0.1 {sshd.port}\n" * 3


async def test_none_disables_a_proxy(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    config = proxied(sshd, tmp_path, "false")
    for setting in ("ProxyCommand", "ProxyJump"):
        (tmp_path / "direct").write_text(f"Host gpu1\n {setting} none\n" + config.read_text().replace("false", "none"))
        assert await whoami(ssh(known_hosts, config=tmp_path / "direct"), Target("gpu1"))


async def test_openssh_can_be_the_proxy_command(sshd: Sshd, known_hosts: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "door") as door:
        options = f"-F none -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -i {door.identity}"
        place = f"-p {door.port} {door.target().user}@127.0.0.1"
        config = proxied(sshd, tmp_path, f"ssh -q {options} -W %h:%p {place}")
        async with await ssh(known_hosts, config=config).connect(Target("gpu1")) as host:
            assert (await host.run(["sh", "-c", "exit 7"], root=False)).status == 7
        assert (door.folder / "log").read_text().count("Accepted publickey") == 1


@pytest.fixture
def plain_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHELL", "/bin/sh")


@pytest.mark.usefixtures("plain_shell")
@cases(
    "command, seconds, found",
    ("sh -c 'exit 3'", 60, "`sh` ended before the login"),
    ("sh -c 'echo no such tunnel >&2; exit 3'", 60, "`sh` ended before the login: no such tunnel"),
    ("/no/such %h", 60, "`/no/such` ended before the login: /bin/sh: 1: exec: /no/such: not found"),
    ("sleep 61", 0.5, "`sleep` did not lead to 127.0.0.1:{port} within 0.5 s"),
)
async def test_failed_proxy_command_is_reported(
    sshd: Sshd, known_hosts: Path, tmp_path: Path, command: str, seconds: float, found: str
) -> None:
    config = proxied(sshd, tmp_path, command)
    with pytest.raises(Unreachable) as caught:
        await ssh(known_hosts, config=config, timeout=seconds).connect(Target("gpu1"))
    assert str(caught.value) == (
        f"gpu1: its ProxyCommand {found.format(port=sshd.port)}\n"
        "  fix: correct ProxyCommand for gpu1 in ~/.ssh/config; compare with: ssh -v gpu1"
    )


async def test_unresolvable_name_is_reported(known_hosts: Path, no_config: Path) -> None:
    with pytest.raises(Unreachable, match=r"no address is known for 'no-such-host\.invalid'"):
        await ssh(known_hosts, config=no_config).connect(Target("no-such-host.invalid"))


async def test_closed_port_is_reported(known_hosts: Path, no_config: Path) -> None:
    port = free_port()
    with pytest.raises(Unreachable, match=rf"gpu01: 127\.0\.0\.1:{port} refused the connection"):
        await ssh(known_hosts, config=no_config).connect(Target("gpu01", "127.0.0.1", port))


async def test_silent_host_times_out(known_hosts: Path, no_config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target("gpu01", "127.0.0.1", silent.getsockname()[1])
        with pytest.raises(Unreachable, match=r"does not answer within 0\.3 s"):
            await ssh(known_hosts, config=no_config, timeout=0.3).connect(target)
        slow = replace(target, slowness=3)
        with pytest.raises(Unreachable, match=r"does not answer within 0\.6 s"):
            await ssh(known_hosts, config=no_config, timeout=0.2).connect(slow)


async def test_agent_that_does_not_answer_is_distinguished_from_a_silent_host(
    sshd: Sshd, known_hosts: Path, tmp_path: Path
) -> None:
    sock, config = tmp_path / "agent.sock", tmp_path / "config"
    config.write_text(f"Host *\n IdentityAgent {sock}\n")
    with socket.socket(socket.AF_UNIX) as agent:
        agent.bind(str(sock))
        agent.listen()
        with pytest.raises(Unreachable, match=r"answers, and the login did not end within 3 s") as caught:
            await ssh(known_hosts, config=config, timeout=3).connect(sshd.target("gpu01", identity=None))
    assert "ssh-agent" in caught.value.hint


async def test_account_without_a_shell_is_reported(known_hosts: Path, tmp_path: Path) -> None:
    with running_sshd(tmp_path / "sshd") as server:
        authorized = server.folder / "authorized_keys"
        authorized.write_text('command="echo This account is not available; exit 1" ' + authorized.read_text())
        with pytest.raises(Unreachable, match="runs no commands: This account is not available"):
            await ssh(known_hosts).connect(server.target("gpu01"))


async def test_hundred_hosts_are_connected_at_once(sshd: Sshd, known_hosts: Path) -> None:
    connector = SshConnector(known_hosts)
    targets = [sshd.target(f"n{number}") for number in range(100)]
    outcomes = await fan_out(targets, lambda target: whoami(connector, target))
    assert {str(outcome.error) for outcome in outcomes.values()} == {"None"}
    assert {len(HostKeys(known_hosts).path.read_text().splitlines()), len(outcomes)} == {100}


@cases(
    "greeting, found",
    (b"HTTP/1.1 400 Bad Request\r\n\r\n", "closed the connection before the login"),
    (b"SSH-1.5-ancient\r\n", "does not speak SSH"),
    (b"", "closed the connection before the login"),
)
async def test_port_without_ssh_is_reported(known_hosts: Path, no_config: Path, greeting: bytes, found: str) -> None:
    done = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        done.set()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(Unreachable, match=found):
            await ssh(known_hosts, config=no_config).connect(Target("gpu01", "127.0.0.1", port))
        await done.wait()


async def test_connection_killed_midway_is_lost(sshd: Sshd, known_hosts: Path) -> None:
    host = await SshConnector(known_hosts).connect(sshd.target("gpu01"))
    async with host:
        with pytest.raises(ConnectionLost, match="gpu01: the connection broke while it ran `sh`"):
            await host.run(["sh", "-c", f"{KILL_SERVER}; sleep 5"], root=False)
        with pytest.raises(ConnectionLost, match="gpu01: the connection broke while it ran `true`"):
            await host.run(["true"], root=False)


async def test_lines_before_a_loss_are_read_first(sshd: Sshd, known_hosts: Path) -> None:
    async with await SshConnector(known_hosts).connect(sshd.target("gpu01")) as host:
        process = await host.start(["sh", "-c", f"echo one; read x; {KILL_SERVER}; sleep 5"], root=False)
        assert await process.readline() == b"one\n"
        await process.write(b"go\n")
        with pytest.raises(ConnectionLost):
            await process.readline()
        with pytest.raises(ConnectionLost):
            await process.write(b"more\n")
        with pytest.raises(ConnectionLost):
            await process.wait()


async def test_silent_connection_is_lost_after_keepalive(sshd: Sshd, known_hosts: Path) -> None:
    async with _Relay(sshd.port) as relay:
        connector = ssh(known_hosts, keepalive=1)
        async with await connector.connect(sshd.target("gpu01", port=relay.port)) as host:
            process = await host.start(["sleep", "60"], root=False)
            relay.silent = True
            with pytest.raises(ConnectionLost, match="gpu01: the connection broke while it ran `sleep`"):
                await process.readline()


async def test_cancelled_connection_attempt_leaves_no_task(known_hosts: Path, no_config: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        target = Target("gpu01", "127.0.0.1", silent.getsockname()[1])
        attempt = asyncio.create_task(ssh(known_hosts, config=no_config).connect(target))
        await asyncio.sleep(0.1)
        attempt.cancel()
        with pytest.raises(asyncio.CancelledError):
            await attempt
    assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []


@cases("how", "timeout", "kill", "close")
async def test_stopped_program_ends_with_its_children(sshd: Sshd, known_hosts: Path, how: str) -> None:
    path, connector = known_hosts.with_name("pids"), SshConnector(known_hosts)
    script = f"sleep 3601 & echo $$ $! > {path}; echo; wait"
    async with await connector.connect(sshd.target("gpu01")) as host:
        if how == "timeout":
            with pytest.raises(CommandTimeout):
                await host.run(["sh", "-c", script], timeout=1, root=False)
        else:
            process = await host.start(["sh", "-c", script], root=False)
            await process.readline()
            await (process.kill() if how == "kill" else host.close())
    pids = path.read_text().split()
    assert len(pids) == 2
    for _ in range(1200):
        if not any(_runs(int(pid)) for pid in pids):
            return
        await asyncio.sleep(0.05)
    raise AssertionError(f"still running: {pids}")


def _runs(pid: int) -> bool:
    """Whether a process is alive; one that only waits to be reaped is not."""
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


INTERRUPTED = """
import asyncio, sys
from pathlib import Path
from shoal.hosts.api import Target
from shoal.hosts.fanout import fan_out
from shoal.hosts.ssh import SshConnector

async def main(known_hosts, port, user, identity):
    asyncio.get_running_loop().slow_callback_duration = 3600  # a busy machine is no noise of ours
    connector = SshConnector(Path(known_hosts))
    async def work(target):
        async with await connector.connect(target) as host:
            process = await host.start(["sh", "-c", "echo ready; sleep 3600"], root=False)
            print((await process.readline()).decode(), end="", flush=True)
            await process.readline()
    await fan_out([Target(f"n{n}", "127.0.0.1", int(port), user, Path(identity)) for n in range(4)], work)

try:
    asyncio.run(main(*sys.argv[1:]))
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


async def test_ctrl_c_ends_without_output(sshd: Sshd, known_hosts: Path) -> None:
    arguments = [str(known_hosts), str(sshd.port), str(sshd.target().user), str(sshd.identity)]
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-X", "dev", "-c", INTERRUPTED, *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and [await child.stdout.readline() for _ in range(4)] == [b"ready\n"] * 4
    child.send_signal(signal.SIGINT)
    out, err = await child.communicate()
    assert (out, err) == (b"interrupted\n", b"")


class _Relay:
    """Forwards TCP to a port until the test silences it, like a cut cable."""

    def __init__(self, to: int) -> None:
        self._to = to
        self.silent = False

    async def __aenter__(self) -> "_Relay":
        self._tasks: list[asyncio.Task[None]] = []
        self._writers: list[asyncio.StreamWriter] = []
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        for writer in self._writers:
            writer.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        self._writers += [writer, far_writer]
        self._tasks += [
            asyncio.create_task(self._pass(reader, far_writer)),
            asyncio.create_task(self._pass(far_reader, writer)),
        ]

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if not self.silent:
                writer.write(data)
