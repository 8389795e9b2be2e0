"""Checks of single values: which names, times, sizes, numbers and references to secrets the spec and a job may have.

Every name ends up in slurm.conf, in a host's files and on command lines. So the rules are narrow: a name that passes
here needs no quoting anywhere, and is quoted all the same. Needs no pydantic, which takes 0.3 s to load.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Collection

from shoal import hostlist
from shoal.spec.finding import show

RESERVED = ("all", "default")
"""Words that mean something else to Slurm where a node's or a partition's name is expected."""

_SHORT = "a lower-case letter, then lower-case letters, digits and `-`"
USER_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,31}")
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_DNS_NAME = re.compile(rf"{_LABEL}(\.{_LABEL})*")
SIZE = re.compile(r"([1-9][0-9]{0,6})([MGT])")
_DAYS = re.compile(r"([0-9]{1,4})-([0-9]{1,2})(?::([0-9]{1,2})(?::([0-9]{1,2}))?)?")
_CLOCK = re.compile(r"([0-9]{1,4}):([0-9]{1,2}):([0-9]{1,2})")
_MINUTES = re.compile(r"[0-9]{1,7}")
_UNITS = {"M": 1, "G": 1024, "T": 1024 * 1024}
DURATION = re.compile(r"([1-9][0-9]{0,5})([smhd])")
_REFERENCE = re.compile(r"(env):[A-Za-z_][A-Za-z0-9_]{0,127}|(file):[^\x00-\x1f]{1,1024}")
_UNIT_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}


class InvalidValue(ValueError):
    """Why a value is not accepted."""

    def __init__(self, what: str, fix: str, found: str) -> None:
        super().__init__(f"{what}, {fix}")
        self.what, self.fix = what, fix
        self.found = found
        """What to show in place of the value; empty for the value itself."""


def refusal(what: str, fix: str, found: object = None) -> InvalidValue:
    """An error with its fix; the loader adds the place and the value."""
    return InvalidValue(what, fix, "" if found is None else show(found))


def whole_number(low: int, high: int) -> Callable[[object], int]:
    """A check for a whole number within bounds."""
    fix = f"give one from {low} to {high}"

    def check(value: object) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise refusal("not a whole number", fix)
        if not low <= value <= high:
            raise refusal("out of range", fix)
        return value

    return check


def matching(
    pattern: re.Pattern[str] | str, what: str, fix: str, reserved: Collection[str] = (), why: tuple[str, str] = ("", "")
) -> Callable[[object], str]:
    """A check for text of one form. `why` is what is wrong with a reserved word, and the fix."""

    def check(value: object) -> str:
        if not isinstance(value, str) or not re.fullmatch(pattern, value):
            raise refusal(what, fix)
        if value in reserved:
            raise refusal(*why)
        return value

    return check


def web_address(what: str, example: str, password_fix: str) -> Callable[[object], str]:
    """A check for an http address without a password."""
    check_form = matching(r"https?://[!-~]{1,500}", f"not the address of {what}", f"write it like {example}")

    def check(value: object) -> str:
        if isinstance(value, str) and "@" in value:
            raise refusal("an address with a password in it", password_fix, "(hidden)")
        return check_form(value).rstrip("/")

    return check


def host_name(value: object) -> str:
    """A single host's name: DNS labels, and not an address."""
    text = _text(value)
    if _is_address(text):
        raise refusal("an address is not a name", f"give the host a name: {{name: node1, address: {_plain(text)}}}")
    if not _DNS_NAME.fullmatch(text) or len(text) > 63 or text[0] == "-":
        raise refusal("not a host name", "use letters, digits, `-` and `.`, at most 63 characters")
    if text.rpartition(".")[2].isdigit():
        raise refusal("not a host name", "its last part must have a letter")
    if text.lower() in (*RESERVED, "localhost"):
        raise refusal("this name is reserved", "give the host another: {name: node1, address: 127.0.0.1}")
    return text


def host_names(value: object) -> str:
    """One host's name, or a hostlist such as `gpu[01-16]`."""
    text = _text(value)
    if not re.search(r"[\[\],]", text) or _is_address(text):
        return host_name(text)
    try:
        names = hostlist.expand(text)
    except ValueError as error:
        problem = error.problem if isinstance(error, hostlist.HostlistError) else str(error)
        raise refusal("not a hostlist", f"{problem}; write it like gpu[01-16]") from None
    for name in names:
        try:
            host_name(name)
        except InvalidValue as error:
            raise refusal(f"{error.what} in this hostlist", error.fix, name) from None
    return text


def address(value: object) -> str:
    """Where a host answers: a DNS name or an IP address."""
    text = _text(value)
    if not _is_address(text) and (not _DNS_NAME.fullmatch(text) or len(text) > 253):
        raise refusal("not an address", "give an IP address or a DNS name")
    return text.strip("[]")


def user_name(value: object) -> str:
    """The user to log in as."""
    fix = "use letters, digits, `_`, `-` and `.`, at most 32 characters"
    return matching(USER_NAME, "not a user name", fix)(_text(value))


