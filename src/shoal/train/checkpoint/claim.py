"""Keeps two jobs from writing their checkpoints into one directory.

The job that writes there leaves WRITER.json, which says who it is, and touches it every few seconds. One that comes
later and sees it being touched is refused. A file that nobody touches was left by a job that died, and one of the same
job by its turn before: neither stands in the way. Locks of the file system would not do: sshfs has none, and over NFS
those of a dead node stay.

What cannot be read or written here is told and passed over: the checkpoint itself will say so louder.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from shoal.train.contract import SHOAL_RUN_ID
from shoal.train.errors import CheckpointError
from shoal.train.requeue import job_to_requeue

log = logging.getLogger("shoal.train.checkpoint")

FILE = "WRITER.json"
BEAT = 5.0
"""Seconds from one touch to the next."""
PATIENCE = 30.0
"""So long a file is watched before it counts as left behind: caches of shared storage may be 20 s old."""
FORGOTTEN = 600.0
"""A file that was not touched for so long is not even watched. Clocks of a cluster are less than half of it apart."""


@dataclass(frozen=True)
class Writer:
    """Who writes into a directory."""

    run: str
    """The same over all turns of a job."""
    name: str
    """What a person calls it."""
    node: str = ""
    pid: int = 0
    pids: str = ""
    """Where `pid` counts: a container may have numbers of its own."""
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> Writer:
        """This process."""
        node, pid, pids = environ.get("SLURMD_NODENAME") or os.uname().nodename, os.getpid(), ""
        with suppress(OSError):
            pids = str(Path("/proc/self/ns/pid").readlink())
        job = job_to_requeue(environ)
        run = f"{environ.get('SLURM_CLUSTER_NAME', '')}-{job}" if job else f"{node}-{pid}"
        return cls(environ.get(SHOAL_RUN_ID) or run, f"job {job}" if job else f"process {pid}", node, pid, pids)

    def __str__(self) -> str:
        return f"{self.name} on {self.node}" if self.node else self.name


class Claim:
    """The right of one job to write into a directory, from `take` to `release`."""

    def __init__(
        self, directory: Path, mine: Writer | None = None, *, beat: float = BEAT, patience: float = PATIENCE
    ) -> None:
        self.file = directory / FILE
        self.mine = mine or Writer.here()
        self.lost_to: Writer | None = None
        """Who took the directory over, because this process was suspended, or its node cut off."""
        self._beat, self._patience = beat, patience
        self._over = threading.Event()

    def take(self) -> Writer | None:
        """Make the directory ours. The one who has it, where another job writes there now."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if not self._create():
                other = self._read()
                if other is not None and other.run != self.mine.run and self._lives(other):
                    return self._read() or other  # it may have been half written before
                self._replace()
        except OSError as error:
            log.warning("another job could write to %s at the same time: %s", self.file.parent, error)
            return None
        threading.Thread(target=self._keep, name="shoal-checkpoint-claim", daemon=True).start()
        atexit.register(self.release)
        return None

    def release(self) -> None:
        """Let the next one have it."""
        self._over.set()
        atexit.unregister(self.release)
        with suppress(OSError):
            found = self._read() if self.mine.pid in (0, os.getpid()) else None
            if found is not None and found.token == self.mine.token:
                self.file.unlink()

    def _create(self) -> bool:
        try:
            with self.file.open("x") as stream:  # of two that come at once, one has it
                stream.write(json.dumps(asdict(self.mine)))
        except FileExistsError:
            return False
        return True

    def _replace(self) -> None:
        fresh = self.file.with_name(f"{FILE}.{self.mine.token}")
        fresh.write_text(json.dumps(asdict(self.mine)))
        fresh.replace(self.file)

    def _read(self) -> Writer | None:
        try:
            text = self.file.read_text()
        except FileNotFoundError:
            return None
        try:
            return Writer(**json.loads(text))
        except (TypeError, ValueError):  # being written at this moment, or cut off by a full disk
            return Writer("", "another job", token="")

    def _lives(self, other: Writer) -> bool:
        """Whether the other still touches its file: twice, for the first may be an old one that a cache held back."""
        if (other.node, other.pids) == (self.mine.node, self.mine.pids) and not _runs(other.pid):
            return False
        seen, touches = self._touched(), 0
        if seen is None or time.time() - seen / 1e9 > FORGOTTEN:
            return False
        log.warning("%s was left by %s; waiting %.0f s at most for a sign of life", self.file, other, self._patience)
        until = time.monotonic() + self._patience
        while touches < 2 and time.monotonic() < until:
            time.sleep(self._beat / 5)
            now = self._touched()
            if now is None:
                return False
            touches += now != seen
            seen = now
        return touches == 2

    def _touched(self) -> int | None:
        """When the file was last touched; None when it has gone."""
        try:
            with self.file.open("rb") as stream:  # opening it asks the server; a look at the name asks a cache
                return os.fstat(stream.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _keep(self) -> None:
        while not self._over.wait(self._beat):
            with suppress(OSError):
                found = self._read()
                if found is None:
                    continue
                if found.token != self.mine.token:
                    self.lost_to = found
                    return
                os.utime(self.file)  # also where the disk is full


def refusal(directory: Path, other: Writer) -> CheckpointError:
    """What the one who comes later is told."""
    return CheckpointError(
        f"{other} writes its checkpoints to {directory} now",
        found=f"{FILE} there is being touched",
        fix="wait for its end or cancel it, or give this run a directory of its own; the members of an array need one "
        "each, as f\"/shared/digits/{os.environ['SLURM_ARRAY_TASK_ID']}\"",
    )


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
