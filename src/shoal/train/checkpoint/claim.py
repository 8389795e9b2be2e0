"""Keeps two jobs from writing their checkpoints into one directory.

The job that writes there creates WRITER.json, which identifies it, and touches it every few seconds. A later job that
sees it being touched fails. A file that is not touched was left by a job that died, and one with the same run id by an
earlier start of the same job: both are replaced. File system locks do not work: sshfs has none, and over NFS those of a
dead node stay.
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

from shoal.contract import SHOAL_RUN_ID
from shoal.train.env import requeue_job_id
from shoal.train.errors import CheckpointError
from shoal.train.file_io import replace_file

log = logging.getLogger("shoal.train.checkpoint")

CLAIM_FILE = "WRITER.json"
TOUCH_PERIOD_S = 5.0
"""The time between two touches."""
TAKEOVER_TIMEOUT_S = 30.0
"""How long a file is watched before it counts as stale: caches of shared storage may be 20 s old."""
STALE_AFTER_S = 600.0
"""A file that old is stale at once. Clocks of a cluster differ by less than half of it."""


@dataclass(frozen=True)
class ClaimOwner:
    """The job that writes into a directory."""

    run: str
    """The same over all requeues of a job."""
    name: str
    """Shown in messages."""
    node: str = ""
    pid: int = 0
    pids: str = ""
    """The PID namespace of `pid`."""
    token: str = field(default_factory=lambda: secrets.token_hex(4))

    @classmethod
    def here(cls, environ: Mapping[str, str] = os.environ) -> ClaimOwner:
        """This process."""
        node, pid, pids = environ.get("SLURMD_NODENAME") or os.uname().nodename, os.getpid(), ""
        with suppress(OSError):
            pids = str(Path("/proc/self/ns/pid").readlink())
        job = requeue_job_id(environ)
        run = f"{environ.get('SLURM_CLUSTER_NAME', '')}-{job}" if job else f"{node}-{pid}"
        return cls(environ.get(SHOAL_RUN_ID) or run, f"job {job}" if job else f"process {pid}", node, pid, pids)

    def __str__(self) -> str:
        return f"{self.name} on {self.node}" if self.node else self.name


class Claim:
    """The right of one job to write into a directory, from `take` to `release`."""

    def __init__(
        self,
        directory: Path,
        owner: ClaimOwner | None = None,
        *,
        touch_period: float = TOUCH_PERIOD_S,
        takeover_timeout: float = TAKEOVER_TIMEOUT_S,
    ) -> None:
        self.file = directory / CLAIM_FILE
        self.owner = owner or ClaimOwner.here()
        self.new_owner: ClaimOwner | None = None
        """The job that took over the directory while this process was suspended or its node cut off."""
        self._touch_period, self._takeover_timeout = touch_period, takeover_timeout
        self._released = threading.Event()

    def take(self) -> ClaimOwner | None:
        """Claim the directory. Returns the owner if another job writes there now."""
        try:
            self.file.parent.mkdir(parents=True, exist_ok=True)
            if not self._create():
                other = self._read()
                if other is not None and other.run != self.owner.run and self._is_alive(other):
                    return self._read() or other  # it may have been incomplete before
                replace_file(self.file, json.dumps(asdict(self.owner)).encode())
        except OSError as error:
            log.warning("cannot keep other jobs from writing to %s: %s", self.file.parent, error)
            return None
        threading.Thread(target=self._touch_until_released, name="shoal-checkpoint-claim", daemon=True).start()
        atexit.register(self.release)
        return None

    def release(self) -> None:
        """Give up the directory."""
        self._released.set()
        atexit.unregister(self.release)
        with suppress(OSError):
            owner = self._read() if self.owner.pid in (0, os.getpid()) else None
            if owner is not None and owner.token == self.owner.token:
                self.file.unlink()

    def _create(self) -> bool:
        try:
            with self.file.open("x") as stream:  # atomic: of two jobs one succeeds
                stream.write(json.dumps(asdict(self.owner)))
        except FileExistsError:
            return False
        return True

    def _read(self) -> ClaimOwner | None:
        try:
            text = self.file.read_text()
        except FileNotFoundError:
            return None
        try:
            return ClaimOwner(**json.loads(text))
        except (TypeError, ValueError):  # incomplete: being written, or the disk is full
            return ClaimOwner("", "another job", token="")

    def _is_alive(self, other: ClaimOwner) -> bool:
        """Whether the other job touches its file: twice, since the first may be an old one from a cache."""
        if (other.node, other.pids) == (self.owner.node, self.owner.pids) and not _process_exists(other.pid):
            return False
        last_mtime, touches = self._mtime_ns(), 0
        if last_mtime is None or time.time() - last_mtime / 1e9 > STALE_AFTER_S:
            return False
        limit = self._takeover_timeout
        log.warning("%s was written by %s; checking for up to %.0f s whether that job runs", self.file, other, limit)
        until = time.monotonic() + limit
        while touches < 2 and time.monotonic() < until:
            time.sleep(self._touch_period / 5)
            mtime = self._mtime_ns()
            if mtime is None:
                return False
            touches += mtime != last_mtime
            last_mtime = mtime
        return touches == 2

    def _mtime_ns(self) -> int | None:
        """When the file was last touched; None if it is gone."""
        try:
            with self.file.open("rb") as stream:  # open() asks the server; stat() may use a cache
                return os.fstat(stream.fileno()).st_mtime_ns
        except FileNotFoundError:
            return None

    def _touch_until_released(self) -> None:
        while not self._released.wait(self._touch_period):
            with suppress(OSError):
                owner = self._read()
                if owner is None:
                    continue
                if owner.token != self.owner.token:
                    self.new_owner = owner
                    return
                os.utime(self.file)  # also where the disk is full


def directory_in_use(directory: Path, other: ClaimOwner) -> CheckpointError:
    """The error for the later job."""
    return CheckpointError(
        f"{other} writes its checkpoints to {directory} now",
        found=f"{CLAIM_FILE} there is being touched",
        fix="wait for its end or cancel it, or give this run its own directory; the tasks of an array need one each, "
        "such as f\"/shared/digits/{os.environ['SLURM_ARRAY_TASK_ID']}\"",
    )


def _process_exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
