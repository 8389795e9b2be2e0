"""Hosts over OpenSSH's own client, for `shoal run`: it logs in while Python still loads, and asyncssh is not needed.

One `ssh` for each host logs in. Programs run over its connection, as OpenSSH's ControlMaster has it. The connection
stays for a minute after the command, so that the next one need not log in; commands at the same time have each their
own, because sshd allows few sessions a connection. Host keys, keys and config are those of `ssh.py`. What this cannot
do alone, such as to meet a host for the first time, `ssh.py` does, which also explains what is wrong.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import itertools
import os
import shlex
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path

from shoal.errors import ConnectionLost
from shoal.hosts import sudo
from shoal.hosts.api import Connector, Host, Result, Target
from shoal.hosts.local import LocalChannel
from shoal.hosts.process import LineHost, LineProcess, program_name, timeout_error

# The fastest first: OpenSSH's own choice takes 150 ms of CPU on either side. A server that has none of them is too old
# for the Slurm versions we drive.
ALGORITHMS = {
    "KexAlgorithms": [
        "curve25519-sha256",
        "curve25519-sha256@libssh.org",
        "ecdh-sha2-nistp256",
        "diffie-hellman-group14-sha256",
    ],
    "Ciphers": [
        "aes128-gcm@openssh.com",
        "aes256-gcm@openssh.com",
        "chacha20-poly1305@openssh.com",
        "aes128-ctr",
    ],
    "MACs": ["hmac-sha2-256-etm@openssh.com", "hmac-sha2-256"],
}
CONNECT_TIMEOUT_S = 5
"""After this the other client tries, with its own timeout."""
KEEPALIVE_S, KEEPALIVE_MISSED = 5, 3
KEEP_S = 60
"""How long a connection stays after the command, as with Ansible. With 0 it ends with the command."""
MAX_SESSIONS = 6
"""sshd allows ten sessions a connection, and ours for the login is one of them."""
LOST = 255
"""How `ssh` ends when the connection does."""
MAX_LINE_BYTES = 64 << 20
READY, ANSWER, END = "shoal-ready", "shoal-answer", "shoal-end"
_FIRST = f"""echo "{READY} $(id -un)"; as_root=; [ "$(id -u)" = 0 ] || as_root='{" ".join(sudo.as_root(()))}'"""
_ASK = f"echo {ANSWER}; {{command}} < /dev/null 2> /dev/null; status=$?; echo; echo {END} $status"
_STAY = "exec cat > /dev/null"
# A shell waits for the program: `ssh` reports one that a signal ended as a lost connection.
_REPORT_STATUS = ("sh", "-c", '"$@"; exit $?', "sh")
# `ssh` ends with our process, which removes the directory of the sockets, unless it was killed. A killed process may
# still be there as a zombie.
_REMOVE_DIRECTORY = (
    "sh",
    "-c",
    '"$@"; if ! kill -0 "$PPID" 2> /dev/null || grep -qs "^State:.Z" "/proc/$PPID/status"; then rm -rf "$0"; fi',
)

_logins: dict[tuple[Target, Path], _Login] = {}
"""Those that have begun and that no host uses yet."""


@dataclass(frozen=True)
class Question:
    """A program that will be run on a host in any case, and only reads."""

    argv: tuple[str, ...]
    root: bool = True
    may_fail: bool = field(default=False, compare=False)
    """Whether a failure is an answer, too. Otherwise the program is run again, for what it says about it."""


Answer = asyncio.Future[Result | None]
"""How a question's program ended; None where it is to be run again."""


def begin_login(target: Target, known_hosts: Path, questions: Sequence[Question] = ()) -> None:
    """Start to log in and to ask, for a `connect` and a `run` that will follow. Does nothing where `ssh` is missing."""
    key = (target, known_hosts)
    if key not in _logins and (target.host_key or known_hosts.exists()):
        with contextlib.suppress(OSError):
            _logins[key] = _Login(target, known_hosts, questions)


