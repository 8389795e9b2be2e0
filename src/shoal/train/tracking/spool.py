"""Records on disk before they go anywhere: one JSON object a line, appended and never changed.

A record is in the file when `append` returns, so the death of the process loses nothing. The background thread calls
`sync` every few seconds, so the death of the machine loses no more than that. A process killed in the middle of a write
leaves a torn last line: readers pass over it, and the next start ends it before it goes on.

Beside `metrics.jsonl` lies `metrics.jsonl.sent`: how far a tracking server has it, and in which of its runs.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

Record = dict[str, Any]

HELD_BYTES = 16 * 1024 * 1024
"""How much is kept in memory while the disk takes nothing. What comes on top of it is lost, loudly."""

log = logging.getLogger("shoal.train")
_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False, ensure_ascii=False).encode


class Spool:
    """The writer's end of a spool. `append` never raises and never waits for a network."""

    def __init__(self, path: Path) -> None:
        """Opens or continues the file. OSError where it cannot be written."""
        self.path = path
        self._lock = threading.Lock()
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
        size = os.fstat(self._fd).st_size
        self.fresh = size == 0
        """Nobody wrote here before: the run's first start."""
        torn = size > 0 and os.pread(self._fd, 1, size - 1) != b"\n"
        self._held = bytearray(b"\n" if torn else b"")
        self._lost = 0
        self._quiet_until = 0.0
        self._dirty = False

    def append(self, record: Record) -> None:
        """Add one record. A disk that refuses it is complained about, and tried again with the next one."""
        line = _encode(record).encode() + b"\n"
        with self._lock:
            if len(self._held) + len(line) > HELD_BYTES:
                self._lost += 1
            else:
                self._held += line
            self._write()

    def sync(self) -> None:
        """Bring what was written onto the disk itself. Called by the background thread, for it may take a while."""
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
        if not self._held or self._fd < 0:
            return
        try:
            # A short write goes on where it stopped, so a disk that fills up in the middle of a line tears none.
            del self._held[: os.write(self._fd, self._held)]
            self._dirty = True
        except OSError as error:
            if time.monotonic() >= self._quiet_until:
                self._quiet_until = time.monotonic() + 60
                log.error(
                    "tracking: %s takes no more records: %s; %d bytes wait in memory, %d records are lost",
                    self.path,
                    error.strerror,
                    len(self._held),
                    self._lost,
                )


def read_spool(path: Path, offset: int = 0, size: int = 256 * 1024) -> Iterator[tuple[int, Record | None]]:
    """The whole lines in about `size` bytes from `offset`: where each one ends, and its record.

    None stands for a line that is no record: a torn one, or one that somebody else put there.
    """
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
        yield offset, _decode(line)


def read_tail(path: Path, size: int) -> list[Record]:
    """The last records of a spool: those within its last `size` bytes."""
    with contextlib.suppress(FileNotFoundError):
        start = max(0, path.stat().st_size - size)
        records = [record for _, record in read_spool(path, start, size)]
        return [record for record in (records[1:] if start else records) if record is not None]
    return []


def _decode(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return cast(Record, record) if isinstance(record, dict) else None


@dataclass(frozen=True)
class Sent:
    """How much of a spool a server has acknowledged, and in which of its runs."""

    offset: int = 0
    run: str = ""


def read_sent(spool: Path, run: str) -> Sent:
    """What `run` has of this spool. Another run, or a spool that is shorter than that: nothing is sent yet."""
    found = read_json(_sent_path(spool))
    offset = found.get("offset")
    if found.get("run") != run or not isinstance(offset, int):
        return Sent(0, run)
    size = spool.stat().st_size if spool.exists() else 0
    return Sent(offset if 0 <= offset <= size else 0, run)


def write_sent(spool: Path, sent: Sent) -> None:
    """Remember what the server has. A crash leaves the old number or the new one."""
    write_json(_sent_path(spool), {"offset": sent.offset, "run": sent.run})


def _sent_path(spool: Path) -> Path:
    return spool.with_name(spool.name + ".sent")


def read_json(path: Path) -> Record:
    """The object in a small file; empty where there is none, or none that can be read."""
    try:
        return _decode(path.read_bytes()) or {}
    except OSError:
        return {}


def write_json(path: Path, value: Record, *, durable: bool = True) -> None:
    """Replace a small file as a whole. OSError where that is not possible."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with draft.open("wb") as file:
            file.write(_encode(value).encode() + b"\n")
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
