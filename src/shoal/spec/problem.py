"""A rule of the file that does not hold, where, and the words for it."""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches

from shoal.spec.finding import Level
from shoal.spec.words import show

Path = tuple[str | int, ...]
"""The way to a value: ("nodesets", "lab", "hosts", 1)."""


@dataclass(frozen=True)
class Problem:
    """A rule that does not hold, and where."""

    path: Path
    what: str
    found: str = ""
    fix: str = ""
    level: Level = "error"

    def __str__(self) -> str:
        found = f"found {self.found}" if self.found else ""
        return f"{path_text(self.path)}: " + ", ".join(part for part in (self.what, found, self.fix) if part)


def path_text(path: Path) -> str:
    """A path as findings show it: `nodesets.lab.hosts[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        shown = part if part and all(c.isalnum() or c in "-_" for c in part) and part.isascii() else show(part)
        text += f".{shown}" if text else shown
    return text


def nearest(word: str, known: list[str]) -> str:
    """A fix that names the nearest known word, or all of them when none is near."""
    close = closest(word, known)
    if close:
        return f"did you mean `{close}`?"
    return f"known: {', '.join(known)}" if known else ""


def closest(word: str, known: list[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(get_close_matches(word[:64], known, n=1)), None)
