"""Marks such as ✓ where the terminal, or the file that output goes to, has none of them."""

from __future__ import annotations

import codecs
import sys
from io import TextIOWrapper

HANDLER = "shoal.marks"
INSTEAD = {
    "✓": "ok",
    "✗": "FAILED",
    "…": "...",
    "—": "-",
    "–": "-",
    "·": "-",
    "→": "->",
    "←": "<-",
    "×": "x",
    "±": "+-",
}
"""What is written in place of a mark."""


def write_anywhere() -> None:
    """Let whatever is printed go out: a locale without UTF-8 must not end a command that has done its work."""
    codecs.register_error(HANDLER, _instead)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not is_utf8(stream.encoding):
            stream.reconfigure(errors=HANDLER)


def is_utf8(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf8")


def _instead(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(INSTEAD.get(mark, "?") for mark in error.object[error.start : error.end]), error.end
