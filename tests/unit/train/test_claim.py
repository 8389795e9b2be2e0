"""Two jobs do not write into one checkpoint directory, and a dead job blocks no other."""

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.support.waiting import wait_for
from tests.unit.train.procs import start
from tests.unit.train.training import build, train_step

from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint.claim import CLAIM_FILE, STALE_AFTER_S, Claim, ClaimOwner
from shoal.train.errors import CheckpointError
from shoal.train.run import Run

LONG = 600.0
"""Reached only by what hangs."""
FIRST, SECOND = ClaimOwner("reef-17", "job 17", "n1"), ClaimOwner("reef-18", "job 18", "n2")


def leave(directory: Path, writer: ClaimOwner) -> Path:
    """What a job that was killed leaves behind."""
    (directory / CLAIM_FILE).write_text(json.dumps(asdict(writer)))
    return directory / CLAIM_FILE


@contextmanager
def touching(file: Path) -> Iterator[None]:
    """A job on another node that writes there."""
    over = threading.Event()

    def touch() -> None:
        while not over.wait(0.05):
            os.utime(file)

    thread = threading.Thread(target=touch)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_second_job_is_rejected_with_the_name_of_the_first(tmp_path: Path) -> None:
    first = Claim(tmp_path, FIRST, touch_period=0.05)
    assert first.take() is None
    other = Claim(tmp_path, SECOND, touch_period=0.05, takeover_timeout=LONG).take()
    assert str(other) == "job 17 on n1"
    first.release()
    assert Claim(tmp_path, SECOND, takeover_timeout=LONG).take() is None


def test_claim_of_a_dead_job_is_taken_over_without_updates(tmp_path: Path) -> None:
    leave(tmp_path, FIRST)
    assert Claim(tmp_path, SECOND, touch_period=0.05, takeover_timeout=0.2).take() is None
    assert json.loads((tmp_path / CLAIM_FILE).read_text())["name"] == "job 18"


