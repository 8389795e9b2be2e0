"""Ranks stop together, at a step boundary, whichever of them got the signal; data workers live until they do."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.support.cases import cases
from tests.unit.train.procs import fresh_ranks, start_script

from shoal import contract
from shoal.contract import KILL_WAIT_S
from shoal.remote.runner import node
from shoal.train import multiprocess
from shoal.train.stop import SAVE_MARGIN_S, Stop, Stopper


@pytest.fixture(autouse=True)
def signals_given_back() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)}
    yield
    assert before == {number: signal.getsignal(number) for number in before}


def _stopper(grace: float | None = None, **environ: str) -> Stopper:
    return Stopper(grace, environ=environ)


def _stopped(number: int | None, grace: float | None = None, save_seconds: float = 0.0, **environ: str) -> Stop | None:
    """What the ranks agree on at step 1, after this signal."""
    stopper = _stopper(grace, **environ)
    if number is not None:
        signal.raise_signal(number)
    stop = stopper.agree(1, save_seconds=save_seconds)
    stopper.close()
    return stop


def test_no_signal_means_no_stop() -> None:
    stopper = _stopper()
    assert stopper.agree(1) is None and stopper.received_signal == ""
    stopper.close()


@cases("number", signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
def test_each_signal_stops_at_the_next_step_and_is_named(number: signal.Signals) -> None:
    stop = _stopped(number, 100.0, 3.0)
    assert stop is not None and (stop.step, stop.reason, stop.save_seconds, stop.in_time) == (1, number.name, 3.0, True)
    assert stop.seconds_left is not None and 0 < stop.seconds_left <= 100


def test_save_longer_than_the_time_left_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    stop = _stopped(signal.SIGUSR1, None, 60.0, SHOAL_GRACE_SECONDS="10")
    assert stop is not None and not stop.in_time
    assert "a save takes 60.0 s, more than the time left; saving anyway" in caplog.text


def test_sigterm_leaves_kill_wait_and_a_plain_warning_an_unknown_time() -> None:
    assert _stopped(signal.SIGUSR1) == Stop(1, "SIGUSR1", None, 0.0)
    stop = _stopped(signal.SIGTERM, SHOAL_GRACE_SECONDS="600")  # that is how long a warning leaves
    assert stop is not None and stop.seconds_left is not None and stop.seconds_left <= KILL_WAIT_S


def test_every_process_between_slurm_and_the_script_forwards_the_stop_signals() -> None:
    assert set(node.STOP_SIGNALS) >= set(contract.STOP_SIGNALS)
    assert multiprocess.STOP_SIGNALS == contract.STOP_SIGNALS


def test_time_limit_stops_without_a_signal_while_a_save_still_fits() -> None:
    save = 20.0
    later, soon = (str(int(time.time() + save + more)) for more in (SAVE_MARGIN_S + 3600, 2))
    assert _stopped(None, None, save, SLURM_JOB_END_TIME=later) is None
    stop = _stopped(None, None, save, SLURM_JOB_END_TIME=soon)
    assert stop is not None and stop.reason == "time limit"


def test_time_limit_shortens_the_grace_and_is_ignored_once_past() -> None:
    stop = _stopped(signal.SIGUSR2, 600.0, SLURM_JOB_END_TIME=str(int(time.time() + 60)))
    assert stop is not None and stop.seconds_left is not None and stop.seconds_left <= 60
    stop = _stopped(signal.SIGTERM, 600.0, SLURM_JOB_END_TIME=str(int(time.time() - 5)))
    assert stop is not None and stop.seconds_left is not None and stop.seconds_left > 60


def test_invalid_grace_is_ignored_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    _stopper(SHOAL_GRACE_SECONDS="soon").close()
    assert "SHOAL_GRACE_SECONDS='soon' is ignored: not a number of seconds" in caplog.text


def test_warning_during_startup_is_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHOAL_JOB_DIR", str(tmp_path))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    assert _received_signal(tmp_path, 2) == ""
    node.note_warning(signal.SIGTERM)  # of which the script would have died
    assert _received_signal(tmp_path, 2) == ""
    node.note_warning(signal.SIGUSR1)
    assert _received_signal(tmp_path, 2) == "SIGUSR1"
    assert _received_signal(tmp_path, 3) == "", "that was the turn before"
    (tmp_path / "stop.3").write_text("")  # just being written
    assert _received_signal(tmp_path, 3) == ""


def _received_signal(directory: Path, restart: int) -> str:
    stopper = _stopper(SHOAL_JOB_DIR=str(directory), SLURM_RESTART_COUNT=str(restart))
    stopper.close()
    return stopper.received_signal


def test_warning_before_the_start_has_less_time_left(tmp_path: Path) -> None:
    (tmp_path / "stop.0").write_text(f"{int(signal.SIGUSR2)}\n")
    os.utime(tmp_path / "stop.0", (time.time() - 45, time.time() - 45))
    stop = _stopped(None, SHOAL_JOB_DIR=str(tmp_path), SHOAL_GRACE_SECONDS="60")
    assert stop is not None and stop.seconds_left is not None and stop.seconds_left <= 15


def test_previous_signal_handler_is_still_called() -> None:
    called: list[int] = []
    original = signal.signal(signal.SIGUSR1, lambda number, frame: called.append(number))
    try:
        stopper = _stopper()
        signal.raise_signal(signal.SIGUSR1)
        assert stopper.received_signal == "SIGUSR1"
        stopper.close()
        signal.raise_signal(signal.SIGUSR1)
        assert called == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, original)


def test_stopper_outside_the_main_thread_raises_with_the_reason() -> None:
    said: list[str] = []

    def make() -> None:
        try:
            Stopper()
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert said == ["create Stopper in the main thread: Python delivers signals to no other"]


def _signal_one_rank(rank: int, victim: int) -> Any:
    stopper = Stopper(environ={})
    for step in range(1, 10):
        if rank == victim and step == 4:
            os.kill(os.getpid(), signal.SIGUSR1)
        stop = stopper.agree(step, save_seconds=float(rank))
        if stop:
            return stop, stopper.received_signal
    return None


def test_all_ranks_stop_at_the_same_step_after_a_signal_to_a_single_rank() -> None:
    results = fresh_ranks(2, _signal_one_rank, 1)
    assert results == [(Stop(4, "SIGUSR1", None, 1.0), ""), (Stop(4, "SIGUSR1", None, 1.0), "SIGUSR1")]


# Data workers, in their own process group, which is signalled as a whole

TRAINER = """
import contextlib, os, signal, sys, time
import torch
from torch.utils.data import DataLoader, Dataset
from shoal.train.stop import Stopper, hold_stop_signals, worker_signals

