"""Secrets: made on the host from random bytes, and filled into files there, so that no operator ever holds them."""

from __future__ import annotations

import os
import stat

from shoal.agent.program.disk import file_status, read_bytes, write_atomic
from shoal.agent.program.failure import Failure
from shoal.agent.program.files import attribute_change, owner_ids
from shoal.agent.program.wire import Item
from shoal.agent.program.world import Change, World


def check_secret(item: Item, world: World) -> Change | None:
    path, found = item["path"], file_status(item["path"])
    if found is None or not found.st_size:
        return Change(f"make the secret {path}", "(secret)")
    if not stat.S_ISREG(found.st_mode):
        raise Failure(f"{path} is not a regular file, and a secret is wanted there; move it away: mv {path} {path}.old")
    notes = attribute_change(item, found, world)
    return Change(f"set {notes} on {path}") if notes else None


def make_secret(item: Item, world: World) -> str:
    path, found = item["path"], file_status(item["path"])
    ids = owner_ids(item, world)
    assert ids
    if found is None or not found.st_size:
        os.makedirs(os.path.dirname(path), 0o755, exist_ok=True)
        write_atomic(path, random_line(item["digits"]), item["mode"], *ids)
    else:
        write_atomic(path, read_bytes(path), item["mode"], *ids)
    return ""


def random_line(digits: int) -> bytes:
    """A line of random hexadecimal digits: text that needs no quoting anywhere."""
    return os.urandom((digits + 1) // 2).hex()[:digits].encode() + b"\n"