class OpenSshConnector:
    """Takes the logins that have begun. Other hosts, and those that fail, are for the connector that `make` returns."""

    def __init__(self, known_hosts: Path, make: Callable[[], Connector], *, may_sudo: bool = True) -> None:
        self._known_hosts = known_hosts
        self._make = cache(make)
        self._may_sudo = may_sudo

    async def connect(self, target: Target) -> Host:
        login = _logins.pop((target, self._known_hosts), None)
        if login is None:
            return await self._make().connect(target)
        try:
            user = await login.user()
        except BaseException:
            login.close()
            raise
        if user is None:
            login.close()
            return await self._make().connect(target)
        return OpenSshHost(target, user, login, may_sudo=self._may_sudo)


class OpenSshHost(LineHost):
    """A host that an `ssh` of ours is logged in to."""

    def __init__(self, target: Target, user: str, login: _Login, *, may_sudo: bool = True) -> None:
        self.target = target
        self._user = user
        self._login = login
        self._may_sudo = may_sudo
        self._sessions = asyncio.Semaphore(MAX_SESSIONS)
        self._running: set[LocalChannel] = set()

    async def run(
        self, argv: Sequence[str], *, stdin: bytes = b"", timeout: float | None = None, root: bool = True
    ) -> Result:
        answer = self._login.take_answer(Question(tuple(argv), root and self._may_sudo))
        if answer is not None:
            with timeout_error(self.name, argv, timeout):
                async with asyncio.timeout(timeout):
                    result = await answer
            if result is not None:
                return result
        return await super().run(argv, stdin=stdin, timeout=timeout, root=root)

    async def close(self) -> None:
        await asyncio.gather(*(channel.kill() for channel in list(self._running)))
        self._login.close()

    async def _open(self, argv: Sequence[str], *, root: bool, whole_stderr: bool) -> LineProcess:
        through_sudo = root and self._may_sudo and self._user != "root"
        command = [*_REPORT_STATUS, *(sudo.as_root(argv) if through_sudo else argv)]
        await self._sessions.acquire()
        channel = LocalChannel(self._release, whole_stderr=whole_stderr)
        self._running.add(channel)
        try:
            await asyncio.get_running_loop().subprocess_exec(
                lambda: channel, *self._login.session(shlex.join(command)), start_new_session=True
            )
        except BaseException:
            self._release(channel)
            raise
        return LineProcess(channel, partial(self._judge, argv, through_sudo))

    def _judge(self, argv: Sequence[str], through_sudo: bool, result: Result) -> Result:
        if result.status == LOST and self._login.has_ended():
            cause = f"the connection was lost while {program_name(argv)} ran"
            raise ConnectionLost(self.name, cause, hint="check that the host is up, then run the same command again")
        return sudo.check_sudo_result(self.name, self._user, argv, result) if through_sudo else result

    def _release(self, channel: LocalChannel) -> None:
        if channel in self._running:
            self._running.discard(channel)
            self._sessions.release()


