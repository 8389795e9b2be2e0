"""Trainings that make no step: what a rank keeps in memory, how a node reads it, and what is done about its job."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.support.programs import stand_in

from shoal import contract
from shoal.remote.node_health import hung_job, job_stacks, leftovers, training
from shoal.remote.node_health.hung_job import nodes_behind, obstacle_to_requeue
from shoal.remote.node_health.job_stacks import (
    handler_stack,
    nccl_counters,
    parse_handler_stack,
    ranks_behind,
    read_step,
)
from shoal.remote.node_health.node import Baseline, Node, Process

JOB = "4711"
SCRIPT = """\
import os, signal, sys, threading, time
from shoal.train.rank_record import end_record, record_step
if "own" in sys.argv:
    signal.signal(50, lambda number, frame: os.write(1, b"mine\\n"))
for step in range(1, 8):
    record_step("run", step)
    record_step("progress", step - 1)
    time.sleep(0.01)
if "end" in sys.argv:
    end_record()
def read_shard():
    print("ready", flush=True)
    while True:
        time.sleep(60)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
read_shard()
"""


@contextmanager
def running(code: str, *words: str, stdin: Any = None) -> Iterator[subprocess.Popen[str]]:
    """A process of a job, once it has printed a line."""
    env = {"SLURM_JOB_ID": JOB, "RANK": "0", "PATH": os.environ["PATH"], "PYTHONPATH": os.pathsep.join(sys.path)}
    line = [sys.executable, "-c", code, *words]
    with subprocess.Popen(line, env=env, stdin=stdin, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline()
        yield process
        process.kill()


@pytest.fixture
def rank() -> Iterator[subprocess.Popen[str]]:
    with running(SCRIPT) as process:
        yield process


def test_node_knows_what_the_library_writes() -> None:
    names = ("STACK_SIGNAL", "STACK_MEMORY", "STEP_MEMORY")
    assert [getattr(job_stacks, name) for name in names] == [getattr(contract, name) for name in names]


def test_rank_tells_its_step_and_its_stack(rank: subprocess.Popen[str]) -> None:
    step = read_step(rank.pid)
    assert step["step"] == 7, "the first source that was seen counts"
    assert 0.005 < step["median_s"] < 5 and step["silence_s"] < 60
    for _ in range(2):
        stack = handler_stack(rank.pid)
        assert [frame.partition(" ")[0] for frame in stack] == ["read_shard", "<module>"], stack
    assert rank.poll() is None


def test_ended_training_has_no_step() -> None:
    with running(SCRIPT, "end") as rank:
        assert read_step(rank.pid) == {}


def test_signal_that_the_script_handles_is_left_to_it() -> None:
    with running(SCRIPT, "own") as rank:
        assert handler_stack(rank.pid) == [], "it has no file for stacks, so it is not signalled"
        os.kill(rank.pid, contract.STACK_SIGNAL)
        assert rank.stdout is not None and rank.stdout.readline() == "mine\n"


def test_process_without_a_handler_is_not_signalled() -> None:
    """A file of this name is not enough: without a handler the signal would end the process."""
    with running("import os, time; os.memfd_create('shoal-stack'); print(flush=True); time.sleep(60)") as process:
        assert handler_stack(process.pid) == [] and process.poll() is None


def test_link_of_the_right_name_is_not_followed(tmp_path: Path) -> None:
    """A file on disk whose name looks like that of one in memory is not read."""
    secret = tmp_path / "memfd:shoal-step (deleted)"
    secret.write_text(json.dumps({"step": 1, "clock": 0}))
    with secret.open() as file, running("import time; print(flush=True); time.sleep(60)", stdin=file) as process:
        assert read_step(process.pid) == {}


def test_main_thread_is_told_from_the_others() -> None:
    text = (
        'Thread 0x00007f01 (most recent call first):\n  File "/a/b/x.py", line 3 in loop\n\n'
        "Current thread 0x00007f02 (most recent call first):\n"
        '  File "/v/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 9 in all_reduce\n'
        '  File "/home/a/train.py", line 4 in main\n'
    )
    frames = ["all_reduce (torch/distributed/distributed_c10d.py:9)", "main (train.py:4)"]
    assert parse_handler_stack(text, "7f02") == parse_handler_stack(text, "") == frames
    assert parse_handler_stack(text, "7f01") == ["loop (x.py:3)"]
    assert parse_handler_stack("", "7f01") == []


def rank_of(number: int, *stack: str, step: int | None = 5, silence: float = 900.0) -> dict[str, Any]:
    return {"rank": number, "node": f"n{number}", "stack": list(stack), "step": step, "silence_s": silence}


WAIT = ("all_reduce (torch/distributed/distributed_c10d.py:1)", "main (train.py:9)")
BACKWARD = ("_engine_run_backward (torch/autograd/graph.py:1)", "main (train.py:8)")
STUCK = ("read_shard (data.py:3)", "main (train.py:4)")


@cases(
    "ranks, behind",
    ([rank_of(0, *WAIT), rank_of(1, *STUCK)], [1]),
    ([rank_of(0, *BACKWARD), rank_of(1, *STUCK)], [1]),
    ([rank_of(0, *STUCK), rank_of(1, *STUCK)], []),
    ([rank_of(0, *WAIT), rank_of(1, *WAIT)], []),
    ([rank_of(0, step=9), rank_of(1, step=7)], [1]),
    ([rank_of(0, step=9), rank_of(1, step=8)], []),
    ([rank_of(0, "f (a.py:1)"), rank_of(1, "f (a.py:1)"), rank_of(2, "g (a.py:2)")], [2]),
    ([rank_of(0, "f (a.py:1)"), rank_of(1, "g (a.py:2)"), rank_of(2, "h (a.py:3)")], []),
    ([], []),
)
def test_rank_behind(ranks: list[dict[str, Any]], behind: list[int]) -> None:
    assert [rank["rank"] for rank in ranks_behind(ranks)] == behind


def test_nothing_is_done_while_a_rank_goes_on_or_says_nothing() -> None:
    ranks = [rank_of(0, *WAIT), rank_of(1, *STUCK)]
    assert nodes_behind(ranks, 600) == {"n1": "rank 1 on n1 hangs"}
    assert nodes_behind(ranks, 1000) == {}
    assert nodes_behind([rank_of(0, *WAIT), rank_of(1, *STUCK, silence=3.0)], 600) == {}
    silent = {key: value for key, value in rank_of(1, *STUCK).items() if key != "silence_s"}
    assert nodes_behind([rank_of(0, *WAIT), silent], 600) == {}
    assert nodes_behind([{**rank, "node": "n0"} for rank in ranks], 600) == {}, "both are on the only node"


@cases(
    "change, states, obstacle",
    ({}, "n0 alloc\nn1 alloc\nn2 idle", ""),
    ({}, "n0 alloc\nn1 alloc\nn2 drain", "partition main has too few other nodes"),
    ({"Requeue": "0"}, "n0 alloc\nn1 alloc\nn2 idle", "it was submitted with --no-requeue"),
    ({"ReqNodeList": "n[0-1]"}, "n0 alloc\nn1 alloc\nn2 idle", "it asks for this node by name"),
)
def test_job_that_could_not_run_is_not_queued_again(
    change: dict[str, str], states: str, obstacle: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hung_job, "slurm", lambda *words, **_: states if words[0] == "sinfo" else "n0\nn1\n")
    fields = {"Requeue": "1", "ReqNodeList": "(null)", "Partition": "main", **change}
    assert obstacle_to_requeue(fields, ["n0", "n1"], {"n1": "rank 1 on n1 hangs"}) == obstacle


def test_job_of_another_user_is_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    fields = f"JobId={JOB} UserId=bob(2002) GroupId=bob(2002) JobState=RUNNING NodeList=n[0-1]"
    calls: list[tuple[str, ...]] = []
    monkeypatch.setattr(hung_job, "slurm", lambda *words, **_: calls.append(words) or fields)
    assert hung_job.examine(JOB, "2001") == "the processes that hang are not those of its user"
    assert len(calls) == 1


def test_second_run_for_a_job_leaves_it_to_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hung_job, "STATE", str(tmp_path))
    lock = tmp_path / f"hung-{JOB}"
    runs: list[str] = []

    def examine(job: str, user: str) -> str:
        runs.append(job)
        hung_job.main(job, user)
        assert lock.exists()
        return "seen"

    monkeypatch.setattr(hung_job, "examine", examine)
    before = signal.getsignal(signal.SIGTERM)
    try:
        hung_job.main(JOB, "2001")
    finally:
        signal.signal(signal.SIGTERM, before)
    assert runs == [JOB] and not lock.exists()


def test_job_is_released_when_the_run_is_ended(tmp_path: Path) -> None:
    """With a `scontrol` that writes down what it is told, and holds the job for ever."""
    log = tmp_path / "log"
    stand_in(tmp_path / "scontrol", f'echo "$@" >> {log}\necho JobState=RUNNING')
    code = (
        f"import sys; sys.path.insert(0, {str(Path(hung_job.__file__).parents[1])!r})\n"
        "from node_health import hung_job\n"
        f"hung_job.STATE, hung_job.PATH = {str(tmp_path)!r}, {str(tmp_path)!r} + ':/usr/bin:/bin'\n"
        "hung_job.examine = lambda job, user: hung_job.requeue_without(job, 'n1')\n"
        f"hung_job.main({JOB!r}, '2001')\n"
    )
    with subprocess.Popen([sys.executable, "-c", code]) as run:
        while not (log.exists() and "show job" in log.read_text()):
            assert run.poll() is None
            time.sleep(0.05)
        run.terminate()
    lines = log.read_text().splitlines()
    assert lines[0] == f"requeuehold {JOB}" and lines[-1] == f"release {JOB}"


@cases("mode", "warn", "requeue")
def test_rank_without_a_step_is_found(rank: subprocess.Popen[str], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "LOWEST_USER", 0)
    monkeypatch.setattr(training, "running_jobs", lambda node: {JOB})
    found = Process.read(rank.pid)
    assert found is not None
    node = Node(Baseline({}), {}, {"hung_after_s": 0.5, "hung_jobs": mode}, time.time())
    node._processes = {rank.pid: found}
    time.sleep(max(0.0, 0.6 + 20 * read_step(rank.pid)["median_s"] - read_step(rank.pid)["silence_s"]))
    [text] = training.check_hung_trainings(node)
    assert text.startswith(f"job {JOB}: rank 0 (pid {rank.pid}, user ") and text.endswith("the last was 7")
    assert node.orders == ([f"hung {JOB} {os.getuid()}"] if mode == "requeue" else [])
    node.config["hung_after_s"] = 3600
    assert list(training.check_hung_trainings(node)) == []
    assert leftovers.LOWEST_USER == 1000


RAS = """\
NCCL version 2.28.9 compiled with CUDA 13.0

