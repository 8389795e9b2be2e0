"""Files that a job misses although they are in the working tree it was sent from.

`shoal run` notes on this machine which directory a job was sent from. When the job fails of a missing file, that
directory says whether the file was left out, and why.
"""

from __future__ import annotations

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from shoal.jobs.bundle import Bundle
from shoal.jobs.failure import FailureReason, explain_failure, missing_file
from shoal.jobs.logs import JobLogs
from shoal.jobs.record import JobRecord
from shoal.jobs.tree_files import is_ignored
from shoal.local_files import state_directory, write_atomic
from shoal.spec.finding import printable
from shoal.verbs.context import Context

MAX_NOTES = 1000
"""Of so many jobs it is known where they were sent from."""


def note_tree(context: Context, job: str, here: Path, tree: Bundle) -> None:
    """Note where a job was sent from. Where that fails, only an explanation is missing later."""
    place = _notes(context)
    values = {"here": str(here), "root": tree.root, "code": tree.hash}
    if not job.isdecimal():
        return
    with contextlib.suppress(OSError):
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomic(place / job, json.dumps(values), 0o600)
        notes = sorted(os.scandir(place), key=lambda entry: entry.stat().st_mtime)
        for entry in notes[:-MAX_NOTES]:
            Path(entry).unlink()


def explain_job(context: Context, record: JobRecord, logs: JobLogs) -> FailureReason | None:
    """Why the job failed; None when it did not. Says so where a file that it missed was not sent."""
    reason = explain_failure(record, logs)
    missing = missing_file(reason) if reason else ""
    if reason is None or not missing:
        return reason
    place = _notes(context) / record.id.partition("_")[0]
    try:
        note, noted = json.loads(place.read_text()), place.stat().st_mtime
        if record.note is not None and record.note.code != note["code"]:
            return reason  # an earlier job of this number
        return _explain(reason, missing, note, noted, record.id)
    except (OSError, ValueError, TypeError, KeyError):
        return reason  # sent from another machine, or the file is not here either


def _explain(reason: FailureReason, missing: str, note: dict[str, Any], noted: float, job: str) -> FailureReason:
    root, here = Path(note["root"]), Path(note["here"])
    # The job has a copy of the tree in its directory.
    inside = missing.partition(f"/{job}/tree/")[2]
    local = root / inside if inside else here / missing
    status = local.stat()
    if not local.resolve().is_relative_to(root.resolve()):
        return reason
    name = printable(os.path.relpath(local, here))
    if missing.startswith("/") and not inside:
        why, fix = "it is a path of this machine", f"open it by a path from where you stand: {name}"
    elif is_ignored(local):
        why, fix = ".gitignore kept it from being sent", f"send it: shoal run --include {name}; or use a share"
    elif status.st_ctime > noted:
        why, fix = "it was written after the job was sent", "run it again"
    else:
        return reason
    return replace(reason, text=f"{reason.text}; the file is in {printable(str(here))} here: {why}", fix=fix)


def _notes(context: Context) -> Path:
    return state_directory(context.cluster) / "jobs"
