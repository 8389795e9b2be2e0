"""A loop over `Run.steps` survives what Slurm does to it: no step is lost or repeated."""

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.train.procs import ranks
from tests.unit.train.training import build, digest, train_step

from shoal.contract import EXIT_REQUEUE, EXIT_UNSAVED
from shoal.train.checkpoint import layout as files
from shoal.train.errors import StopExit
from shoal.train.run import Run
from shoal.train.stop import Stopper


def _train(rank: int, directory: str, kind: str, signal_at: int | None, asynchronous: bool) -> Any:
    state = build(kind)
    losses: dict[int, str] = {}
    try:
        for step in Run(state, directory, save_every=4, asynchronous=asynchronous, environ={}).steps(7):
            losses[step] = train_step(state)
            if step == signal_at and rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)
    except SystemExit as leaving:
        return leaving.code, losses, ""
    return 0, losses, digest(state)


@cases("kind, asynchronous", ("ddp", True), ("fsdp", False))
def test_signal_to_a_rank_loses_no_step_and_changes_no_bit(tmp_path: Path, kind: str, asynchronous: bool) -> None:
    whole = ranks(2, _train, str(tmp_path / "whole"), kind, None, asynchronous)
    stopped = ranks(2, _train, str(tmp_path / "cut"), kind, 4, asynchronous)
    (newest, *_) = files.committed(tmp_path / "cut")
    assert (newest.name, files.read_manifest(newest).reason) == ("step-5", "SIGTERM")
    resumed = ranks(2, _train, str(tmp_path / "cut"), kind, None, asynchronous)
    for rank in range(2):
        assert stopped[rank][0] == EXIT_REQUEUE and list(stopped[rank][1]) == [0, 1, 2, 3, 4]
        assert list(resumed[rank][1]) == [5, 6] and stopped[rank][1] | resumed[rank][1] == whole[rank][1]
        assert resumed[rank][2] == whole[rank][2]


def test_completed_run_does_nothing_when_started_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = build("plain")
    assert [train_step(state) and step for step in Run(state, tmp_path, environ={}).steps(3)] == [0, 1, 2]
    final = digest(state)
    told = f"training is already complete; to start over, move {tmp_path} away"
    assert told not in caplog.text
    again = build("plain", seed=3)
    assert list(Run(again, tmp_path, environ={}).steps(3)) == [] and digest(again) == final and told in caplog.text


def test_job_environment_sets_checkpoint_directory_and_run_id(tmp_path: Path) -> None:
    state = build("plain")
    state.run_id = ""
    environ = {"SHOAL_JOB_DIR": str(tmp_path), "SHOAL_RUN_ID": "cluster-7"}
    for _ in Run(state, environ=environ).steps(1):
        train_step(state)
    assert files.read_manifest(tmp_path / "checkpoints" / "step-1").run_id == "cluster-7"


def test_signal_at_the_last_step_lets_the_run_complete(tmp_path: Path) -> None:
    state = build("plain")
    for step in Run(state, tmp_path, environ={}).steps(2):
        train_step(state)
        if step == 1:
            signal.raise_signal(signal.SIGUSR1)
    assert [path.name for path in files.committed(tmp_path)] == ["step-2"]


def test_cancelled_job_saves_and_exits_with_the_sigterm_status(tmp_path: Path) -> None:
    (tmp_path / "scontrol").write_text('#!/bin/sh\n[ "$1" = show ] && echo "JobState=CANCELLED Reason=None"\n')
    (tmp_path / "scontrol").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    state, stopper = build("plain"), Stopper(environ={})
    with pytest.raises(SystemExit) as leaving:
        for _ in Run(state, tmp_path / "saved", stopper=stopper, environ=environ).steps(5):
            train_step(state)
            signal.raise_signal(signal.SIGTERM)
    stopper.close()
    assert leaving.value.code == 143 and [path.name for path in files.committed(tmp_path / "saved")] == ["step-1"]


@cases("saved_before", False, True)
def test_unsaved_stop_requeues_only_with_an_earlier_checkpoint(
    tmp_path: Path, saved_before: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/asked\n')
    (tmp_path / "scontrol").chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    state, stopper, place = build("plain"), Stopper(environ={}), tmp_path / "saved"
    run = Run(state, place, save_every=int(saved_before), stopper=stopper, environ=environ)
    with pytest.raises(StopExit) as leaving:
        for step in run.steps(5):
            train_step(state)
            if step == 2:
                shutil.rmtree(place, ignore_errors=True)
                place.write_text("a file where the directory was")
                signal.raise_signal(signal.SIGTERM)
    stopper.close()
    requeued = (tmp_path / "asked").exists() and "requeue 7" in (tmp_path / "asked").read_text()
    assert (requeued, leaving.value.requeued) == (saved_before, saved_before)
    assert leaving.value.code == (0 if saved_before else EXIT_UNSAVED)
    told = f"the job is not requeued. Fix the cause and run it again with {place}: it continues from step 0"
    assert (told in caplog.text) is not saved_before


def test_resumed_run_logs_its_first_step(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for again in (False, True):
        state = build("plain")
        for _ in Run(state, tmp_path, environ={}).steps(1):
            train_step(state)
        told = f"going on from step 1: {tmp_path}/step-1, written by 1 rank"
        assert (told in [record.getMessage() for record in caplog.records]) is again
