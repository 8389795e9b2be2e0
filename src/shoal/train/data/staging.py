"""Copies shards to the node's own disk before training, once a node.

Every process of a node calls `stage` with the same shards. The first to lock a shard copies it; the others continue
with other shards, and wait at the end for copies in progress. The lock is flock, which ends with its process. A copy
appears under its name only when complete and verified. A shard that cannot be copied is read from its source, with a
warning: a full disk does not stop training.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path

from shoal.train.errors import DataError
from shoal.train.file_io import lock_file

log = logging.getLogger(__name__)

_CHUNK = 4 << 20


def stage(shards: Sequence[Path], folder: Path, *, keep_free: int = 1 << 30) -> list[Path]:
    """Copy shards into `folder`, of the node's own disk; the paths to read from, in the same order.

    A copy of an earlier job is used again if its size and modification time are the shard's. `keep_free` bytes of the
    disk are left for others.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        log.warning("cannot stage shards to %s (%s); reading them where they are", folder, error.strerror)
        return list(shards)
    staged = [_stage_one(shard, folder, keep_free, wait=False) for shard in shards]
    return [
        path or _stage_one(shard, folder, keep_free, wait=True) or shard
        for shard, path in zip(shards, staged, strict=True)
    ]


def staged_path(shard: Path, folder: Path) -> Path:
    """The path of a shard's copy. Shards with the same name from two folders get different paths."""
    digest = hashlib.blake2b(os.fsencode(shard.absolute().parent), digest_size=4).hexdigest()
    return folder / f"{digest}-{shard.name}"


def _stage_one(shard: Path, folder: Path, keep_free: int, *, wait: bool) -> Path | None:
    """The path to read a shard from; None if another process is copying it and we do not wait."""
    target = staged_path(shard, folder)
    if _is_copy(target, shard):
        return target
    try:
        with lock_file(target.with_name(f".{target.name}.lock"), wait=wait) as locked:
            if not locked:
                return None
            if not _is_copy(target, shard):
                _copy(shard, target, keep_free)
            return target
    except OSError as error:
        log.warning("cannot stage %s to %s (%s); reading it where it is", shard, folder, error.strerror or error)
        return shard


def _is_copy(target: Path, shard: Path) -> bool:
    try:
        copy_stat, shard_stat = target.stat(), shard.stat()
    except OSError:
        return False
    return (copy_stat.st_size, copy_stat.st_mtime_ns) == (shard_stat.st_size, shard_stat.st_mtime_ns)


def _copy(shard: Path, target: Path, keep_free: int) -> None:
    stat = shard.stat()
    free = shutil.disk_usage(target.parent).free
    if free < stat.st_size + keep_free:
        raise OSError(f"{free >> 20} MiB are free, {(stat.st_size + keep_free) >> 20} MiB are needed")
    # The lock is ours, so the name needs no process id, and what a killed copier left here is written over.
    draft = target.with_name(f".{target.name}.partial")
    try:
        with shard.open("rb") as shard_file, draft.open("wb") as copy:
            checksum = 0
            while chunk := shard_file.read(_CHUNK):
                checksum = zlib.crc32(chunk, checksum)
                copy.write(chunk)
            copy.flush()
            os.fsync(copy.fileno())
        _verify(draft, stat.st_size, checksum, shard)
        os.utime(draft, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        draft.replace(target)
    finally:
        with contextlib.suppress(OSError):
            draft.unlink()


def _verify(draft: Path, size: int, checksum: int, shard: Path) -> None:
    copy_size = draft.stat().st_size
    if copy_size != size:
        raise DataError(
            f"shard {shard} was changed while it was copied",
            found=f"{copy_size} bytes were read of a file of {size}",
            fix="let whatever writes the shard finish, then start the job again",
        )
    copy_checksum = 0
    with draft.open("rb") as copy:
        while chunk := copy.read(_CHUNK):
            copy_checksum = zlib.crc32(chunk, copy_checksum)
    if copy_checksum != checksum:
        raise OSError(
            f"the copy reads back with checksum {copy_checksum:08x}, the shard has {checksum:08x}: is the disk failing?"
        )
