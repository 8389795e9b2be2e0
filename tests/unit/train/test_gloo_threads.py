"""A process exits: not while its threads are in a collective, and then without a hang."""

import ctypes
import hashlib
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from tests.unit.train.procs import ranks

from shoal.train.dist import GLOO_THREAD, wait_for_gloo_threads

PR_SET_NAME = 15


def busy(ending: threading.Event, as_named: str) -> threading.Thread:
    """A thread of that name that computes without Python's lock."""

    def work() -> None:
        ctypes.CDLL(None).prctl(PR_SET_NAME, as_named.encode())
        named.set()
        while not ending.is_set():
            hashlib.pbkdf2_hmac("sha256", b"x", b"y", 500_000)

    named, thread = threading.Event(), threading.Thread(target=work, daemon=True)
    thread.start()
    named.wait(30)
    return thread


def test_exit_waits_for_a_busy_gloo_thread() -> None:
    ending = threading.Event()
    thread = busy(ending, GLOO_THREAD)
    waiting = threading.Thread(target=wait_for_gloo_threads, args=(60.0,))
    waiting.start()
    time.sleep(0.2)
    assert waiting.is_alive()
    ending.set()
    thread.join(30)
    waiting.join(30)
    assert not waiting.is_alive()


def test_exit_waits_for_no_other_thread_and_only_for_the_timeout() -> None:
    ending = threading.Event()
    other = busy(ending, "something-else")
    wait_for_gloo_threads(60.0)  # would not be back within the time of this test
    gloo = busy(ending, GLOO_THREAD)
    wait_for_gloo_threads(0.1)
    ending.set()
    for thread in (other, gloo):
        thread.join(30)


def _thread_names(rank: int) -> set[str]:
    dist.all_reduce(torch.ones(1))
    return {(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()}


def test_gloo_thread_has_the_expected_name() -> None:
    [names] = ranks(1, _thread_names)
    assert GLOO_THREAD in names


PROGRAM = """
import os, torch
from shoal.train import init, parallelize, shutdown

os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # threads that take turns meet at the worst moments

def job():
    init(prove=False)
    model, seen = parallelize(torch.nn.Linear(4, 4), "ddp"), torch.ones(1000)
    model(torch.ones(2, 4)).sum().backward()
    for _ in range(3):
        torch.distributed.all_reduce(seen)
    shutdown()
    return seen

for _ in range(30):
    seen = job()
# Whether it hangs is a matter of luck; whether the model takes the group's threads along is not.
threads = [open(f"/proc/self/task/{thread}/comm").read() for thread in os.listdir("/proc/self/task")]
assert "pt_gloo_runloop\\n" in threads, threads
"""


def test_model_freed_after_the_last_collective_does_not_hang() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=600, check=True)
