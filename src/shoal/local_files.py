"""Files on this machine: where Shoal keeps them, whole writes, and locks between its processes."""

# What is waited for has no event to wait on: a lock of another process.
# ruff: noqa: ASYNC110
from __future__ import annotations

import asyncio
import fcntl
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path


def cache_dir() -> Path:
    """Where images and running clusters are kept: $SHOAL_CACHE, else the user's cache directory."""
    if path := os.environ.get("SHOAL_CACHE"):
        return Path(path).absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache").absolute() / "shoal"


def state_directory(cluster: str = "") -> Path:
    """Where the operator's machine keeps a cluster's host keys and cached hosts."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path.home() / ".local" / "state") / "shoal" / cluster


def write_atomic(path: Path, text: str, mode: int = 0o644) -> None:
    """Write beside the place and rename, so that a reader sees the old or the new text."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    handle = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(handle, "w") as sink:
        sink.write(text)
    beside.rename(path)


@asynccontextmanager
async def locked(path: Path) -> AsyncIterator[bool]:
    """Hold a lock on a file or directory. Yields False when the path was replaced meanwhile."""
    try:
        handle = os.open(path, os.O_RDONLY)
    except FileNotFoundError:
        yield False
        return
    try:
        while not _try_lock(handle):
            await asyncio.sleep(0.05)
        yield _is_at(path, handle)
    finally:
        os.close(handle)


def _try_lock(handle: int) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, handle: int) -> bool:
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except FileNotFoundError:
        return False
