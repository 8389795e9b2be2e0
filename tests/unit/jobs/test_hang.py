"""Trainings that hang: when, which rank is behind, and what a node says of its ranks."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases

from shoal.jobs.hang import RankStack, describe_stacks, hung_text, parse_stacks
from shoal.remote import python_command

JOB = "4711234"
PROGRESS = {"state": "running", "step": 120, "steps_per_second": 0.05, "updated": 1000.0}
PY_SPY = """\
#!/bin/sh
echo "Process $3: python train.py
Python v3.11.2 (/usr/bin/python3)

Thread 9 (idle): \\"Thread-1\\"
    wait (threading.py:320)
Thread 7 (active): \\"MainThread\\"
    read_shard (data.py:10)
    main (train.py:4)"
"""


@cases(
    "change, now, text",
    ({}, 1399.0, ""),
    ({}, 1420.0, "no step for 7 min, and one takes 20 s; the last was 120"),
    ({"steps_per_second": 10}, 1200.0, ""),
    ({"steps_per_second": 10}, 1301.0, "no step for 5 min, and one takes 0.1 s; the last was 120"),
    ({"steps_per_second": None}, 9000.0, ""),
    ({"steps_per_second": 0}, 9000.0, ""),
    ({"state": "done"}, 9000.0, ""),
    ({"updated": "now"}, 9000.0, ""),
)
def test_training_without_a_step_hangs(change: dict[str, Any], now: float, text: str) -> None:
    assert hung_text({**PROGRESS, **change}, now) == text


def test_ranks_know_their_last_step_better_than_the_file() -> None:
    ranks = [RankStack(number, "fish1", 7, 0, "", step=step) for number, step in enumerate((121, None, 122))]
    assert hung_text(PROGRESS, 9000.0, ranks=ranks).endswith("; the last was 122")
    assert hung_text(PROGRESS, 9000.0, ranks=ranks[1:2]).endswith("; the last was 120")


def rank(number: int, *stack: str) -> RankStack:
    return RankStack(number, f"fish{number}", 70 + number, 100, "", stack)


def test_rank_that_is_in_no_collective_is_behind() -> None:
    wait = ("all_reduce (torch/distributed/distributed_c10d.py:2501)", "main (train.py:9)")
    lines = describe_stacks([rank(0, *wait), rank(2, *wait), rank(1, "read_shard (data.py:10)", "main (train.py:4)")])
    assert lines[0] == "behind: rank 1 on fish1 (pid 71): read_shard (data.py:10) < main (train.py:4)"
    assert [line.partition(" on ")[0] for line in lines[1:]] == ["rank 0", "rank 2"]


def test_no_rank_is_named_where_stacks_do_not_tell() -> None:
    assert describe_stacks([rank(1), RankStack(0, "fish0", 70, 0, "hrtimer_nanosleep")]) == [
        "rank 0 on fish0 (pid 70): 0 % of a core, in hrtimer_nanosleep",
        "rank 1 on fish1 (pid 71): 100 % of a core",
    ]
    assert not any(
        line.startswith("behind") for line in describe_stacks([rank(0, "f (a.py:1)"), rank(1, "g (a.py:2)")])
    )


def test_answer_of_another_shape_is_left_out() -> None:
    good = {"rank": 0, "pid": 7, "cpu_percent": 3, "wait": "", "stack": []}
    assert parse_stacks("n1", "warning\n[]\n{}\n" + json.dumps(good)) == [RankStack(0, "n1", 7, 3, "")]


@pytest.fixture
def training(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A rank of a job with a child of its own, as data workers are, and a py-spy in its environment."""
    (tmp_path / "py-spy").write_text(PY_SPY)
    (tmp_path / "py-spy").chmod(0o755)
    tmp_path.chmod(0o755)
    env = {"SLURM_JOB_ID": JOB, "RANK": "3", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    process = subprocess.Popen(["sh", "-c", "sleep 60 & wait"], env=env)
    while not children(process.pid):
        time.sleep(0.05)
    try:
        yield process
    finally:
        for pid in (*children(process.pid), process.pid):
            os.kill(pid, 9)
        process.wait(timeout=30)


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_node_reports_each_rank_once(training: subprocess.Popen[bytes]) -> None:
    line = [sys.executable, *python_command("node_health/job_stacks.py", JOB)[1:]]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    [found] = parse_stacks("n1", done.stdout)
    assert (found.rank, found.pid) == (3, training.pid)
    if os.geteuid() == 0:  # it runs with the rights of the rank's user
        assert found.stack == ("read_shard (data.py:10)", "main (train.py:4)")
    other = subprocess.run([*line[:-1], f"{JOB}0"], capture_output=True, text=True, timeout=60)
    assert other.stdout == ""
