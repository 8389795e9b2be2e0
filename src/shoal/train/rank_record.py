"""What the node can see of a rank from outside: its step, and its Python stack when it is asked for.

Both are anonymous files in memory (memfd) that this process keeps open: nothing to clean up, nobody else's to write.
The stack is asked for with STACK_SIGNAL, a real-time signal that no framework uses, and written by faulthandler without
running any Python code: it works while the rank waits inside a library. A process that handles this signal itself keeps
its handler, and has no stack to show.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import statistics
import threading
import time
from collections import deque
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from shoal.contract import RECORD_BYTES, STACK_MEMORY, STACK_SIGNAL, STEP_MEMORY

MEDIAN_STEPS = 64
"""So many steps have a say in how long one takes."""

Source = Literal["progress", "run"]


class RankRecord:
    """The record of this process. Made by `open_record`."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self.pid = os.getpid()
        self._rank = environ.get("RANK") or environ.get("SLURM_PROCID", "")
        self._file = os.memfd_create(STEP_MEMORY)
        self._source: Source | None = None
        self._last = 0.0
        self._durations: deque[float] = deque(maxlen=MEDIAN_STEPS)
        self._stack_file = _register_stack()

    def step(self, source: Source, step: int) -> None:
        """A step is over. Where two sources count the same steps, the first one that was seen counts."""
        self._source = self._source or source
        if source != self._source:
            return
        now = time.monotonic()
        if self._last:
            self._durations.append(now - self._last)
        self._last = now
        # The first step compiles and fills caches: it says nothing about the others.
        median = statistics.median(self._durations) if len(self._durations) > 1 else None
        self._write({"step": step, "clock": round(now, 3), "median_s": median and round(median, 6)})

    def end(self) -> None:
        """No further step is to be expected."""
        self._write({})

    def _write(self, values: Mapping[str, object]) -> None:
        text = json.dumps({"rank": self._rank, **values})
        with contextlib.suppress(OSError):
            os.pwrite(self._file, text.ljust(RECORD_BYTES - 1).encode() + b"\n", 0)


_record: RankRecord | None = None
_registered = False
"""Whether faulthandler has the signal, here or in the process that this one was forked from."""


def open_record(environ: Mapping[str, str] = os.environ) -> RankRecord | None:
    """The record of this process, made at the first call; None where the system has no such files."""
    global _record
    if not hasattr(os, "memfd_create"):
        return None
    if _record is None or _record.pid != os.getpid():  # a fork has its parent's
        try:
            _record = RankRecord(environ)
        except OSError:  # too many open files
            return None
    return _record


def record_step(source: Source, step: int, environ: Mapping[str, str] = os.environ) -> None:
    if record := open_record(environ):
        record.step(source, step)


def end_record() -> None:
    if _record is not None and _record.pid == os.getpid():
        _record.end()


def _register_stack() -> int | None:
    """Have faulthandler write the stacks of all threads when STACK_SIGNAL comes, unless the process handles it."""
    global _registered
    if signal.getsignal(STACK_SIGNAL) is not signal.SIG_DFL or (_is_handled() and not _registered):
        return None
    file = os.memfd_create(STACK_MEMORY)
    # faulthandler names threads by this number alone.
    os.write(file, b"main 0x%x\n" % (threading.main_thread().ident or 0))
    faulthandler.register(STACK_SIGNAL, file=file, all_threads=True)
    _registered = True
    return file


def _is_handled() -> bool:
    """Whether a library has a handler that Python does not know of."""
    try:
        status = Path("/proc/self/status").read_text()
        caught = int(status.partition("\nSigCgt:")[2].split()[0], 16)
    except (OSError, IndexError, ValueError):
        return False
    return bool(caught >> (STACK_SIGNAL - 1) & 1)