class Slow(Dataset):
    def __len__(self): return 40_000
    def __getitem__(self, index):
        time.sleep(0.01)
        return index

if __name__ == "__main__":
    torch.set_num_threads(1)
    protect, context = sys.argv[1] == "protected", sys.argv[2]
    stopper = Stopper(environ={})
    if sys.argv[1] == "closed":
        stopper.close()
        signal.signal(signal.SIGTERM, lambda number, frame: None)
    loader = DataLoader(Slow(), batch_size=4, num_workers=1 + (context == "fork"), multiprocessing_context=context,
                        worker_init_fn=worker_signals if protect else None)
    with hold_stop_signals() if protect else contextlib.nullcontext():
        batches = iter(loader)
    print("workers", *(worker.pid for worker in batches._workers), flush=True)
    after = 0
    for step, batch in enumerate(batches):
        print("step", step, flush=True)
        after += stopper.agree(step) is not None
        if after == 5:
            break
    print("stopped for", stopper.received_signal, flush=True)
    del batches
    print("over", flush=True)
"""


def _signalled_trainer(tmp_path: Path, number: signal.Signals, protect: str, context: str) -> tuple[str, str, int]:
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    errors = tmp_path / "errors"
    trainer, output = start_script(script, protect, context, errors=errors)
    with output:
        try:
            seen = ""
            while not seen.endswith("step 3\n"):
                line = output.readline()
                assert line, errors.read_text()
                seen += line
            os.killpg(trainer.pid, number)
            rest = output.read()
        except BaseException:
            os.killpg(trainer.pid, signal.SIGKILL)
            raise
        finally:
            trainer.join(120)
    _wait_until_gone(seen.splitlines()[0].split()[1:])
    return seen + rest, errors.read_text(), trainer.exitcode


@cases(
    "number, context",
    (signal.SIGTERM, "fork"),
    (signal.SIGUSR1, "spawn"),
    (signal.SIGTERM, "spawn"),
    (signal.SIGUSR2, "fork"),
)
def test_data_workers_survive_a_group_signal_and_end_with_their_trainer(
    tmp_path: Path, number: signal.Signals, context: str
) -> None:
    output, errors, status = _signalled_trainer(tmp_path, number, "protected", context)
    assert f"stopped for {number.name}\nover\n" in output, errors
    assert status == 0


@cases("number", signal.SIGTERM, signal.SIGUSR1)
def test_forked_workers_of_any_loader_survive_the_signal(tmp_path: Path, number: signal.Signals) -> None:
    output, errors, status = _signalled_trainer(tmp_path, number, "bare", "fork")
    assert f"stopped for {number.name}\nover\n" in output, errors
    assert status == 0


@cases("protect, context", ("bare", "spawn"), ("closed", "fork"))
def test_unprotected_workers_die_first(tmp_path: Path, protect: str, context: str) -> None:
    output, errors, status = _signalled_trainer(tmp_path, signal.SIGTERM, protect, context)
    assert "stopped for" not in output
    # The trainer may just be reading from the one that dies.
    assert "is killed by signal: Terminated" in errors or "EOFError" in errors
    assert status != 0


def test_other_children_of_a_rank_are_unchanged(tmp_path: Path) -> None:
    script, errors = tmp_path / "fork.py", tmp_path / "errors"
    script.write_text("""
import os, signal
from shoal.train.stop import Stopper

stopper = Stopper(environ={})
if os.fork() == 0:
    print(signal.pthread_sigmask(signal.SIG_BLOCK, ()), flush=True)
    os._exit(0)
os.wait()
""")
    rank, output = start_script(script, errors=errors)
    with output:
        assert output.read() == "set()\n"
    rank.join(120)
    assert (rank.exitcode, errors.read_text()) == (0, "")


ORPHANS = TRAINER.replace('print("step", step, flush=True)', "os.kill(os.getpid(), signal.SIGKILL)")


def test_workers_end_when_their_trainer_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "trainer.py"
    script.write_text(ORPHANS)
    trainer, output = start_script(script, "protected", "fork", errors=tmp_path / "errors")
    with output:
        workers = output.readline().split()[1:]
        trainer.join(120)
    assert trainer.exitcode == -signal.SIGKILL and len(workers) == 2
    _wait_until_gone(workers)


def _wait_until_gone(workers: list[str]) -> None:
    for _ in range(600):
        if not any(_alive(Path("/proc", pid)) for pid in workers):
            return
        time.sleep(0.1)
    pytest.fail("the workers outlive their trainer")


def _alive(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
