"""Where output goes: values as JSON, consoles for people, and streams that cannot encode every character."""

from __future__ import annotations

import codecs
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from shoal.errors import ControllerFailed, ShoalError, SpecError, VersionMismatch

if TYPE_CHECKING:
    from rich.console import Console

PIPE_WIDTH = 1000
ENCODE_HANDLER = "shoal.ascii"
ASCII = {"✓": "ok", "✗": "FAILED", "…": "...", "—": "-", "–": "-", "·": "-", "→": "->", "←": "<-", "×": "x", "±": "+-"}
"""What is written instead of a character that the stream's encoding lacks."""


def dump(value: Any) -> str:
    return json.dumps(plain(value), indent=2, ensure_ascii=not is_utf8(sys.stdout.encoding))


def plain(value: Any) -> Any:
    """A verb's value as dicts, lists, text and numbers."""
    if isinstance(value, SpecError):
        return {"error": "SpecError", "findings": [plain(finding) for finding in value.findings]}
    if isinstance(value, ShoalError):
        error = {"error": value.json_name or type(value).__name__, "message": value.message, "fix": value.hint}
        if isinstance(value, ControllerFailed):
            return {**error, "failures": plain(value.failures)}
        return {**error, "findings": plain(value.findings)} if isinstance(value, VersionMismatch) else error
    if isinstance(value, Enum):
        return value.name.lower()
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(plain(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return str(value)


def make_console(stderr: bool = False) -> Console:
    """A console as wide as the terminal. Output into a pipe or a file is not broken into lines of 80."""
    from rich.console import Console

    class QuietConsole(Console):
        def on_broken_pipe(self) -> None:  # rich would exit 1
            raise BrokenPipeError

    console = QuietConsole(stderr=stderr, highlight=False)
    if console.is_terminal or "COLUMNS" in os.environ:
        return console
    return QuietConsole(stderr=stderr, highlight=False, width=PIPE_WIDTH)


def allow_any_encoding() -> None:
    """Let every text be printed: a locale without UTF-8 must not fail a command that has done its work."""
    codecs.register_error(ENCODE_HANDLER, _to_ascii)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and not is_utf8(stream.encoding):
            stream.reconfigure(errors=ENCODE_HANDLER)


def is_utf8(encoding: str | None) -> bool:
    return (encoding or "").lower().replace("-", "").startswith("utf8")


def _to_ascii(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    return "".join(ASCII.get(character, "?") for character in error.object[error.start : error.end]), error.end
