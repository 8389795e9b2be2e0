"""Stops a run at a step boundary, on all ranks at once, when Slurm signals that the job must end.

The handler only records the signal. At the next step boundary `Stopper.agree` runs one small all-reduce, so that all
ranks stop at the same step even if the signal reached only one. A save inside a handler, as is common, would start a
collective in the middle of another.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

from shoal.contract import KILL_WAIT_S, SHOAL_GRACE_SECONDS, SHOAL_JOB_DIR, STOP_NOTE, STOP_SIGNALS
from shoal.train.dist import RankGroup

log = logging.getLogger("shoal.train.stop")

SAVE_MARGIN_S = 5.0
"""Added to the time of a save: to agree, to requeue, and because saves vary."""

_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class Stop:
    """All ranks have agreed to stop after this step."""

    step: int
    reason: str
    """The signal's name, or "time limit" if no signal came and the end is near."""
    seconds_left: float | None
    """Until the kill, on the rank with the least time. None if unknown."""
    save_seconds: float
    """How long a save takes, on the slowest rank."""

    @property
    def in_time(self) -> bool:
        """Whether a save is expected to end before the kill."""
        return self.seconds_left is None or self.save_seconds <= self.seconds_left


class Stopper:
    """Records stop signals from its creation on. Create it early, in the main thread; `close` restores the handlers.

    `grace` is how many seconds pass between signal and kill. Without it, SHOAL_GRACE_SECONDS for a warning (SIGUSR1,
    SIGUSR2) and Slurm's KillWait for SIGTERM.
    """

    def __init__(self, grace: float | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("create Stopper in the main thread: Python delivers signals to no other")
        self._warning_grace = grace if grace is not None else _read_seconds(environ, SHOAL_GRACE_SECONDS)
        self._sigterm_grace = grace if grace is not None else float(KILL_WAIT_S)
        self._end_time = _read_seconds(environ, "SLURM_JOB_END_TIME")
        self._signal = 0
        self._received_at = 0.0
        self._ranks: RankGroup | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {number: signal.signal(number, self._on_signal) for number in STOP_SIGNALS}
        _protect_forked_workers()
        if not self._signal:
            self._signal, self._received_at = _read_stop_note(environ)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._received_at = number, time.monotonic()
        previous = self._previous.get(number)
        # A forked child runs this too, until it has its own handlers: only the parent calls the previous one.
        if callable(previous) and os.getpid() == self._pid:
            previous(number, frame)

    @property
    def received_signal(self) -> str:
        """The name of the signal that this rank has received; empty if none. Other ranks may differ."""
        return signal.Signals(self._signal).name if self._signal else ""

    def agree(self, step: int, *, save_seconds: float = 0.0) -> Stop | None:
        """Whether any rank must stop. Collective: call it on every rank, once per step."""
        if self._ranks is None:
            self._ranks = RankGroup()
        seconds_left = self._seconds_left()
        near = seconds_left is not None and seconds_left <= save_seconds + SAVE_MARGIN_S
        requested = self._signal or (_TIME_LIMIT if near else 0)
        milliseconds_left = _NO_LIMIT if seconds_left is None else int(seconds_left * 1000)
        # The least time left of all ranks is the largest of the negated ones.
        reached, negated_left, save_ms = self._ranks.max_over_ranks(
            requested, -milliseconds_left, int(save_seconds * 1000)
        )
        if not reached:
            return None
        reason = "time limit" if reached == _TIME_LIMIT else signal.Signals(reached).name
        stop = Stop(step, reason, None if negated_left == -_NO_LIMIT else -negated_left / 1000, save_ms / 1000)
        if self._ranks.rank == 0:
            limit = "" if stop.seconds_left is None else f", {stop.seconds_left:.0f} s before the kill"
            log.warning("stopping after step %d: %s%s", step, reason, limit)
            if not stop.in_time:
                log.error("a save takes %.1f s, more than the time left; saving anyway", stop.save_seconds)
        return stop

    def _seconds_left(self) -> float | None:
        """Until the kill: the grace time after the signal or the job's time limit, whichever ends first."""
        limits = []
        if self._signal:
            grace = self._sigterm_grace if self._signal == signal.SIGTERM else self._warning_grace
            if grace is not None:
                limits.append(self._received_at + grace - time.monotonic())
        if self._end_time is not None:
            until_end = self._end_time - time.time()
            # After the time limit only the grace time since SIGTERM counts.
            if until_end > 0 or not limits:
                limits.append(until_end)
        return min(limits, default=None)

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}


_TIME_LIMIT = 1
"""Stands for the time limit in the all-reduce; smaller than any stop signal, which takes precedence."""


def _read_stop_note(environ: Mapping[str, str]) -> tuple[int, float]:
    """The signal that came while this script was starting, and when: the job's runner writes it to a file."""
    note = Path(environ.get(SHOAL_JOB_DIR, ""), f"{STOP_NOTE}.{environ.get('SLURM_RESTART_COUNT') or 0}")
    try:
        if SHOAL_JOB_DIR in environ and (number := int(note.read_text())) in STOP_SIGNALS:
            return number, time.monotonic() - max(0.0, time.time() - note.stat().st_mtime)
    except (OSError, ValueError):
        pass
    return 0, 0.0


def _read_seconds(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        log.error("%s=%r is ignored: not a number of seconds", name, text)
        return None


# Data workers


def worker_signals(worker_id: int = 0) -> None:
    """Keep a DataLoader worker alive when the job gets a stop signal. Pass it as `worker_init_fn`.

    Forked workers do not need it; workers of another `multiprocessing_context`, and by default of Python 3.14, do.
    Slurm may signal every process of a job. If a worker died, the trainer would fail for want of a batch instead of
    saving. The worker still ends when its trainer stops it, or has ended.
    """
    trainer = os.getppid()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A handler does not get the sender of SIGTERM; a thread in sigtimedwait does.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    # For threads of libraries that were started before the mask.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    threading.Thread(target=_wait_for_trainer, args=(trainer,), name="shoal-worker-signals", daemon=True).start()


def _wait_for_trainer(trainer: int) -> None:
    while os.getppid() == trainer:
        info = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if info is not None and info.si_pid == trainer:
            os._exit(0)  # as torch's own handler in a worker does
    os._exit(1)


@cache
def _protect_forked_workers() -> None:
    """Let workers that a DataLoader of this process forks ignore stop signals. Other children are not changed."""

    def in_child() -> None:
        stopper_active = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Stopper)
        if stopper_active and _is_forked_by("torch.utils.data.dataloader"):
            worker_signals()

    os.register_at_fork(after_in_child=in_child)


def _is_forked_by(module: str) -> bool:
    """Whether a function of this module has made the current fork: it is still on the stack."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


@contextmanager
def hold_stop_signals() -> Iterator[None]:
    """Block stop signals while workers start (`iter(loader)`), until `worker_signals` runs in them.

    Signals that arrive meanwhile are delivered to the trainer when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
