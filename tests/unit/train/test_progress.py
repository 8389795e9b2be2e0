"""Progress: right numbers, at sensible moments, on rank 0 only."""

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cases import cases

from shoal.train.env import read_env
from shoal.train.errors import StopExit
from shoal.train.progress import Progress, format_line

ENV = read_env({})


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Loss:
    """A loss on a GPU: reading it costs something."""

    def __init__(self, value: float) -> None:
        self.value, self.reads = value, 0

    def __float__(self) -> float:
        self.reads += 1
        return self.value


def run(progress: Progress, clock: Clock, first: int, last: int, seconds: float, loss: Any = 0.5) -> None:
    for step in range(first, last):
        clock.now += seconds
        progress.step(step, loss)


def read(directory: Path) -> dict[str, Any]:
    text = (directory / "progress.json").read_text()
    assert text.count("\n") == 1
    found: dict[str, Any] = json.loads(text)
    return found


def test_speed_eta_and_mfu_are_computed(tmp_path: Path) -> None:
    clock, lines = Clock(), list[str]()
    env = replace(ENV, world_size=4, restart_count=2)
    progress = Progress(
        1000, samples_per_step=32, flops_per_sample=1e9, peak_flops=1e11, env=env, directory=tmp_path,
        write=lines.append, clock=clock,
    )  # fmt: skip
    clock.now += 500  # compiling: not in the speed
    run(progress, clock, 1, 101, 0.5)
    found = read(tmp_path)
    assert found["step"] >= 97 and found["steps_per_second"] == pytest.approx(2)
    assert found["samples_per_second"] == pytest.approx(64)
    assert found["eta_seconds"] == pytest.approx((1000 - found["step"]) / 2)
    assert found["mfu"] == pytest.approx(64e9 / 4e11)
    assert (found["loss"], found["total_steps"], found["state"], found["restarts"]) == (0.5, 1000, "running", 2)
    assert lines[0] == "step 1/1000  loss 0.5"


def test_lines_are_frequent_at_first_then_once_a_minute() -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(env=ENV, environ={}, write=lines.append, clock=clock)
    run(progress, clock, 0, 60, 1)
    early = len(lines)
    run(progress, clock, 60, 660, 1)
    assert early in (5, 6) and len(lines) - early in (10, 11)


def test_fast_loop_rarely_writes_the_file_and_rarely_reads_the_loss(tmp_path: Path) -> None:
    clock, loss = Clock(), Loss(1.0)
    progress = Progress(env=ENV, directory=tmp_path, write=lambda line: None, clock=clock)
    run(progress, clock, 0, 10_000, 0.001, loss)
    assert loss.reads <= 6


def test_loss_is_detached_from_its_graph(tmp_path: Path) -> None:
    weight = torch.ones(1, requires_grad=True)
    loss = (weight * 3).sum()
    whole = weakref.ref(loss)
    progress = Progress(env=ENV, directory=tmp_path, write=lambda line: None)
    progress.step(1, loss)  # torch would warn of it, and a warning is an error here
    del loss
    assert read(tmp_path)["loss"] == 3.0
    assert whole() is None, "what it was computed from is not kept"


def test_speed_covers_the_last_minute(tmp_path: Path) -> None:
    clock = Clock()
    progress = Progress(env=ENV, directory=tmp_path, write=lambda line: None, clock=clock)
    run(progress, clock, 0, 100, 1)
    run(progress, clock, 100, 150, 4)
    assert read(tmp_path)["steps_per_second"] == pytest.approx(0.25, rel=0.1)


def test_resumed_job_counts_only_its_own_steps(tmp_path: Path) -> None:
    clock = Clock()
    progress = Progress(1000, env=ENV, directory=tmp_path, write=lambda line: None, clock=clock)
    run(progress, clock, 900, 931, 2)
    found = read(tmp_path)
    assert found["steps_per_second"] == pytest.approx(0.5)
    assert found["eta_seconds"] == pytest.approx((1000 - found["step"]) * 2)


@cases("state", "done", "stopped")
def test_end_is_written_at_once(tmp_path: Path, state: Any) -> None:
    clock, lines = Clock(), list[str]()
    progress = Progress(10, env=ENV, directory=tmp_path, write=lines.append, clock=clock)
    run(progress, clock, 1, 6, 0.1)
    progress.close(state)
    progress.close()
    assert (read(tmp_path)["step"], read(tmp_path)["state"]) == (5, state) and lines[-1].endswith(state)
    progress.step(6)
    assert read(tmp_path)["step"] == 5


def test_last_step_is_always_shown() -> None:
    clock, lines = Clock(), list[str]()
    run(Progress(10, env=ENV, environ={}, write=lines.append, clock=clock), clock, 1, 11, 0.01)
    assert lines[-1].startswith("step 10/10  loss 0.5")


def test_non_finite_loss_is_reported_and_the_file_stays_valid_json(tmp_path: Path) -> None:
    lines = list[str]()
    Progress(env=ENV, directory=tmp_path, write=lines.append).step(1, float("nan"))
    assert (read(tmp_path)["loss"], read(tmp_path)["diverged"]) == (None, True)
    assert lines == ["step 1  loss is not finite"]


def test_other_ranks_print_nothing(tmp_path: Path) -> None:
    progress = Progress(env=replace(ENV, rank=1), directory=tmp_path, write=pytest.fail)
    progress.step(1, 0.5)
    progress.close()
    assert list(tmp_path.iterdir()) == []


def test_file_is_in_the_job_directory_and_a_missing_directory_is_ignored(tmp_path: Path) -> None:
    for place in (tmp_path, tmp_path / "gone"):
        Progress(env=ENV, environ={"SHOAL_JOB_DIR": str(place)}, write=lambda line: None).step(1, 0.5)
    assert [path.name for path in tmp_path.iterdir()] == ["progress.json"]


def test_line_contains_only_available_values() -> None:
    numbers = {"step": 50, "total_steps": 200, "loss": 0.123456, "samples_per_second": 12345.6, "mfu": 0.412}
    assert format_line({**numbers, "eta_seconds": 93784}) == (
        "step 50/200  loss 0.1235  12,346 samples/s  MFU 41.2%  ETA 1-02:03:04"
    )
    assert format_line({"step": 3, "total_steps": None, "steps_per_second": 1.5}) == "step 3  1.5 steps/s"


def test_progress_state_is_done_stopped_or_unchanged_after_a_failure(tmp_path: Path) -> None:
    def state_after(error: BaseException | None) -> str:
        progress = Progress(2, env=read_env({}), directory=tmp_path, write=lambda line: None)
        try:
            with progress:
                progress.step(1)
                if error is not None:
                    raise error
        except (StopExit, ValueError):
            pass
        return str(json.loads((tmp_path / "progress.json").read_text())["state"])

    assert state_after(None) == "done" and state_after(StopExit(0, requeued=True)) == "stopped"
    assert state_after(ValueError()) == "running"
