"""An `ssh` that logs in to a host, and its connection, which programs on the host share, as with ControlMaster.

A login may begin before anybody waits for it, while Python still loads, and asks what the command will need in any
case. Its connection stays for a minute after the command, so that the next one need not log in; commands at the same
time have each their own, because sshd allows few sessions a connection.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import fcntl
import hashlib
import itertools
import math
import os
import re
import shlex
import signal
import stat
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ShoalError
from shoal.hosts import sudo
from shoal.hosts.api import Result, Target
from shoal.hosts.host_keys import HostKey, HostKeys, pinned_key
from shoal.hosts.ssh_route import SshOptions, address, directory, environment, quoted, route_options

MAX_SOCKET_PATH = 86
"""`ssh` adds 17 characters, and macOS allows 103."""
KEEP_S = 60
"""How long a connection stays after the command, as with Ansible. With 0 it ends with the command."""
MAX_LINE_BYTES = 64 << 20
CONTROL_TIMEOUT_S = END_TIMEOUT_S = 5.0
READY, ANSWER, END = "shoal-ready", "shoal-answer", "shoal-end"
_FIRST = f"""echo "{READY} $(id -un)"; as_root=; [ "$(id -u)" = 0 ] || as_root='{" ".join(sudo.as_root(()))}'"""
_ASK = f"echo {ANSWER}; {{command}} < /dev/null 2> /dev/null; status=$?; echo; echo {END} $status"
_STAY = "exec cat > /dev/null"
# `ssh` ends with our process, which removes the directory of the sockets, unless it was killed. A killed process may
# still be there as a zombie.
_REMOVE_DIRECTORY = (
    "sh",
    "-c",
    'exec 3<&0 < /dev/null; "$@" <&3 3<&- & ssh=$!; exec 3<&- 2> /dev/null; '
    'trap \'kill "$ssh" 2> /dev/null\' TERM; wait "$ssh"; wait "$ssh"; '
    'if ! kill -0 "$PPID" 2> /dev/null || grep -qs "^State:.Z" "/proc/$PPID/status"; then rm -rf "$0"; fi',
)
_numbers = itertools.count()
_AUTHENTICATED = re.compile(r"^Authenticated to (\S+) \((?:\[(.*)\]:(\d+)|via proxy)\)", re.M)


@dataclass(frozen=True)
class Question:
    """A program that will be run on a host in any case, and only reads."""

    argv: tuple[str, ...]
    root: bool = True
    may_fail: bool = field(default=False, compare=False)
    """Whether a failure is an answer, too. Otherwise the program is run again, for what it says about it."""


Answer = asyncio.Future[Result | None]
"""How a question's program ended; None where it is to be run again."""


