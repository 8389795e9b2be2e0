"""A finding: what a check found, where, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["error", "warning", "info"]


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
    """The host it concerns, where it concerns one."""

    def __str__(self) -> str:
        place = self.file or self.host
        if self.file and self.line:
            place = f"{self.file}:{self.line}:{self.col}"
        subject = " ".join(part for part in (place, self.path) if part)
        text = ", ".join(part for part in (self.what, self.found and f"found {self.found}", self.fix) if part)
        return f"{subject}: {text}" if subject else text
