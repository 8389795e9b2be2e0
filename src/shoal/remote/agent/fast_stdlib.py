"""JSON, signals and sockets by the standard library's inner names.

`json`, `signal` and `socket` load `re` and `enum`, which takes longer than everything else the agent does on a host
where nothing has to change: 14 ms of CPU on each host, 0.1 s of an `up` on 16 hosts that share two cores.
"""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    import signal as signal
    import socket as socket
    from typing import Any, Callable, Iterable
else:
    try:
        import _signal as signal
        import _socket as socket
    except ImportError:  # a Python that is not CPython
        import signal as signal
        import socket as socket


class _Reading:
    """The defaults that `json` reads with."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int, parse_constant = float, int, float


def loads(text: str) -> Any:
    """The value of a JSON text. Raises ValueError."""
    try:
        value, end = _scan(text.strip(), 0)
    except StopIteration:
        raise ValueError("not JSON") from None
    if end != len(text.strip()):
        raise ValueError("more than one JSON value")
    return value


def dumps(value: object) -> str:
    """A value as JSON on one line, without spaces, in ASCII."""
    return "".join(_encode(value, False))


def _reject_value(value: object) -> object:
    raise TypeError(f"{type(value).__name__} has no place in JSON")


_scan: Callable[[str, int], tuple[Any, int]]
_encode: Callable[[object, bool], Iterable[str]]
try:
    from _json import encode_basestring_ascii, make_encoder, make_scanner

    _scan = make_scanner(_Reading)  # type: ignore[arg-type] # it takes whatever has these attributes
    _encode = make_encoder(None, _reject_value, encode_basestring_ascii, None, ":", ",", False, False, True)
except Exception:  # not CPython, or one to come whose inner names take something else
    import json

    _scan = json.JSONDecoder().raw_decode
    _encode = json.JSONEncoder(separators=(",", ":")).iterencode
