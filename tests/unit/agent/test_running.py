"""What is seen of programs that run on the host."""

from __future__ import annotations

import os
import signal
import subprocess
import time

import pytest

from shoal.agent.program.running import at_work

BUSY = "while :; do :; done"


@pytest.mark.parametrize(
    ("script", "works"),
    [
        ("exec sleep 600", False),
        (BUSY, True),
        (f"sh -c '{BUSY}'; true", True),
    ],
    ids=["asleep", "busy", "a child of its is busy"],
)
def test_a_process_is_at_work_while_it_or_one_of_its_session_wants_the_cpu(script: str, works: bool) -> None:
    process = subprocess.Popen(["sh", "-c", script], start_new_session=True)
    try:
        for _ in range(600):  # all of them are, while they start
            if at_work(str(process.pid)) is works:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"still {not works}")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
