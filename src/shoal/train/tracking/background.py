"""The thread beside training that brings records to the disk and to the server, and takes its time when it must."""

from __future__ import annotations

import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.train.tracking.server import Unavailable
from shoal.train.tracking.shipping import Shipping
from shoal.train.tracking.spool import Spool

PERIOD = 2.0
"""How long records may wait for company, in seconds."""
SYNC_PERIOD = 5.0
LONGEST_PAUSE = 60.0

log = logging.getLogger("shoal.train")


class Background:
    """Syncs spools and ships them until it is stopped. Its troubles are logged once a minute, and go no further."""

    def __init__(self, spools: Sequence[Spool], shipping: Shipping | None, period: float = PERIOD) -> None:
        self._spools = tuple(spools)
        self._shipping = shipping
        self._period = period
        self._wake = threading.Event()
        self._done = threading.Condition()
        self._rounds_begun = self._rounds_ended = 0
        self._stopping = False
        self._failures = 0
        self._next_try = 0.0
        self._next_sync = time.monotonic() + SYNC_PERIOD
        self._complained = (0.0, "")
        self._thread = threading.Thread(target=self._loop, name="shoal-tracking", daemon=True)
        self._thread.start()

    def flush(self, timeout: float) -> bool:
        """Wait until all that was recorded is on disk and sent, but no longer than that. True if it is."""
        sizes = {spool.path: _size(spool.path) for spool in self._spools}
        deadline = time.monotonic() + timeout
        with self._done:
            begun = self._rounds_begun
            self._next_try = self._next_sync = 0.0
            self._wake.set()
            # The round that is under way may have looked before the last record came: it takes one that begins now.
            while not (self._rounds_ended > begun and (self._has(sizes) or self._failures)):
                if not self._thread.is_alive() or not self._done.wait(max(0.0, deadline - time.monotonic())):
                    break
        return self._has(sizes)

    def stop(self, timeout: float) -> bool:
        """Flush, and end the thread. One that hangs in a request is left behind: it ends with the process."""
        done = self.flush(timeout)
        self._stopping = True
        self._wake.set()
        self._thread.join(0.2)
        return done

    @property
    def ended(self) -> bool:
        return not self._thread.is_alive()

    def _has(self, sizes: dict[Path, int]) -> bool:
        if self._shipping is None:
            return True
        return all(self._shipping.acknowledged.get(path, 0) >= size for path, size in sizes.items())

    def _loop(self) -> None:
        while not self._stopping:
            self._wake.clear()
            self._rounds_begun += 1
            self._sync()
            more = self._ship()
            with self._done:
                self._rounds_ended = self._rounds_begun
                self._done.notify_all()
            if not more:
                self._wake.wait(self._period)

    def _sync(self) -> None:
        if time.monotonic() >= self._next_sync:
            self._next_sync = time.monotonic() + SYNC_PERIOD
            for spool in self._spools:
                spool.sync()

    def _ship(self) -> bool:
        if self._shipping is None or time.monotonic() < self._next_try:
            return False
        try:
            more = self._shipping.ship()
        except Exception as error:  # whatever a server or a disk comes up with, it is not training's trouble
            self._failures += 1
            self._next_try = time.monotonic() + pause(self._failures, random.random)
            self._complain(str(error) if isinstance(error, Unavailable) else f"{type(error).__name__}: {error}")
            return False
        if self._failures:
            log.warning("tracking: %s takes records again", self._shipping.server.uri)
        self._failures, self._complained = 0, (0.0, "")
        return more

    def _complain(self, text: str) -> None:
        when, what = self._complained
        if text != what or time.monotonic() - when > 60:
            self._complained = (time.monotonic(), text)
            log.warning("tracking: %s; records wait on disk, training goes on", text)


def pause(failures: int, chance: Callable[[], float]) -> float:
    """How long to leave a server alone that failed so often: longer each time, and not all jobs at once."""
    return float(min(LONGEST_PAUSE, 2.0 ** min(failures - 1, 10)) * (0.5 + chance() / 2))


def _size(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_size
    return 0
