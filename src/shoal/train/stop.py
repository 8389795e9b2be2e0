"""Stops a run at a step boundary, on all ranks at once, when Slurm says that the job must end.

The handler only notes the signal. At the next step boundary `Stopper.agree` asks all ranks with one tiny all-reduce, so
that they stop at the same step even where the signal reached one of them. Saving from inside a handler, as is often
done, starts a collective in the middle of another.
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

from shoal.train.contract import KILL_WAIT, SHOAL_GRACE_SECONDS, SHOAL_JOB_DIR, STOP_NOTE, STOP_SIGNALS
from shoal.train.ranks import Ranks

log = logging.getLogger("shoal.train.stop")

MARGIN = 5.0
"""Seconds kept free beside the time a save takes: to agree, to requeue, and because saves vary."""

_NO_LIMIT = 1 << 40


@dataclass(frozen=True)
class Stop:
    """All ranks have agreed to stop after this step."""

    step: int
    reason: str
    """The signal's name, or "time limit" where no signal came and the end is near."""
    seconds_left: float | None
    """Until the kill, on the rank that has the least. None where nobody knows."""
    save_seconds: float
    """How long a save takes, on the slowest rank."""

    @property
    def in_time(self) -> bool:
        """Whether a save is expected to end before the kill."""
        return self.seconds_left is None or self.save_seconds <= self.seconds_left


class Stopper:
    """Notes the signals from the moment it is made. Make it first thing, in the main thread; `close` gives them back.

    `grace` is how many seconds pass between signal and kill. Without it, SHOAL_GRACE_SECONDS for a warning (SIGUSR1,
    SIGUSR2) and Slurm's KillWait for SIGTERM.
    """

    def __init__(self, grace: float | None = None, *, environ: Mapping[str, str] = os.environ) -> None:
        if threading.current_thread() is not threading.main_thread():
            raise RuntimeError("Stopper must be made in the main thread: Python delivers signals to no other")
        self._after_warning = grace if grace is not None else _number(environ, SHOAL_GRACE_SECONDS)
        self._after_sigterm = grace if grace is not None else float(KILL_WAIT)
        self._end_time = _number(environ, "SLURM_JOB_END_TIME")
        self._signal = 0
        self._noted_at = 0.0
        self._ranks: Ranks | None = None
        self._pid = os.getpid()
        self._previous: dict[int, Any] = {number: signal.signal(number, self._note) for number in STOP_SIGNALS}
        _keep_forked_workers()
        if not self._signal:
            self._signal, self._noted_at = _warned_before(environ)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if not self._signal:
            self._signal, self._noted_at = number, time.monotonic()
        previous = self._previous.get(number)
        # A child forked from us runs this too, until it has handlers of its own: not its business to tell others.
        if callable(previous) and os.getpid() == self._pid:
            previous(number, frame)

    @property
    def noted(self) -> str:
        """The signal this rank has got, by name, or an empty string. Others may have got another, or none."""
        return signal.Signals(self._signal).name if self._signal else ""

    def agree(self, step: int, *, save_seconds: float = 0.0) -> Stop | None:
        """Ask all ranks whether any must stop. Collective: call it on every rank, once a step."""
        if self._ranks is None:
            self._ranks = Ranks()
        left = self._seconds_left()
        near = left is not None and left <= save_seconds + MARGIN
        wanted = self._signal or (_TIME_LIMIT if near else 0)
        reached, minus_left, milliseconds = self._ranks.largest(
            wanted, -int(left * 1000) if left is not None else -_NO_LIMIT, int(save_seconds * 1000)
        )
        if not reached:
            return None
        reason = "time limit" if reached == _TIME_LIMIT else signal.Signals(reached).name
        stop = Stop(step, reason, None if minus_left == -_NO_LIMIT else -minus_left / 1000, milliseconds / 1000)
        if self._ranks.rank == 0:
            limit = "" if stop.seconds_left is None else f", {stop.seconds_left:.0f} s before the kill"
            log.warning("stopping after step %d: %s%s", step, reason, limit)
            if not stop.in_time:
                log.error("a save has taken %.1f s so far, more than is left; trying all the same", stop.save_seconds)
        return stop

    def _seconds_left(self) -> float | None:
        """Until the kill: of the grace since the signal, and of the job's time limit, whichever ends first."""
        limits = []
        if self._signal:
            known = self._after_sigterm if self._signal == signal.SIGTERM else self._after_warning
            if known is not None:
                limits.append(self._noted_at + known - time.monotonic())
        if self._end_time is not None:
            until_end = self._end_time - time.time()
            # Past the time limit what counts is the grace since SIGTERM; without any signal, that none came.
            if until_end > 0 or not limits:
                limits.append(until_end)
        return min(limits, default=None)

    def close(self) -> None:
        """Give the signals back to whoever had them."""
        for number, previous in self._previous.items():
            signal.signal(number, previous if previous is not None else signal.SIG_DFL)
        self._previous = {}


