"""`shoal` for tests: processes forked from one that has loaded it, because loading takes longer than most commands.

The first call of each command in a run of pytest starts the real program, `python -m shoal`; later ones are forked.
Root's calls and those of an ordinary user count apart. A call with a variable that Python or coverage reads
at its start is the real program, too.

A server is a process of its own, begun at the first call that needs it: it has one thread. It ends with the process of
pytest, and its calls end with it.
"""

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import json
import os
import pkgutil
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.documents import ROOT
from tests.e2e.leftovers import TAG

import shoal
from shoal.cli import main

NOBODY = 65534
"""The user id of an ordinary user's commands on this machine. On the cluster it is another."""

HIDE_ROOT = """\
mount --rbind "$1/.pyenv" "$2/.pyenv" 2> /dev/null; mount --rbind "$2" "$1"; shift 2 && exec "$@"
"""
"""In a mount namespace of its own: root's home without root's files, for the interpreter may be in it."""

WITH_SUBCOMMANDS = ("node", "env", "image", "bench", "keys")
READ_AT_START = ("PYTHONPATH", "COVERAGE_PROCESS_START", "COVERAGE_PROCESS_CONFIG")
"""Variables that Python and coverage read when a program starts."""
LOADED = ("shoal.cli", "shoal.verbs", "shoal.hosts", "shoal.sandbox")
"""The packages that a server loads: commands load parts of them when they need them."""
CAPTURED = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
MAX_CALL_BYTES = 1 << 20


class Program:
    """`shoal` as one user of this machine calls it, behind the words of `prefix`."""

    def __init__(self, *prefix: str) -> None:
        self.prefix = prefix
        self._called: dict[str, socket.socket] = {}

    def line(self, *arguments: str) -> list[str]:
        """The command line of the real program."""
        return [*self.prefix, sys.executable, "-m", "shoal", *arguments]

    def popen(self, *arguments: str, **options: Any) -> subprocess.Popen[str]:
        """Begin a call. The options of subprocess.Popen that work here: streams, env, cwd and start_new_session."""
        environ = options.get("env") or os.environ
        if any(name in environ for name in READ_AT_START) or self._is_first(
            " ".join(arguments[: 2 if arguments[0] in WITH_SUBCOMMANDS else 1])
        ):
            return subprocess.Popen(self.line(*arguments), text=True, **options)
        return Call(self._server, arguments, text=True, **options)

    def _is_first(self, command: str) -> bool:
        """Whether no process of the run has called it."""
        if command in self._called:
            return False
        # A name that one process can have. It is free again when all processes of the run have ended.
        self._called[command] = claim = socket.socket(socket.AF_UNIX)
        atexit.register(claim.close)
        run = os.environ.get("PYTEST_XDIST_TESTRUNUID", os.getpid())
        try:
            claim.bind(f"\0shoal {run} {' '.join(self.prefix[-1:])} {command}")
        except OSError:
            return False
        return True

    def run(self, *arguments: str, timeout: float, **options: Any) -> subprocess.CompletedProcess[str]:
        """Call it, and return what it printed."""
        return finish(self.popen(*arguments, **CAPTURED, **options), timeout)

    @functools.cached_property
    def _server(self) -> socket.socket:
        return start_server(*self.prefix, sys.executable, "-m", "tests.e2e.shoal_server")


