"""A finding: what a check found, where, and what to do about it. Needs no pydantic, which takes 0.3 s to load."""

from __future__ import annotations

import json
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

Level = Literal["error", "warning", "info"]
Path = tuple[str | int, ...]
"""The place of a value in the file: ("nodesets", "lab", "hosts", 1)."""


@dataclass(frozen=True)
class Finding:
    """One thing that is not as it should be. Checks return all of them; they do not raise the first."""

    level: Level
    what: str
    """The rule that does not hold: "unknown key", "host in two nodesets"."""
    found: str = ""
    """What is there instead."""
    fix: str = ""
    """What to do about it."""
    path: str = ""
    """Where in the spec: `nodesets.lab.hosts[1]`."""
    file: str = ""
    line: int = 0
    col: int = 0
    host: str = ""
    """The host it concerns, or a hostlist; empty where it concerns none."""

    def __str__(self) -> str:
        return self._text("")

    @property
    def labelled(self) -> str:
        """The text for a list of errors, where anything else than an error must say so: `shoal.yaml:4:3: warning: `."""
        return self._text("" if self.level == "error" else f"{self.level}: ")

    def _text(self, label: str) -> str:
        place = self.file or self.host
        if self.file and self.line:
            place = f"{self.file}:{self.line}:{self.col}"
        subject = " ".join(part for part in (place, self.path) if part)
        text = ", ".join(part for part in (self.what, self.found and f"found {self.found}", self.fix) if part)
        return f"{subject}: {label}{text}" if subject else f"{label}{text}"


@dataclass(frozen=True)
class Problem:
    """A rule that does not hold, and where."""

    path: Path
    what: str
    found: str = ""
    fix: str = ""
    level: Level = "error"

    def __str__(self) -> str:
        return str(Finding(self.level, self.what, self.found, self.fix, path=path_text(self.path)))


def path_text(path: Path) -> str:
    """A path as findings show it: `nodesets.lab.hosts[1]`."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        part_text = part if part and all(c.isalnum() or c in "-_" for c in part) and part.isascii() else show(part)
        text += f".{part_text}" if text else part_text
    return text


def nearest(word: str, options: list[str]) -> str:
    """A fix that names the nearest known word, or all of them when none is near."""
    close = closest(word, options)
    if close:
        return f"did you mean `{close}`?"
    return f"known: {', '.join(options)}" if options else ""


def closest(word: str, options: list[str]) -> str | None:
    """The known word that was probably meant."""
    return next(iter(get_close_matches(word[:64], options, n=1)), None)


def show(value: object) -> str:
    """A value as it may be shown on a terminal: short, quoted, and nothing in it that moves a cursor."""
    if value is None:
        return "nothing"
    if isinstance(value, dict):
        return "a mapping"
    if isinstance(value, list | tuple):
        return "a list"
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, str | bool) else str(value)
    text = printable(text)
    return text if len(text) <= 60 else f"{text[:40]}... ({len(text)} characters)"


def printable(text: str) -> str:
    """The text with everything escaped that a terminal would not simply show."""
    return text if text.isprintable() else ascii(text)[1:-1]
