"""The layout of checkpoints on disk, and the check whether one is complete. No torch here.

step-1200/                      committed, by one rename
    __0_0.distcp, __1_0.distcp  what each rank wrote
    .metadata                   torch's own index of them
    MANIFEST.json               size and SHA-256 of every file above, written last
step-1200.1/                    the same step, committed again (the first one was damaged)
step-1300.tmp-9f31c2e8/         being written, or left by a failed save
step-900.old-9f31c2e8/          being deleted
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import stat
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

MANIFEST = "MANIFEST.json"
FORMAT = 1

_COMMITTED = re.compile(r"step-(\d+)(?:\.(\d+))?")
_FILE_NAME = re.compile(r"[A-Za-z0-9_.-]*[A-Za-z0-9_-]")
_LEFTOVER = re.compile(r"step-\d+(?:\.\d+)?\.(?:tmp|old)-[0-9a-f]+")


@dataclass(frozen=True)
class FileRecord:
    """One file of a checkpoint, as it was when it was written."""

    name: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a committed checkpoint, and its origin."""

    step: int
    world_size: int
    run_id: str
    reason: str
    files: tuple[FileRecord, ...]

    def to_json(self) -> str:
        """The text of MANIFEST.json."""
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @staticmethod
    def from_json(text: str) -> Manifest:
        """The manifest in a MANIFEST.json. ValueError says what is wrong with it."""
        try:
            fields = json.loads(text)
            if fields["format"] != FORMAT:
                raise ValueError(f"its format is {fields['format']!r}, this version of shoal reads {FORMAT}")
            files = tuple(FileRecord(f["name"], int(f["size"]), f["sha256"]) for f in fields["files"])
            if outside := [record.name for record in files if not _FILE_NAME.fullmatch(record.name)]:
                raise ValueError(f"it names a file outside the checkpoint: {outside[0]!r}")
            return Manifest(int(fields["step"]), int(fields["world_size"]), fields["run_id"], fields["reason"], files)
        except (KeyError, TypeError, json.JSONDecodeError) as error:
            raise ValueError(f"it is not a manifest: {error!r}") from error


def committed(directory: Path) -> list[Path]:
    """The committed checkpoints, newest first. Empty where the directory does not exist."""
    matches = ((_COMMITTED.fullmatch(entry.name), entry) for entry in _entries(directory))
    checkpoints = [(int(match[1]), int(match[2] or 0), entry) for match, entry in matches if match]
    return [path for _, _, path in sorted(checkpoints, reverse=True)]


def list_leftovers(directory: Path) -> list[Path]:
    """Leftovers of failed saves: partly written and partly deleted checkpoints."""
    return [entry for entry in _entries(directory) if _LEFTOVER.fullmatch(entry.name)]


def _entries(directory: Path) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except FileNotFoundError:
        return []


def new_checkpoint_path(directory: Path, step: int) -> Path:
    """The path for a checkpoint of this step: never an existing one, which stays until the new one is committed."""
    name, attempt = directory / f"step-{step}", 0
    while name.exists():
        attempt += 1
        name = directory / f"step-{step}.{attempt}"
    return name


def step_of(checkpoint: Path) -> int:
    """The step in the name of a committed checkpoint."""
    match = _COMMITTED.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint.name} is not the name of a checkpoint")
    return int(match[1])


def read_manifest(checkpoint: Path) -> Manifest:
    """The manifest of a committed checkpoint. OSError or ValueError if it cannot be read."""
    return Manifest.from_json((checkpoint / MANIFEST).read_text())


def find_damage(checkpoint: Path, records: Iterable[FileRecord]) -> str:
    """What is wrong with these files of a checkpoint, or an empty string. Reads every byte of them."""
    for record in records:
        path = checkpoint / record.name
        try:
            status = path.lstat()
            if not stat.S_ISREG(status.st_mode):
                return f"{record.name} is not a regular file"
            size = status.st_size
            if size != record.size:
                return f"{record.name} has {size} bytes instead of {record.size}"
            with path.open("rb") as stream:
                digest = hashlib.file_digest(stream, "sha256").hexdigest()
        except OSError as error:
            return f"{record.name} cannot be read: {error.strerror or error}"
        if digest != record.sha256:
            return f"{record.name} has changed since it was written (SHA-256 differs)"
    return ""


def commit(writing: Path, manifest: Manifest) -> Path:
    """Turn a fully written directory into a checkpoint: write the manifest, then rename."""
    for record in manifest.files:
        path = writing / record.name
        size = path.stat().st_size if path.exists() else None
        if size != record.size:
            problem = "does not see" if size is None else f"sees {size} of {record.size} bytes of"
            raise OSError(
                f"rank 0 {problem} {path}, which another rank wrote: the checkpoint directory must be on storage that "
                "all nodes share"
            )
    with (writing / MANIFEST).open("w") as stream:
        stream.write(manifest.to_json())
        stream.flush()
        os.fsync(stream.fileno())
    sync_directory(writing)
    final = new_checkpoint_path(writing.parent, manifest.step)
    writing.rename(final)
    sync_directory(final.parent)
    return final


def sync_directory(directory: Path) -> None:
    """fsync a directory: a rename is not durable before."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(checkpoint: Path, nonce: str) -> None:
    """Delete a committed checkpoint, renamed first so that it is never incomplete under its name."""
    renamed = checkpoint.with_name(f"{checkpoint.name}.old-{nonce}")
    checkpoint.rename(renamed)
    shutil.rmtree(renamed)