def start_server(*line: str) -> socket.socket:
    """Start a server; the socket for its calls, with which it ends."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        fds = [theirs.fileno()]
        process = subprocess.Popen([*line, str(fds[0])], cwd=ROOT, stdin=subprocess.DEVNULL, pass_fds=fds)
    atexit.register(process.wait, 60)
    atexit.register(ours.close)
    return ours


def finish(process: subprocess.Popen[str], timeout: float) -> subprocess.CompletedProcess[str]:
    """Wait for a call, and return what it printed."""
    with process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


ROOTS_PROGRAM = Program()


@functools.cache
def users_program() -> Program:
    """`shoal` for an ordinary user, who cannot read root's files."""
    masked = tempfile.mkdtemp(prefix="shoal-root-")
    atexit.register(shutil.rmtree, masked, ignore_errors=True)
    Path(masked).chmod(0o755)
    Path(masked, ".pyenv").mkdir()
    identity = ("setpriv", f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--no-new-privs")
    return Program("unshare", "--mount", "sh", "-c", HIDE_ROOT, "sh", "/root", masked, *identity)


class Call(subprocess.Popen[str]):
    """A call of a server, with all of Popen: it differs in who forks the process and who waits for it."""

    def __init__(self, server: socket.socket, arguments: Sequence[str], **options: Any) -> None:
        self._server = server
        super().__init__(arguments, **options)

    def _execute_child(
        self,
        args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
        startupinfo: Any, creationflags: Any, shell: Any,
        p2cread: int, p2cwrite: int, c2pread: int, c2pwrite: int, errread: int, errwrite: int,
        restore_signals: Any, gid: Any, gids: Any, uid: Any, umask: Any, start_new_session: bool, *_: Any,
    ) -> None:  # fmt: skip
        environ = dict(os.environ if env is None else env)
        call = {
            "arguments": args,
            "environ": environ,
            "directory": str(cwd or Path.cwd()),
            "session": start_new_session,
            "tag": f"{TAG}={environ[TAG]}" if TAG in environ else "",
        }
        streams = (place if fd < 0 else fd for place, fd in enumerate((p2cread, c2pwrite, errwrite)))
        self._report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                data = json.dumps(call).encode()
                assert len(data) < MAX_CALL_BYTES
                socket.send_fds(self._server, [data], [*streams, theirs.fileno()])
        finally:
            self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        begun = self._report.recv(64)
        if not begun.startswith(b"pid "):
            self._report.close()
            raise AssertionError("the call could not begin; standard error says why")
        self.pid = int(begun[4:])
        self._child_created = True

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        try:
            report = self._report.recv(64, socket.MSG_DONTWAIT if wait_flags & os.WNOHANG else 0)
        except BlockingIOError:
            return 0, 0
        self._report.close()
        return self.pid, int(report or signal.SIGKILL)  # the server was killed

    def _internal_poll(self, _deadstate: int | None = None) -> int | None:
        if self.returncode is None and self._waitpid_lock.acquire(blocking=False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def serve(program: Callable[[], None]) -> None:
    """Fork a process for each call, which runs the program, and report its end."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in LOADED:
        package = importlib.import_module(name)
        for module in pkgutil.walk_packages(package.__path__, f"{name}."):
            importlib.import_module(module.name)
    gc.collect()
    gc.freeze()  # the calls share this memory
    calls: dict[int, socket.socket] = {}
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the calls
    while True:
        ready, _, _ = select.select([control, ended], [], [])
        if ended in ready:
            os.read(ended, 4096)
            _report_ends(calls)
        if control not in ready:
            continue
        data, fds, _, _ = socket.recv_fds(control, MAX_CALL_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
        if not data:
            for pid in calls:
                os.kill(pid, signal.SIGKILL)
            sys.exit()
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGINT, interrupt)
            _become(json.loads(data), fds)
            _run_to_end(program)
        for fd in fds[:3]:
            os.close(fd)
        calls[pid] = socket.socket(fileno=fds[3])


def _report_ends(calls: dict[int, socket.socket]) -> None:
    while calls:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with calls.pop(pid) as report, contextlib.suppress(BrokenPipeError):
            report.send(b"%d" % status)


def _become(call: dict[str, Any], fds: list[int]) -> None:
    """Make this process what `python -m shoal` would be, and say that it is there."""
    if call["session"]:
        os.setsid()
    for place, fd in enumerate(fds[:3]):
        os.dup2(fd, place)
    os.chdir(call["directory"])
    if call["tag"]:
        _show_environ(call["tag"])
    os.environ.clear()
    os.environ.update(call["environ"])
    time.tzset()
    sys.argv = [str(Path(shoal.__file__).with_name("__main__.py")), *call["arguments"]]
    sys.path[0] = call["directory"]
    os.write(fds[3], b"pid %d" % os.getpid())
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))


def _show_environ(text: str) -> None:
    """Let /proc/PID/environ show this: tests/e2e/leftovers.py finds the commands of killed runs there."""
    start, end = map(int, Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47:49])
    data = text.encode()
    assert len(data) < end - start, "the server's own environment is too short"
    ctypes.memmove(start, data.ljust(end - start, b"\0"), end - start)


def _run_to_end(program: Callable[[], None]) -> None:
    """Run the program, and end without the interpreter's own end: to free all that is loaded takes 55 ms."""
    status: Any = 0
    try:
        program()
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
        status = 1
    try:
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
    finally:
        os._exit(status)


if __name__ == "__main__":
    serve(main)
