"""Writes one checkpoint through torch.distributed.checkpoint, in two phases.

First every rank writes, hashes and syncs its files. When all ranks have finished, `finish` runs on rank 0 and commits.
torch sends an error of any rank to all ranks in between, so all have the same outcome.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal

from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import Metadata
from torch.futures import Future

from shoal.train.checkpoint import layout as files
from shoal.train.checkpoint.layout import FileRecord, Manifest


class CommittingWriter(FileSystemWriter):  # type: ignore[misc]
    """Writes into a `.tmp-` directory, and renames it when complete. `committed_to` is then set on rank 0."""

    def __init__(self, writing: Path, manifest: Manifest) -> None:
        # One thread: torch loses the error of any further one, and a rank would report files it never wrote.
        super().__init__(writing, single_file_per_rank=True, sync_files=True, thread_count=1)
        self.fs = _HashingFileSystem()
        self._writing = writing
        self._manifest = manifest
        self.committed_to: Path | None = None

    def write_data(self, plan: Any, planner: Any) -> Any:
        """Write this rank's files; the results carry their sizes and digests to rank 0."""
        try:
            written = super().write_data(plan, planner).wait()
        except Exception as error:
            # If a write fails inside torch.save, torch raises a misleading error ("unexpected pos").
            raise (self.fs.failure or error) from None
        results: Any = Future()
        results.set_result([*written, *self.fs.take_records()])
        return results

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        """Runs on rank 0 when every rank has written: torch's index, our manifest, the rename."""
        records = [item for of_rank in results for item in of_rank if isinstance(item, FileRecord)]
        super().finish(metadata, [[item for item in r if not isinstance(item, FileRecord)] for r in results])
        # torch writes its index under a temporary name and renames it.
        records += [replace(record, name=record.name.removesuffix(".tmp")) for record in self.fs.take_records()]
        manifest = replace(self._manifest, files=tuple(sorted(records, key=lambda record: record.name)))
        self.committed_to = files.commit(self._writing, manifest)


class _HashingFileSystem(FileSystem):  # type: ignore[misc]
    """The local file system; records the digest of every file it writes."""

    def __init__(self) -> None:
        self._records: list[FileRecord] = []
        self.failure: OSError | None = None

    def take_records(self) -> list[FileRecord]:
        """The files written since the last call."""
        records, self._records = self._records, []
        return records

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[Any, None, None]:
        """Open a file; torch fsyncs it before it closes it."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        # Unbuffered: fsync then covers exactly what was hashed, and `write` raises errors.
        with Path(path).open("wb", buffering=0) as raw:
            hashing = _HashingStream(raw)
            try:
                yield hashing
            finally:
                self.failure = self.failure or hashing.failure
        self._records.append(FileRecord(Path(path).name, hashing.written, hashing.digest.hexdigest()))


class _HashingStream:
    """A file that is only ever appended to, and its SHA-256."""

    def __init__(self, raw: IO[bytes]) -> None:
        self._raw = raw
        self.digest = hashlib.sha256()
        self.written = 0
        self.failure: OSError | None = None

    def write(self, data: Any) -> int:
        """Write all of the data, however the system cuts it."""
        view = memoryview(data).cast("B")
        self.digest.update(view)
        rest = view
        try:
            while rest:
                rest = rest[self._raw.write(rest) :]
        except OSError as error:
            self.failure = error
            raise
        self.written += len(view)
        return len(view)

    def tell(self) -> int:
        """The position: torch's index is made of these."""
        return self.written

    def fileno(self) -> int:
        """The descriptor torch fsyncs."""
        return self._raw.fileno()

    def flush(self) -> None:
        """Nothing is buffered."""

    def close(self) -> None:
        """torch closes what it has written, and may do so twice."""
        self._raw.close()


SAVE_ERRORS = (Exception, CheckpointException)
"""torch's CheckpointException, with the errors of all ranks, does not derive from Exception."""


@dataclass(frozen=True)
class SaveResult:
    """How a save ended. All ranks get the same outcome."""

    step: int
    outcome: Literal["committed", "failed", "pending"]
    reason: str = ""
    path: Path | None = None
    error: str = ""
    stall_seconds: float = 0.0
    """How long training was blocked."""
    seconds: float = 0.0
    """From the call to the commit."""

    @property
    def committed(self) -> bool:
        """Whether the checkpoint is complete on disk."""
        return self.outcome == "committed"


def describe_failure(problem: BaseException) -> str:
    """The errors of the ranks, without the tracebacks that torch adds."""
    if not isinstance(problem, CheckpointException):
        return first_line(problem)
    ranks = sorted(problem.failures)
    causes = [f"rank {rank}: {first_line(problem.failures[rank][0])}" for rank in ranks[:3]]
    return "; ".join(causes) + (f"; and {len(ranks) - 3} more ranks" if len(ranks) > 3 else "")


def first_line(problem: BaseException) -> str:
    """The error's type and the first line of its message."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0]