_TIME_LIMIT = 1
"""Stands in the all-reduce for the time limit; smaller than any signal of ours, which therefore wins."""


def _warned_before(environ: Mapping[str, str]) -> tuple[int, float]:
    """The warning that came while this script was still starting, and when: whoever runs the rank left word of it."""
    note = Path(environ.get(SHOAL_JOB_DIR, ""), f"{STOP_NOTE}.{environ.get('SLURM_RESTART_COUNT') or 0}")
    try:
        if SHOAL_JOB_DIR in environ and (number := int(note.read_text())) in STOP_SIGNALS:
            return number, time.monotonic() - max(0.0, time.time() - note.stat().st_mtime)
    except (OSError, ValueError):
        pass
    return 0, 0.0


def _number(environ: Mapping[str, str], name: str) -> float | None:
    text = environ.get(name, "")
    if not text:
        return None
    try:
        return float(text)
    except ValueError:
        log.error("%s is %r, which is not a number of seconds: ignored", name, text)
        return None


# Data workers


def worker_signals(worker_id: int = 0) -> None:
    """Keep a DataLoader worker alive through the signals that stop the job.

    Workers that are forked have it by themselves. Where they are not (`multiprocessing_context`, and Python 3.14 unless
    told otherwise), pass it as `worker_init_fn`.

    Slurm may signal every process of a job. A worker that dies of it takes the batch that the trainer is waiting for
    along, and the trainer fails instead of saving. The worker still ends when its trainer tells it to, or is gone.
    """
    trainer = os.getppid()
    for number in (signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    # A handler cannot see who sent SIGTERM; a thread that waits for it can.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    signal.signal(signal.SIGTERM, _do_nothing)  # for a thread of a library, started before the mask
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1, signal.SIGUSR2})
    threading.Thread(target=_obey, args=(trainer,), name="shoal-worker-signals", daemon=True).start()


def _obey(trainer: int) -> None:
    while os.getppid() == trainer:
        sent = signal.sigtimedwait({signal.SIGTERM}, 1.0)
        if sent is not None and sent.si_pid == trainer:
            os._exit(0)  # as torch's own handler in a worker does
    os._exit(1)


@cache
def _keep_forked_workers() -> None:
    """From now on, the workers that a DataLoader of this process forks outlive the signals. Other children do not."""

    def in_child() -> None:
        noting = isinstance(getattr(signal.getsignal(signal.SIGTERM), "__self__", None), Stopper)
        if noting and _forked_by("torch.utils.data.dataloader"):
            worker_signals()

    os.register_at_fork(after_in_child=in_child)


def _forked_by(module: str) -> bool:
    """Whether the fork that has just been made is the doing of this module: its call is still under way."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != module:
        frame = frame.f_back
    return frame is not None


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


@contextmanager
def starting_workers() -> Iterator[None]:
    """Hold the signals back while workers are started (`iter(loader)`), until `worker_signals` runs in them.

    The trainer gets what came in between when the block ends.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
