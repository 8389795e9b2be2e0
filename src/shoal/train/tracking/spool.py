"""Records on disk before delivery: one JSON object per line, append-only.

A record is in the file when `append` returns, so the death of the process loses nothing. The background thread calls
`sync` every few seconds, so the death of the machine loses only those. A process killed during a write leaves an
incomplete last line: readers skip it, and the next start ends it with a newline.

`metrics.jsonl.sent` holds how much of `metrics.jsonl` a tracking server has, and in which of its runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shoal.train.file_io import parse_json_object, read_json_object, replace_file

Record = dict[str, Any]

BUFFER_BYTES = 16 * 1024 * 1024
"""Buffered in memory while the disk cannot be written. Further records are lost, with an error."""

log = logging.getLogger("shoal.train")


def encode_record(record: Record) -> bytes:
    return json.dumps(record, separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode() + b"\n"


def now_ms() -> int:
    """The time of a record, in milliseconds."""
    return time.time_ns() // 1_000_000


class Spool:
    """The writer's end of a spool. `append` never raises and never waits for a network."""

    def __init__(self, path: Path) -> None:
        """Opens or continues the file. OSError where it cannot be written."""
        self.path = path
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        self.fresh = size == 0
        """The run's first start."""
        incomplete = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._buffer = bytearray(b"\n" if incomplete else b"")
        self._lost = 0
        self._quiet_until = 0.0
        self._dirty = False

    def append(self, record: Record) -> None:
        """Add one record. A failed write is logged, and retried with the next one."""
        line = encode_record(record)
        with self._lock:
            if len(self._buffer) + len(line) > BUFFER_BYTES:
                self._lost += 1
            else:
                self._buffer += line
            self._write()

    def sync(self) -> None:
        """fsync what was written. Slow: for the background thread."""
        with self._lock:
            self._write()
            dirty, self._dirty = self._dirty, False
        if dirty:
            with contextlib.suppress(OSError):  # a full disk said so at the write
                os.fdatasync(self._fd)

    def close(self) -> None:
        self.sync()
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1

    def _write(self) -> None:
        if not self._buffer or self._fd < 0:
            return
        try:
            # A short write continues where it stopped, so a full disk leaves no incomplete line.
            del self._buffer[: os.write(self._fd, self._buffer)]
            self._dirty = True
        except OSError as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + 60
                amount = f"{len(self._buffer)} bytes are in memory, {self._lost} records are lost"
                log.error("tracking: cannot write %s: %s; %s", self.path, error.strerror, amount)


def read_spool(path: Path, offset: int = 0, size: int = 256 * 1024) -> Iterator[tuple[int, Record]]:
    """The whole lines in about `size` bytes from `offset`: where each one ends, and its record, which may be empty."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            data = file.read(size)
            while data and b"\n" not in data:
                more = file.read(size)
                if not more:
                    return
                data += more
    except FileNotFoundError:
        return
    for line in data.split(b"\n")[:-1]:
        offset += len(line) + 1
        yield offset, parse_json_object(line)


def read_tail(path: Path, size: int) -> list[Record]:
    """The last records of a spool: those within its last `size` bytes."""
    with contextlib.suppress(FileNotFoundError):
        start = max(0, path.stat().st_size - size)
        records = [record for _, record in read_spool(path, start, size)]
        return [record for record in (records[1:] if start else records) if record]
    return []


def read_position(spool: Path, run: str) -> int:
    """How many bytes of this spool the server's `run` has: none of another run, or of a spool that is shorter."""
    position = read_json_object(_sent_path(spool))
    offset = position.get("offset")
    if position.get("run") != run or not isinstance(offset, int):
        return 0
    return offset if spool.exists() and 0 <= offset <= spool.stat().st_size else 0


def write_position(spool: Path, run: str, offset: int) -> None:
    replace_file(_sent_path(spool), encode_record({"offset": offset, "run": run}), durable=True)


def _sent_path(spool: Path) -> Path:
    return spool.with_name(spool.name + ".sent")
