"""What cannot be brought about, told so that a person knows what to do."""

from __future__ import annotations

import errno
import os


class Failure(Exception):
    """An item cannot be brought about. The text says what was found, `fix` what to do if not on the host."""

    def __init__(self, what: str, fix: str = "") -> None:
        super().__init__(what)
        self.fix = fix


def explain(error: OSError, path: str, what: str) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return "No space left on device: " + space_left(path)
    return f"{error.filename or what}: {error.strerror}"


def space_left(path: str) -> str:
    while not os.path.isdir(path):
        path = os.path.dirname(path)
    total, free = disk_space(path)
    return f"{path} has {free} MB free of {total} MB; free some space (apt-get clean, old logs) and run again"


def disk_space(path: str) -> tuple[int, int]:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize >> 20, found.f_bavail * found.f_frsize >> 20