class _Login:
    """An `ssh` that logs in and then waits, until its standard input ends: with us, at the latest."""

    def __init__(self, target: Target, known_hosts: Path, questions: Sequence[Question]) -> None:
        """Raises OSError where there is no `ssh`."""
        self._questions = questions
        self._answers: dict[Question, Answer] = {}
        self._output: asyncio.ReadTransport | None = None
        self._reading: asyncio.Task[None] | None = None
        private = f"{_directory()}/{next(_numbers)}"
        kept = _claim_connection(target, known_hosts)
        self._socket: str = kept[0] if kept else private
        self._claim: int | None = kept[1] if kept else None
        if target.host_key:
            known_hosts = Path(f"{private}.key")
            known_hosts.write_text(f"{target.name} {target.host_key}\n", encoding="utf-8")
        options: dict[str, str | int] = {
            "BatchMode": "yes",
            "ClearAllForwardings": "yes",
            "ConnectTimeout": CONNECT_TIMEOUT_S,
            "ControlMaster": "auto" if kept else "yes",
            "ControlPath": self._socket,
            "ControlPersist": KEEP_S if kept else "no",
            "GlobalKnownHostsFile": os.devnull,
            "HostKeyAlias": target.name,
            "PermitLocalCommand": "no",
            "RemoteCommand": "none",
            "ServerAliveCountMax": KEEPALIVE_MISSED,
            "ServerAliveInterval": KEEPALIVE_S,
            "StrictHostKeyChecking": "yes",
            "UserKnownHostsFile": f'"{known_hosts.absolute()}"',
            **{name: ",".join(algorithms) for name, algorithms in ALGORITHMS.items()},
        }
        if target.user:
            options["User"] = target.user
        if target.port:
            options["Port"] = target.port
        if target.identity:
            options["IdentityFile"], options["IdentitiesOnly"] = f'"{target.identity.expanduser().absolute()}"', "yes"
        config = Path("~/.ssh/config").expanduser()
        command = ["ssh", "-q", "-T", "-F", str(config) if config.exists() else "none"]
        command += [f"-o{name}={value}" for name, value in options.items()]
        asked = (("$as_root " if question.root else "") + shlex.join(question.argv) for question in questions)
        program = "\n".join([_FIRST, *(_ASK.format(command=text) for text in asked), _STAY])
        command += ["--", target.address or target.name, shlex.join(["sh", "-c", program])]
        self._process = subprocess.Popen(
            [*_REMOVE_DIRECTORY, _directory(), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is ours
            cwd="/",  # the connection that stays keeps no file system busy
        )

    async def user(self) -> str | None:
        """Who is logged in, once that is done; None where it failed."""
        loop = asyncio.get_running_loop()
        self._answers = {question: loop.create_future() for question in self._questions}
        output = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(output)
        self._output, _ = await loop.connect_read_pipe(lambda: protocol, self._process.stdout)
        while line := await output.readline():  # what a login shell has to say may come first
            word, _, user = line.decode("utf-8", "replace").strip().partition(" ")
            if word == READY and user:
                self._reading = asyncio.create_task(self._read_answers(output, dict(self._answers)))
                return user
        return None

    async def _read_answers(self, output: asyncio.StreamReader, answers: Mapping[Question, Answer]) -> None:
        end = f"\n{END} ".encode()
        try:
            for question, answer in answers.items():
                await output.readuntil(f"{ANSWER}\n".encode())
                text = await output.readuntil(end)
                result = Result(int(await output.readline()), text.removesuffix(end))
                if not answer.done():
                    answer.set_result(result if result.status == 0 or question.may_fail else None)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError):
            pass  # those that ask find out
        finally:
            for answer in answers.values():
                if not answer.done():
                    answer.set_result(None)

    def take_answer(self, question: Question) -> Answer | None:
        """How the program ended, once that is known. Each answer is taken once."""
        return self._answers.pop(question, None)

    def session(self, command: str) -> list[str]:
        """The command line that runs a command over the connection."""
        # Without the connection it would make one of its own.
        alone = ("-F", "none", "-oProxyCommand=false", "-oControlMaster=no", "-oLogLevel=ERROR")
        return ["ssh", "-T", *alone, "-S", self._socket, "--", "shoal", command]

    def has_ended(self) -> bool:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1)  # both learn of it at nearly the same time
        return self._process.poll() is not None

    def close(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        for stream in (self._process.stdin, self._output or self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        self._process.wait()
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None


def _claim_connection(target: Target, known_hosts: Path) -> tuple[str, int] | None:
    """The socket of the connection that stays, and a lock: it is ours until that is closed, or we end.

    None where another command uses it, and where no directory is ours alone.
    """
    directory = Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"shoal-connections-{os.geteuid()}"
    with contextlib.suppress(OSError):
        directory.mkdir(mode=0o700, exist_ok=True)
        status = directory.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        if KEEP_S and is_ours:
            # A host with another key, or reached another way, is another connection.
            name = hashlib.sha256(repr((target, known_hosts.absolute())).encode()).hexdigest()[:16]
            lock = os.open(directory / f"{name}.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                return f"{directory}/{name}", lock
    return None


_directories: list[str] = []
_numbers = itertools.count()


def _directory() -> str:
    """Where the sockets are, which only we can open."""
    if not _directories:
        _directories.append(tempfile.mkdtemp(prefix="shoal-ssh-"))
        atexit.register(_end)
    return _directories[0]


def _end() -> None:
    for login in _logins.values():
        login.close()
    shutil.rmtree(_directories[0], ignore_errors=True)
