"""A period of time as people give it: from a day on, or the last so many hours or days."""

from __future__ import annotations

import re
from datetime import datetime

from shoal.errors import UsageError

_AGO = re.compile(r"([0-9]{1,5})\s*([hdw])")
_SECONDS = {"h": 3600, "d": 86400, "w": 7 * 86400}
_FIX = "write 2026-11-01, 2026-11-01T14:30, or how long ago: 12h, 7d, 4w"


def parse_when(option: str, text: str, now: float) -> float:
    """A time as seconds since the epoch. Days and clocks are those of this machine."""
    ago = _AGO.fullmatch(text.strip())
    if ago:
        return now - int(ago[1]) * _SECONDS[ago[2]]
    try:
        return datetime.fromisoformat(text.strip()).timestamp()
    except (ValueError, OverflowError):
        raise UsageError(f"{option} {text!r} is not a time", hint=_FIX) from None


def parse_period(since: str | None, until: str | None, now: float, default: str) -> tuple[float, float]:
    """Begin and end, checked: the end is later and the begin is not to come."""
    begin = parse_when("--since", since or default, now)
    end = parse_when("--until", until, now) if until else now
    if begin > now:
        raise UsageError(f"--since {since} is still to come", hint=_FIX)
    if begin >= end:
        raise UsageError(f"--until {until} is not later than --since {since or default}", hint="turn them around")
    return begin, end
