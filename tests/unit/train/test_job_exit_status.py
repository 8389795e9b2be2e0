"""A job that saves its work and exits: the tracker and the progress file show whether it is requeued."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.support.cases import cases

from shoal.train.env import read_env
from shoal.train.errors import StopExit
from shoal.train.progress import Progress
from shoal.train.tracking import tracker


@cases(
    "error, status",
    (StopExit(0, requeued=True), "SCHEDULED"),
    (StopExit(143, requeued=False), "KILLED"),
    (SystemExit(0), "FINISHED"),
    (SystemExit(85), "FAILED"),
)
def test_run_status_is_scheduled_or_killed(tmp_path: Path, error: SystemExit, status: str) -> None:
    with pytest.raises(type(error)), tracker(directory=tmp_path, env=read_env({}), environ={}, system_every=0):
        raise error
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [record["status"] for record in records if "status" in record] == ["RUNNING", status]


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