Job summary
===========

  Nodes  Processes         GPUs
      1          1            1

Communicators... (0.000s)
=============

Group     Comms     Nodes     Ranks    Status  Errors
    0         1         1         1   RUNNING  MISMATCH

Errors
======

Warnings
========

#0-0 (27a079b8) MISMATCH
  Communicator ranks have different collective operation counts
  1 ranks have launched up to operation 6650
"""
"""As NCCL 2.28.9 prints it, with a mismatch."""


def test_counters_of_nccl_are_read() -> None:
    """A stand-in for the service of NCCL (simulated): no GPU is here."""
    with socket.create_server(("localhost", 0)) as server:

        def answer() -> None:
            peer, _ = server.accept()
            with peer:
                assert peer.recv(100) == b"verbose status\n"
                peer.sendall(RAS.encode() + b"\x1b[2J\n")

        thread = threading.Thread(target=answer)
        thread.start()
        lines = nccl_counters(server.getsockname()[1])
        thread.join(timeout=30)
    assert lines[:2] == ["Group Comms Nodes Ranks Status Errors", "0 1 1 1 RUNNING MISMATCH"]
    assert lines[2:5] == ["Errors", "Warnings", "#0-0 (27a079b8) MISMATCH"]
    assert lines[-2:] == ["1 ranks have launched up to operation 6650", "[2J"]
    with socket.create_server(("localhost", 0)) as server:
        port = server.getsockname()[1]
    assert nccl_counters(port) == []


def test_signal_is_not_one_of_a_framework() -> None:
    assert signal.SIGRTMIN + 8 < contract.STACK_SIGNAL < signal.SIGRTMAX - 8
