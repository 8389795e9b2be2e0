"""Killed at any moment of a save, a run still has a whole checkpoint, finds it and continues."""

import os
import signal
import sys
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest
from tests.unit.train.procs import kill, ranks, start
from tests.unit.train.training import build, digest, train_step

from shoal.train.checkpoint import Checkpointer
from shoal.train.checkpoint import layout as files

WATCHED = ("open", "os.rename", "os.mkdir", "os.rmdir", "os.remove", "os.scandir")


def _save_twice(rank: int, directory: str, victim: int, kill_at: int, asynchronous: bool) -> None:
    """Save step 1, then step 2, and die at the given operation on the directory during the second save."""
    state = build("fsdp")
    checkpointer = Checkpointer(directory, keep_last=1, asynchronous=asynchronous)
    train_step(state)
    assert checkpointer.save(1, state, wait=True).committed
    Path(directory, f"parameters-1-{rank}").write_text(digest(state))
    train_step(state)
    Path(directory, f"parameters-2-{rank}").write_text(digest(state))
    if rank == victim:
        _die_at(kill_at, directory)
    checkpointer.save(2, state)
    checkpointer.close()


def _die_at(count: int, directory: str) -> None:
    seen: list[str] = []

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in WATCHED and any(str(arg).startswith(f"{directory}/step-") for arg in args):
            seen.append(event)
            if len(seen) > count:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def _resume(rank: int, directory: str) -> tuple[int | None, str]:
    state = build("fsdp", seed=9)
    checkpointer = Checkpointer(directory)
    checkpointer.claim()
    step = checkpointer.restore(state)
    restored = digest(state)
    train_step(state)
    assert checkpointer.save(5, state).committed
    checkpointer.close()
    return step, restored


def _run_until_one_dies(count: int, *args: Any) -> list[int]:
    """Exit statuses. When one rank dies the others are killed too, as Slurm would."""
    children = start(count, *args)
    try:
        wait([child.sentinel for child, _ in children], 600)
        if all(child.exitcode in (None, 0) for child, _ in children):
            for child, _ in children:
                child.join(300)
    finally:
        kill(children)
    return [child.exitcode for child, _ in children]


def _whole_checkpoint_is_found(directory: Path, count: int) -> int:
    """The step a new set of ranks resumes from, having proved that they got exactly what was saved."""
    newest = files.committed(directory)[0]
    manifest = files.read_manifest(newest)
    assert files.find_damage(newest, manifest.files) == ""
    resumed = ranks(count, _resume, str(directory))
    for rank, (step, restored) in enumerate(resumed):
        assert step == files.step_of(newest)
        assert restored == (directory / f"parameters-{step}-{rank}").read_text()
    assert files.list_leftovers(directory) == []
    return files.step_of(newest)


def test_kill_at_each_file_operation_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    resumed_from = []
    for kill_at in range(60):
        directory = tmp_path / str(kill_at)
        directory.mkdir()
        statuses = _run_until_one_dies(1, _save_twice, str(directory), 0, kill_at, False)
        resumed_from.append(_whole_checkpoint_is_found(directory, 1))
        if statuses == [0]:
            break
        assert statuses == [-signal.SIGKILL]
    else:
        pytest.fail("a save takes more file operations than the test looks at")
    # Before the commit the old one, after it the new one, never back; and enough points to mean something.
    assert resumed_from == sorted(resumed_from)
    assert resumed_from.count(1) >= 5 and resumed_from.count(2) >= 3


@pytest.mark.parametrize(("victim", "kill_at"), [(0, 1), (1, 1), (0, 6)])
@pytest.mark.parametrize("asynchronous", [False, True])
def test_ranks_killed_during_a_save_resume_together(
    tmp_path: Path, victim: int, kill_at: int, asynchronous: bool
) -> None:
    statuses = _run_until_one_dies(2, _save_twice, str(tmp_path), victim, kill_at, asynchronous)
    assert statuses[victim] == -signal.SIGKILL
    assert _whole_checkpoint_is_found(tmp_path, 2) == 1
