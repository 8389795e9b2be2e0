"""Small files that several processes use: replaced as a whole, locked, or read as JSON."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def replace_file(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Replace a file atomically; `durable` also after a power failure. OSError if that fails."""
    # Other nodes, processes and threads may replace the same file: each has its own draft.
    draft = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}.{threading.get_ident()}")
    try:
        with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            file.write(data)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise


@contextlib.contextmanager
def lock_file(path: Path, *, wait: bool) -> Iterator[bool]:
    """Hold a lock, which ends with its process; False if another process holds it and we do not wait."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(file)


def parse_json_object(text: str | bytes) -> dict[str, Any]:
    """The object in a JSON text; empty if there is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a small file; empty if it cannot be read."""
    try:
        return parse_json_object(path.read_bytes())
    except OSError:
        return {}