def test_single_touch_does_not_count_as_alive(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A cache of shared storage may show the last touch of a job late."""
    file = leave(tmp_path, FIRST)

    def touch_once() -> None:
        wait_for(lambda: caplog.text)
        os.utime(file)

    with ThreadPoolExecutor(1) as thread:
        thread.submit(touch_once)
        assert Claim(tmp_path, SECOND, touch_period=0.05, takeover_timeout=1).take() is None
    assert f"{file} was written by job 17 on n1; checking for up to 1 s whether that job runs" in caplog.text


def test_old_claim_is_taken_over_at_once(tmp_path: Path) -> None:
    long_ago = time.time() - STALE_AFTER_S - 60
    os.utime(leave(tmp_path, FIRST), (long_ago, long_ago))
    assert Claim(tmp_path, SECOND, takeover_timeout=LONG).take() is None


def _take_and_die(rank: int, directory: str) -> None:
    Claim(Path(directory)).take()
    os.kill(os.getpid(), signal.SIGKILL)


def test_claim_of_a_job_killed_on_the_same_node_is_taken_over_at_once(tmp_path: Path) -> None:
    [(killed, pipe)] = start(1, _take_and_die, str(tmp_path))
    killed.join(LONG)
    pipe.close()
    assert killed.exitcode == -signal.SIGKILL and (tmp_path / CLAIM_FILE).exists()
    assert Claim(tmp_path, takeover_timeout=LONG).take() is None


def test_requeued_job_takes_its_claim_at_once_and_the_old_run_loses_the_claim(tmp_path: Path) -> None:
    before, now = (
        Claim(tmp_path, FIRST, touch_period=0.05),
        Claim(tmp_path, ClaimOwner("reef-17", "job 17", "n2"), takeover_timeout=LONG),
    )
    assert (before.take(), now.take()) == (None, None)
    wait_for(lambda: before.new_owner)
    assert str(before.new_owner) == "job 17 on n2"
    before.release()
    assert (tmp_path / CLAIM_FILE).exists(), "it is not the earlier turn's to take away"


def test_concurrent_claims_have_a_single_winner(tmp_path: Path) -> None:
    claims = [
        Claim(tmp_path, ClaimOwner(f"reef-9_{n}", f"job 9_{n}", "n1"), touch_period=0.05, takeover_timeout=LONG)
        for n in range(8)
    ]
    with ThreadPoolExecutor(8) as threads:
        found = list(threads.map(Claim.take, claims))
    [first] = [claim.owner for claim, other in zip(claims, found, strict=True) if other is None]
    assert [other for other in found if other is not None] == [first] * 7
    for claim in claims:
        claim.release()


def test_process_that_ends_removes_its_claim(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from shoal.train.checkpoint.claim import Claim\n"
    program += "Claim(Path(sys.argv[1])).take(); raise ValueError"
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], timeout=LONG, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_dangling_link_in_place_of_the_claim_is_replaced(tmp_path: Path) -> None:
    (tmp_path / CLAIM_FILE).symlink_to(tmp_path / "nowhere")
    assert Claim(tmp_path, SECOND, takeover_timeout=LONG).take() is None
    assert json.loads((tmp_path / CLAIM_FILE).read_text())["name"] == "job 18"


def test_unwritable_directory_is_reported_and_does_not_stop_the_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "saved").write_text("a file")
    assert Claim(tmp_path / "saved").take() is None
    assert f"cannot keep other jobs from writing to {tmp_path}/saved: [Errno" in caplog.text


@cases(
    "environ, run, name",
    ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "reef"}, "reef-7", "job 7 on n1"),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}, "-7_3", "job 7_3 on n1"),
    ({"SLURM_JOB_ID": "7", "SHOAL_RUN_ID": "reef-7-c0de"}, "reef-7-c0de", "job 7 on n1"),
    ({}, f"n1-{os.getpid()}", f"process {os.getpid()} on n1"),
    ids=["job", "member of an array", "with a run of its own", "no job"],
)
def test_job_identity_is_equal_over_requeues_and_different_for_array_tasks(
    environ: dict[str, str], run: str, name: str
) -> None:
    writer = ClaimOwner.here({**environ, "SLURMD_NODENAME": "n1"})
    assert (writer.run, str(writer)) == (run, name)


def test_run_is_rejected_in_a_directory_claimed_by_another_job(tmp_path: Path) -> None:
    with touching(leave(tmp_path, FIRST)), pytest.raises(CheckpointError) as caught:
        next(Run(build("plain"), tmp_path, environ={"SLURM_JOB_ID": "18"}).steps(3))
    assert str(caught.value).startswith(f"job 17 on n1 writes its checkpoints to {tmp_path} now\n")
    assert "wait for its end or cancel it" in caught.value.fix


def test_reading_a_checkpoint_needs_no_claim_and_deletes_nothing(tmp_path: Path) -> None:
    state = build("plain")
    for _ in Run(state, tmp_path, environ={}).steps(1):
        train_step(state)
    being_written = tmp_path / "step-2.tmp-9f31c2e8"
    being_written.mkdir()
    with touching(leave(tmp_path, FIRST)):
        assert Checkpointer(tmp_path).restore(build("plain")) == 1
    assert being_written.exists()


def test_job_that_lost_its_claim_stops_saving_and_names_the_owner(tmp_path: Path) -> None:
    state, checkpointer = build("plain"), Checkpointer(tmp_path)
    checkpointer.claim({"SLURM_JOB_ID": "17"})
    Claim(tmp_path, ClaimOwner("-17", "job 17", "n2")).take()
    steps = itertools.count(1)
    wait_for(lambda: not checkpointer.save(next(steps), state).committed)
    assert checkpointer.last is not None
    assert checkpointer.last.error == f"rank 0: CheckpointError: job 17 on n2 writes to {tmp_path} now"
    checkpointer.close()
