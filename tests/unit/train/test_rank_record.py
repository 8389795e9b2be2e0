"""A real training of two ranks of which one stops: the node's program tells which, without py-spy."""

import json
import os
import signal
import subprocess
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from tests.unit.train.procs import kill, start

from shoal.jobs.hang import describe_stacks, parse_stacks
from shoal.remote import python_command

JOB = "4711999"


def read_shard(rank: int) -> None:
    if rank == 1:
        while True:
            time.sleep(60)


def train(rank: int) -> None:
    from shoal.train.rank_record import open_record, record_step

    os.environ.update(SLURM_JOB_ID=JOB, RANK=str(rank))
    handlers = [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)]
    open_record()
    assert handlers == [signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)]
    for step in range(1, 10):
        if step == 5:
            read_shard(rank)
        value = torch.ones(1)
        dist.all_reduce(value)
        record_step("run", step)


def test_rank_that_the_others_wait_for_is_named(monkeypatch: Any) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", JOB)
    children = start(2, train)
    try:
        pids = [child.pid for child, _ in children]
        lines: list[str] = []
        end = time.monotonic() + 120
        while not (lines and lines[0].startswith("behind")) and time.monotonic() < end:
            lines = ask(pids)
        assert lines[0].startswith("behind: rank 1 on ") and ", step 4): read_shard (test_rank_record.py:" in lines[0]
        assert lines[1].startswith("rank 0 on ") and "distributed_c10d.py:" in lines[1], lines
        assert all(child.is_alive() for child, _ in children), "to ask does not disturb them"
    finally:
        kill(children)


PROGRAM = """\
import json, os, sys
sys.argv = ["job_stacks", "0"]
text = sys.stdin.read()
space = {"__name__": "job_stacks"}
exec(compile(text, "job_stacks.py", "exec"), space)
pids = json.loads(os.environ["PIDS"])
space["rank_processes"] = lambda job: {pid: {"RANK": str(rank)} for rank, pid in enumerate(pids)}
space["SAMPLE_S"] = 0.1
space["main"]("0")
"""
"""The node's program, told which processes are the ranks: those of a fork server do not have the job's environment."""


def ask(pids: list[int]) -> list[str]:
    text = python_command("node_health/job_stacks.py")[5]
    line = [sys.executable, "-I", "-S", "-B", "-c", PROGRAM]
    env = {"PIDS": json.dumps(pids), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(line, input=text, capture_output=True, text=True, timeout=60, env=env)
    assert done.returncode == 0, done.stderr
    return list(describe_stacks(parse_stacks("n1", done.stdout)))
