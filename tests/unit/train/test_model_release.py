"""A job that has finished training exits."""

from __future__ import annotations

import subprocess
import sys

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
