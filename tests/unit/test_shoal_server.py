"""The server that forks calls of `shoal` for tests on sandbox hosts: a call is what a new process would be."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT
from tests.e2e.leftovers import TAG
from tests.e2e.shoal_server import NOBODY, READ_AT_START, Call, Program, start_server, users_program

RUN_TEXT = """\
import sys
from tests.e2e import shoal_server
shoal_server.LOADED = ()
shoal_server.serve(lambda: exec(sys.argv[1], {}))
"""
"""A server whose calls run the text of a program."""
STREAMS = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}

SHOW = """\
import json, os, signal, sys, threading
print("an error", file=sys.stderr)
print(json.dumps({
    "arguments": sys.argv[2:],
    "environ": dict(os.environ),
    "directory": os.getcwd(),
    "path": sys.path[:1],
    "stdin": sys.stdin.read(),
    "ids": [os.getpid(), os.getpgid(0), os.getsid(0)],
    "signals": [signal.getsignal(number) for number in (signal.SIGCHLD, signal.SIGTERM)],
    "threads": threading.active_count(),
    "open": sorted(int(name) for name in os.listdir("/proc/self/fd"))[:4],
}))
"""
BEGIN_AND_WAIT = "import time; print('begun', flush=True); time.sleep(1000)"


@pytest.fixture(scope="module")
def server() -> Iterator[socket.socket]:
    with start_server(sys.executable, "-c", RUN_TEXT) as server:
        yield server


def call(server: socket.socket, *arguments: str, **options: Any) -> Call:
    return Call(server, arguments, **{**STREAMS, **options})


def test_call_has_its_arguments_environment_directory_and_streams(server: socket.socket, tmp_path: Path) -> None:
    environ = {"GREETING": "hello"}
    with call(server, SHOW, "a", "ä b", env=environ, cwd=tmp_path, start_new_session=True) as process:
        out, err = process.communicate("some\ninput", timeout=60)
    assert process.returncode == 0 and err == "an error\n"
    seen = json.loads(out)
    assert seen.pop("open")[:3] == [0, 1, 2]
    assert seen == {
        "arguments": ["a", "ä b"],
        "environ": environ,
        "directory": str(tmp_path),
        "path": [str(tmp_path)],
        "stdin": "some\ninput",
        "ids": [process.pid] * 3,
        "signals": [signal.SIG_DFL] * 2,
        "threads": 1,
    }


def test_calls_change_nothing_for_later_calls(server: socket.socket, tmp_path: Path) -> None:
    change = "import os, sys; os.environ['LEFT'] = '1'; os.chdir('/'); sys.path.append('/left'); sys.shoal_left = 1"
    with call(server, change) as process:
        assert process.wait(60) == 0
    look = "import os, sys; print('LEFT' in os.environ, os.getcwd(), '/left' in sys.path, hasattr(sys, 'shoal_left'))"
    with call(server, look, cwd=tmp_path) as process:
        assert process.communicate(timeout=60)[0] == f"False {tmp_path} False False\n"


@pytest.mark.parametrize(
    ("text", "status", "message"),
    [
        ("pass", 0, ""),
        ("raise SystemExit", 0, ""),
        ("raise SystemExit(3)", 3, ""),
        ("raise ValueError('no such luck')", 1, "ValueError: no such luck\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, ""),
        ("import atexit, sys; atexit.register(print, 'at its end', file=sys.stderr)", 0, "at its end\n"),
    ],
)
def test_status_of_a_call_is_that_of_a_process(server: socket.socket, text: str, status: int, message: str) -> None:
    with call(server, text) as process:
        err = process.communicate(timeout=60)[1]
    assert process.returncode == status and err.endswith(message) and bool(err) == bool(message)


def test_calls_run_at_the_same_time_and_get_signals(server: socket.socket) -> None:
    interrupted = (
        "import time\ntry:\n print('begun', flush=True); time.sleep(1000)\nexcept KeyboardInterrupt:\n exit(130)"
    )
    with (
        call(server, interrupted, start_new_session=True) as first,
        call(server, BEGIN_AND_WAIT, start_new_session=True) as second,
    ):
        assert first.stdout and second.stdout and first.stdout.readline() == second.stdout.readline() == "begun\n"
        assert first.poll() is None and second.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            first.wait(0.01)
        first.send_signal(signal.SIGINT)
        assert first.wait(60) == 130 and second.poll() is None
        os.killpg(second.pid, signal.SIGKILL)
        assert second.wait(60) == second.poll() == -signal.SIGKILL


def test_streams_that_nobody_names_are_those_of_the_tests(
    server: socket.socket, capfd: pytest.CaptureFixture[str]
) -> None:
    text = "import sys; print('to a test'); print('an error', file=sys.stderr)"
    with call(server, text, stdin=None, stdout=None, stderr=None) as process:
        assert process.wait(60) == 0
    assert capfd.readouterr() == ("to a test\n", "an error\n")


def test_call_that_cannot_begin_says_why(server: socket.socket, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(AssertionError, match="could not begin"):
        call(server, "pass", cwd="/no/such/place", stderr=None)
    assert "FileNotFoundError" in capfd.readouterr().err


RUN = f"""
import sys
from tests.unit.test_shoal_server import *
calls = call(start_server(sys.executable, "-c", RUN_TEXT), BEGIN_AND_WAIT, env={{"{TAG}": "reef"}})
calls.stdout.readline()
print(calls.pid, flush=True)
sys.stdin.read()
"""


def test_killed_run_leaves_no_call() -> None:
    """Before its end, a call is found as tests/e2e/leftovers.py finds commands."""
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as run:
        assert run.stdout
        pid = int(run.stdout.readline())
        assert f"{TAG}=reef" in Path(f"/proc/{pid}/environ").read_text().split("\0")
        run.kill()
    end = time.monotonic() + 60
    with contextlib.suppress(FileNotFoundError):
        while Path(f"/proc/{pid}/cmdline").read_bytes():  # a zombie has none
            assert time.monotonic() < end, "the call goes on"
            time.sleep(0.05)


def test_first_call_of_a_command_starts_the_real_program(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in READ_AT_START:
        monkeypatch.delenv(name, raising=False)
    program = Program("env")  # its calls count apart
    calls = [
        program.popen(*words, "--help", stdout=subprocess.PIPE) for words in (["plan"], ["plan"], ["node", "drain"])
    ]
    printed = [process.communicate(timeout=60)[0] for process in calls]
    assert [isinstance(process, Call) for process in calls] == [False, True, False]
    assert printed[0] == printed[1] != printed[2] and "shoal plan" in printed[0]
    for name in READ_AT_START:
        with program.popen("plan", "--help", stdout=subprocess.PIPE, env={**os.environ, name: "/nowhere"}) as real:
            assert not isinstance(real, Call) and real.communicate(timeout=60)[0] == printed[0]


WHO = """\
import os
print(os.getresuid(), os.getresgid(), os.getgroups(), "NoNewPrivs:\\t1" in open("/proc/self/status").read())
print([name for name in os.listdir("/root") if name != ".pyenv"])
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_users_call_has_the_user_alone_and_not_the_files_of_root(tmp_path: Path) -> None:
    prefix = users_program().prefix
    with start_server(*prefix, sys.executable, "-c", RUN_TEXT) as server, call(server, WHO, cwd="/") as process:
        out, err = process.communicate(timeout=60)
    assert not err and out == f"{(NOBODY,) * 3} {(NOBODY,) * 3} [] True\n[]\n"
