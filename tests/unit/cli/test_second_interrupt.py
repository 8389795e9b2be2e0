"""A second Ctrl-C exits at once, and prints what is unfinished and how to continue."""

import signal
import subprocess
import sys

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
