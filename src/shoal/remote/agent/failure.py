"""An item that cannot be applied, and the words for it: cause and fix."""

from __future__ import annotations

import errno
import os

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any


class Failure(Exception):
    """An item cannot be applied. The text is what was found; `fix` is what to do elsewhere than on the host."""

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
    usage = os.statvfs(path)
    return usage.f_blocks * usage.f_frsize >> 20, usage.f_bavail * usage.f_frsize >> 20


def most_relevant_line(text: str, items: list[dict[str, Any]]) -> str:
    """The line of a log that best names the cause: one with a word of `advice`, else the first fatal one."""
    lines = [line.strip() for line in text.splitlines() if "error" in line.lower() or "fatal" in line.lower()]
    words = [word for item in items for word, _ in item.get("advice", ())]
    for signs in (words, ["fatal"], [""]):
        for line in lines:
            if any(sign.lower() in line.lower() for sign in signs):
                return line
    return ""


def advice(items: list[dict[str, Any]], text: str) -> str:
    """What to do, by the words that a complaint names; "" where it names none of ours."""
    line = most_relevant_line(text, items).lower()
    steps = [todo for item in items for word, todo in item.get("advice", ()) if word.lower() in line]
    return steps[0] if steps else ""