def file_path(value: object) -> str:
    """A path on the operator's machine."""
    text = _text(value)
    if not text or not text.isprintable() or text[0] == "-" or (text[0] == "~" and text[1:2] != "/"):
        raise refusal("not a path", "give a file's path, such as ~/.ssh/id_ed25519")
    return text


def size(minimum: str, maximum: str) -> Callable[[object], str]:
    """A check for sizes such as `512M` and `2G`."""

    def check(value: object) -> str:
        text = matching(SIZE, "not a size", "write a number and M, G or T: 512M, 2G")(value)
        if not size_mb(minimum) <= size_mb(text) <= size_mb(maximum):
            raise refusal("out of range", f"give one from {minimum} to {maximum}")
        return text

    return check


def size_mb(text: str) -> int:
    """A size in MiB, as Slurm counts memory."""
    return int(text[:-1]) * _UNITS[text[-1]]


def slurm_time(value: object) -> str:
    """A time limit in one of Slurm's spellings, as text. `MM:SS` is refused: people read it as hours and minutes."""
    fix = "write minutes (90), HH:MM:SS (01:30:00), D-HH:MM:SS (1-12:00:00) or infinite"
    text = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(text, str):
        raise refusal("not a time", fix)
    if text.lower() in ("infinite", "unlimited"):
        return "INFINITE"
    minutes = _minutes(text)
    if minutes is None:
        raise refusal("not a time", fix)
    if not 0 < minutes <= 366 * 24 * 60:
        raise refusal("out of range", "give at least one minute and at most 366 days, or infinite")
    return text


def minutes(text: str) -> float:
    """How many minutes a time of the spec is; without end for `infinite`."""
    number = _minutes(text)
    return float("inf") if number is None else number


def _minutes(text: str) -> float | None:
    if _MINUTES.fullmatch(text):
        return int(text)
    if match := _CLOCK.fullmatch(text):
        hours, mins, secs = (int(part) for part in match.groups())
        days = 0
    elif match := _DAYS.fullmatch(text):
        days, hours, mins, secs = (int(part or 0) for part in match.groups())
        if hours > 23:
            return None
    else:
        return None
    if mins > 59 or secs > 59:
        return None
    return ((days * 24 + hours) * 60) + mins + secs / 60


def duration(value: object) -> str:
    """A span of time with its unit: `90s`, `10m`, `2h`, `1d`. A bare number is rejected: its unit would be a guess."""
    text = matching(DURATION, "not a span of time", "write a number and s, m, h or d: 10m, 2h")(value)
    if not 10 <= seconds(text) <= 366 * 86400:
        raise refusal("out of range", "give at least 10s and at most 366d")
    return text


def seconds(text: str) -> int:
    """How many seconds a span of time is."""
    return int(text[:-1]) * _UNIT_S[text[-1]]


def choice(what: str, options: tuple[str, ...]) -> Callable[[object], str]:
    """A check for one word out of a few."""
    fix = f"only `{options[0]}` is supported" if len(options) == 1 else f"choose one of {', '.join(options)}"

    def check(value: object) -> str:
        if not isinstance(value, str) or value not in options:
            raise refusal(f"unknown {what}", fix)
        return value

    return check


def secret_reference(value: object) -> str:
    """`env:NAME` or `file:PATH`. Anything else is refused without showing it: it could be the secret itself."""
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise refusal("not a reference to a secret", "write env:NAME or file:PATH, never the secret itself", "(hidden)")
    return value


def _name(kind: str, pattern: str, limit: int, characters: str, reserved: tuple[str, ...]) -> Callable[[object], str]:
    def check(value: object) -> str:
        text = matching(pattern, f"not a {kind} name", f"use {characters}")(_text(value))
        if len(text) > limit:
            raise refusal(f"this {kind} name is too long", f"use at most {limit} characters")
        if text.lower() in reserved:
            raise refusal("this name is reserved", f"give the {kind} another")
        return text

    return check


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        raise refusal("not text", f'put it in quotes: "{str(value).lower()[:40]}"')
    raise refusal("not text", "write a plain word")


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return False
    return re.fullmatch(r"\[?[0-9A-Fa-f.:]+(%[A-Za-z0-9.-]+)?\]?", text) is not None


def _plain(text: str) -> str:
    bare = text.strip("[]")
    return f'"{bare}"' if ":" in bare else bare


cluster_name = _name("cluster", r"[a-z]([a-z0-9-]*[a-z0-9])?", 24, _SHORT, RESERVED)
nodeset_name = _name("nodeset", r"[a-z]([a-z0-9-]*[a-z0-9])?", 32, _SHORT, (*RESERVED, "controller", "login"))
partition_name = _name(
    "partition", r"[a-z]([a-z0-9_-]*[a-z0-9])?", 32, "a lower-case letter, then letters, digits, `-` and `_`", RESERVED
)
feature_name = _name(
    "feature", r"[A-Za-z][A-Za-z0-9_.-]*", 32, "a letter, then letters, digits, `-`, `_` and `.`", RESERVED
)
site_name = _name("site", r"[a-z][a-z0-9]*", 8, "a lower-case letter, then lower-case letters and digits", ())