class Login:
    """An `ssh` that logs in and then waits, until its standard input ends: with us, at the latest."""

    def __init__(
        self,
        target: Target,
        host_keys: HostKeys,
        options: SshOptions,
        questions: Sequence[Question] = (),
        *,
        anew: bool = False,
    ) -> None:
        """With `anew` it uses no connection that was kept. Raises OSError where there is no `ssh`."""
        self.target = target
        self.options = options
        self.host_keys = host_keys
        self._questions = questions
        self._answers: dict[Question, Answer] = {}
        self._output: asyncio.ReadTransport | None = None
        self._reading: asyncio.Task[None] | None = None
        self._private = Path(directory(), str(next(_numbers)))
        self.expected = pinned_key(target.name, target.host_key) if target.host_key else host_keys.find(target.name)
        kept: tuple[str, int] | None = None
        if options.keep and self.expected and not anew:
            kept = _claim_connection(repr((target, host_keys.path.absolute(), self.expected, options.config_state)))
        self.socket = kept[0] if kept else str(self._private)
        self._claim = kept[1] if kept else None
        self.is_reused = Path(self.socket).exists()
        """The connection was there before."""
        self.too_late = False
        """It took longer than it may."""
        self.log = self.errors = self.greeting = ""
        """Once it is closed: what `ssh` says of the way to the host, what a jump host's `ssh` or a ProxyCommand says,
        and the last line of the login shell."""
        known = f"{target.name} {self.expected.type} {self.expected.text}\n" if self.expected else ""
        self._file("keys").write_text(known, encoding="utf-8")
        asked = (("$as_root " if question.root else "") + shlex.join(question.argv) for question in questions)
        program = "; ".join([_FIRST, *(_ASK.format(command=text) for text in asked), _STAY])
        with self._file("errors").open("wb") as errors:
            self._process = subprocess.Popen(
                [*_REMOVE_DIRECTORY, directory(), *self._command(kept is not None), shlex.join(["sh", "-c", program])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                start_new_session=True,  # Ctrl-C is ours
                cwd="/",  # the connection that stays keeps no file system busy
                env=environment(),
            )

    def _command(self, is_kept: bool) -> list[str]:
        target, options = self.target, self.options
        settings: dict[str, object] = {
            "ConnectTimeout": math.ceil(options.timeout * target.slowness) + 1,  # ours is first
            "ControlMaster": "auto" if is_kept else "yes",
            "ControlPath": quoted(Path(self.socket)),
            "ControlPersist": KEEP_S if is_kept else "no",
            "HostKeyAlias": target.name,
            "ServerAliveInterval": max(1, round(options.keepalive * target.slowness)),
            "StrictHostKeyChecking": "yes" if self.expected else "accept-new",
            "UserKnownHostsFile": quoted(self._file("keys")),
        }
        log = ("-v", "-E", str(self._file("log")))
        command = ["ssh", "-T", *log, *route_options(target, options, self.host_keys.path)]
        return [*command, *(f"-o{name}={value}" for name, value in settings.items()), "--", address(target)]

    async def user(self) -> str | None:
        """Who is logged in, once that is done; None where it failed."""
        loop = asyncio.get_running_loop()
        self._answers = {question: loop.create_future() for question in self._questions}
        output = asyncio.StreamReader(limit=MAX_LINE_BYTES)
        protocol = asyncio.StreamReaderProtocol(output)
        self._output, _ = await loop.connect_read_pipe(lambda: protocol, self._process.stdout)
        while line := await output.readline():  # what a login shell has to say may come first
            self.greeting = line.decode("utf-8", "replace").strip() or self.greeting
            _, ready, user = self.greeting.rpartition(f"{READY} ")
            if ready and user:
                self._remember_host_key()
                self._reading = asyncio.create_task(self._read_answers(output, dict(self._answers)))
                return user
        return None

    def _remember_host_key(self) -> None:
        """Keep the key of a host that is met for the first time, and one that the provider reports."""
        if self.is_reused or self.host_keys.find(self.target.name) == self.expected is not None:
            return
        shown = self._file("keys").read_text(encoding="utf-8")
        if not (self.expected or shown):
            return  # `ssh` has it from elsewhere
        key = self.expected or HostKey.parse(shown.partition(" ")[2])
        place = _AUTHENTICATED.search(self._read("log"))
        host = (place[2] or place[1]) if place else address(self.target)
        port = int(place[3]) if place and place[3] else self.target.port or 22
        self.host_keys.remember(self.target.name, host, port, key, pinned=self.target.host_key is not None)

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
        while await output.read(1 << 10):
            pass

    def take_answer(self, question: Question) -> Answer | None:
        """How the program ended, once that is known. Each answer is taken once."""
        return self._answers.pop(question, None)

    def session(self, command: str) -> list[str]:
        """The command line that runs a command over the connection."""
        return [*self._over(), "--", "shoal", command]

    def control(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Tell the connection something: `-O exit`, or a port to forward."""
        line = [*self._over(), *words, "--", "shoal"]
        try:
            return subprocess.run(line, capture_output=True, text=True, check=False, timeout=CONTROL_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            return subprocess.CompletedProcess(line, 255, "", "the connection does not answer")

    def _over(self) -> list[str]:
        # Without the connection it would make one of its own.
        alone = ("-F", "none", "-oProxyCommand=false", "-oControlMaster=no", "-oLogLevel=ERROR")
        return ["ssh", "-T", *alone, "-S", self.socket.replace("%", "%%")]

    async def wait_ended(self) -> None:
        """Returns when the connection has ended."""
        if self._reading is not None:
            await asyncio.wait([self._reading])

    def close(self) -> None:
        is_logged_in = self._reading is not None
        if self._reading is not None:
            self._reading.cancel()
        if is_logged_in:  # a proxy of the connection that stays is in our group
            self._process.terminate()
        else:
            self._kill_group(signal.SIGTERM)
        for stream in (self._process.stdin, self._output or self._process.stdout):
            with contextlib.suppress(OSError):
                stream.close()  # type: ignore[union-attr]
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._kill_group(signal.SIGKILL)
            self._process.wait()
        self.log, self.errors = self._read("log"), self._read("errors")
        for name in ("keys", "errors", "log"):
            self._file(name).unlink(missing_ok=True)
        if self._claim is not None:
            os.close(self._claim)
            self._claim = None

    def _kill_group(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _file(self, kind: str) -> Path:
        return self._private.with_suffix(f".{kind}")

    def _read(self, kind: str) -> str:
        try:
            return self._file(kind).read_text(encoding="utf-8", errors="replace")
        except OSError:
            return ""


# ---- logins that nobody waits for yet

_begun: dict[tuple[Target, Path], Login] = {}


@atexit.register
def _close_begun() -> None:
    for login in _begun.values():
        login.close()


def begin_login(target: Target, host_keys: HostKeys, questions: Sequence[Question] = ()) -> None:
    """Start to log in and to ask, for a `connect` and a `run` that will follow. What goes wrong shows itself there."""
    key = (target, host_keys.path)
    if key not in _begun:
        with contextlib.suppress(OSError, ShoalError):
            _begun[key] = Login(target, host_keys, SshOptions(), questions)


def take_login(target: Target, known_hosts: Path) -> Login | None:
    """The login that has begun for a host, if any."""
    return _begun.pop((target, known_hosts), None)


def _claim_connection(way: str) -> tuple[str, int] | None:
    """The socket of the connection that stays, and a lock: it is ours until that is closed, or we end.

    A host with another key, or reached another way, is another connection. None where another command uses it, and
    where no directory is ours alone, or has a path that is short enough.
    """
    place = Path(os.environ.get("XDG_RUNTIME_DIR") or "/tmp") / f"shoal-connections-{os.geteuid()}"  # nosec B108
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, exist_ok=True)
        status = place.lstat()
        is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid() and not status.st_mode & 0o077
        name = hashlib.sha256(way.encode()).hexdigest()[:16]
        if KEEP_S and is_ours and len(str(place / name)) <= MAX_SOCKET_PATH:
            lock = os.open(place / f"{name}.lock", os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
            else:
                return f"{place}/{name}", lock
    return None
