"""A second Ctrl-C exits at once, and prints what is unfinished and how to continue, or does what the command says."""

import signal
import subprocess
import sys

import pytest
from tests.support.cases import cases

WORK = """
import asyncio
from shoal.cli.session import run_interruptible
from shoal.verbs.context import note_at_exit

async def work():
    with note_at_exit(lambda: "left: cloud1; run `shoal down` again"):
        print("begun", flush=True)
        try:
            await asyncio.Event().wait()
        finally:
            print("told to stop", flush=True)
            await asyncio.Event().wait()

run_interruptible(work())
"""


def test_second_ctrl_c_reports_remaining_work_and_exits_130() -> None:
    process = subprocess.Popen([sys.executable, "-c", WORK], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for line in ("begun\n", "told to stop\n"):
        assert process.stdout.readline() == line
        process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said == (
        "\nstopping: each host finishes its current step; Ctrl-C again exits at once\n"
        "\nleft: cloud1; run `shoal down` again\n"
        "stopped at once; run the same command again to continue\n"
    )


WATCH = """
import asyncio, shoal.cli.session as session
from shoal.errors import Interrupted

async def work():
    print("begun", flush=True)
    await asyncio.Event().wait()

session.SECOND_S = SECONDS
try:
    session.run_interruptible(work(), message="", second="again ends it")
except Interrupted as interrupted:
    print(*(number.name for number in interrupted.signals))
"""


@cases(
    "seconds, sent, signals",
    pytest.param(0.01, ["SIGINT"], "SIGINT\n", id="Ctrl-C"),
    pytest.param(600, ["SIGINT", "SIGINT"], "SIGINT SIGINT\n", id="twice"),
    pytest.param(600, ["SIGTERM"], "SIGTERM\n", id="SIGTERM is not waited for"),
)
def test_second_ctrl_c_of_a_watched_job_is_the_commands(seconds: float, sent: list[str], signals: str) -> None:
    program = [sys.executable, "-c", WATCH.replace("SECONDS", str(seconds))]
    with subprocess.Popen(program, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        assert process.stdout.readline() == "begun\n"
        process.send_signal(signal.Signals[sent[0]])
        for name in sent[1:]:
            assert process.stderr.readline() + process.stderr.readline() == "\nagain ends it\n"
            process.send_signal(signal.Signals[name])
        output, _ = process.communicate(timeout=60)
    assert (process.returncode, output) == (0, signals)
