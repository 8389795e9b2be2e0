"""Where output goes: values as JSON, consoles for people, and streams that cannot encode every character.

Logs, names of jobs, messages of providers and answers of hosts are text that others chose. This module is the boundary
where nothing in it reaches a terminal as a command: no escape sequence, no C1 control, no change of direction.
"""

from __future__ import annotations

import codecs
import json
import os
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from io import TextIOWrapper
from typing import TYPE_CHECKING, Any

from shoal.errors import ControllerFailed, ShoalError, SpecError, VersionMismatch

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions

PIPE_WIDTH = 1000
ENCODE_HANDLER = "shoal.ascii"
ASCII = {"✓": "ok", "✗": "FAILED", "…": "...", "—": "-", "–": "-", "·": "-", "→": "->", "←": "<-", "×": "x", "±": "+-"}
"""What is written instead of a character that the stream's encoding lacks."""


_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f"  # C0 without tab and newline, delete, C1
    "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"  # direction of text
    "\u2028\u2029\ufff9-\ufffb\U000e0000-\U000e007f\ud800-\udfff]"  # lines, annotations, tags, bytes that are no UTF-8
)
_COLOURS = re.compile(r"\x1b\[[0-9;:]*m")
_OVERWRITTEN = re.compile(r"[^\n]*\r(?=[^\r\n])")
"""What a carriage return lets the rest of the line overwrite, as progress bars do."""


def dump(value: Any) -> str:
    text = json.dumps(plain(value), indent=2, ensure_ascii=not is_utf8(sys.stdout.encoding))
    # JSON itself escapes C0 alone.
    return _CONTROLS.sub(lambda found: "".join(f"\\u{unit:04x}" for unit in _utf16_units(found[0])), text)


def escape_controls(text: str) -> str:
    """The text with everything that a terminal would act on written as Python writes it: `\\x1b`."""
    return text if text.isprintable() else _CONTROLS.sub(lambda found: _python_escape(found[0]), text)


def neutralize(text: str) -> str:
    """What a program printed, for a terminal: without colours and overwritten text, other controls escaped."""
    if text.isprintable():
        return text
    return escape_controls(_OVERWRITTEN.sub("", _COLOURS.sub("", text)).replace("\r", ""))


def _utf16_units(character: str) -> list[int]:
    data = character.encode("utf-16-be", "surrogatepass")
    return [int.from_bytes(data[place : place + 2], "big") for place in range(0, len(data), 2)]


def _python_escape(character: str) -> str:
    code = ord(character)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


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
    from rich.segment import Segment

    class QuietConsole(Console):
        def render(self, renderable: Any, options: ConsoleOptions | None = None) -> Iterator[Segment]:
            for segment in super().render(renderable, options):
                yield segment if segment.control else Segment(escape_controls(segment.text), segment.style)

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
