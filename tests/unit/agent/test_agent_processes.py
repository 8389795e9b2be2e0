"""What the agent reports about programs that run on the host."""

import os
import signal
import subprocess
import time

import pytest
from tests.support.cases import cases

from shoal.remote.agent.running import is_busy, reap

BUSY = "while :; do :; done"


@cases(
    "script, works",
    ("exec sleep 600", False),
    (BUSY, True),
    (f"sh -c '{BUSY}'; true", True),
    ids=["asleep", "busy", "a child of its is busy"],
)
def test_process_is_busy_while_its_session_uses_the_cpu(script: str, works: bool) -> None:
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:
        for _ in range(600):  # all of them are, while they start
            if is_busy(str(process.pid)) is works:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"still {not works}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def test_unkillable_process_is_awaited_only_for_the_timeout() -> None:
    """One that lives stands for one that hangs in the kernel, on a share whose server is away."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        assert not reap(process.pid, 0.05)
    finally:
        process.kill()
    assert reap(process.pid, 60)
    process.returncode = -signal.SIGKILL  # no other caller can wait for it any more
