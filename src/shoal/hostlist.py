"""Slurm's hostlists: `gpu[01-03,07],login` stands for five names.

`expand` agrees with `scontrol show hostnames`, `compress` with `scontrol show hostlistsorted`, `fold` with `scontrol
show hostlist`. Where Slurm guesses what broken text may mean (`a[1-2`, `a[1-]`, `a[ 1-2]`), we refuse instead. Text
after the last bracket (`a[1-2]-ib`) is accepted as by Slurm 24.11. What we write never has it: 22.05 does not read it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from itertools import product

MAX_NAMES = 100_000
"""More names than any cluster has: an expression that stands for more is a mistake or an attack."""
MAX_RANGE = 65_536
"""Slurm's own limit on one range."""
MAX_LENGTH = 255
"""The longest name of a host in DNS."""

_ITEM = re.compile(r"(?:[^\[\],\s]|\[[^\[\]]*\])+")
_BRACKET = re.compile(r"\[([^\]]*)\]")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")
_NOT_IN_A_NAME = re.compile(r"[\[\],\s]")
_NATURAL = re.compile(r"[0-9]+|[^0-9]")


class HostlistError(ValueError):
    """A text that is no hostlist. `problem` is what is wrong with it, for those who name the text themselves."""

    def __init__(self, text: str, problem: str) -> None:
        super().__init__(f"hostlist {_shorten(text)}: {problem}")
        self.problem = problem


def expand(text: str) -> list[str]:
    """The names a hostlist stands for, in Slurm's order, duplicates kept. ValueError says what is wrong with it."""
    names: list[str] = []
    for item in _items(text):
        names.extend(_expand_item(item, MAX_NAMES - len(names)))
    return names


def compress(names: Iterable[str]) -> str:
    """The shortest hostlist for a set of names: sorted as Slurm sorts, each name once.

    Where padding is mixed (a99, a100, a001), Slurm's answer depends on the order it gets the names in. Ours is that for
    sorted names.
    """
    distinct = {name: _split(name) for name in names}
    widths = _find_widths(distinct.values())
    places = {prefix: _natural(prefix) for prefix in {prefix for prefix, _ in distinct.values()}}

    def order(name: str) -> tuple[object, ...]:
        prefix, digits = distinct[name]
        if not digits:
            return (places[prefix], -1, 0)
        return (places[prefix], _padding(digits, widths.get(prefix, ())), int(digits))

    return fold(sorted(distinct, key=order))


def fold(names: Iterable[str]) -> str:
    """A hostlist that expands to exactly these names in this order, duplicates kept.

    Slurm pairs NodeName= with NodeAddr= and NodeHostname= by position, so there the order is part of the meaning.
    """
    items: list[str] = []
    group = ""  # the prefix whose numbers are being collected
    ranges: list[list[str]] = []  # its first and its last number, padded to the width of the first
    for name in names:
        prefix, digits = _split(name)
        if not digits:
            _close(items, group, ranges)
            items.append(name)
            continue
        if ranges and prefix == group:
            first, last = ranges[-1]
            if digits == f"{int(last) + 1:0{len(first)}}":
                ranges[-1][1] = digits
                continue
        if prefix != group:
            _close(items, group, ranges)
            group = prefix
        ranges.append([digits, digits])
    _close(items, group, ranges)
    return ",".join(items)


def _items(text: str) -> list[str]:
    """The parts between commas or blanks, brackets left whole."""
    items: list[str] = []
    position = 0
    while position < len(text):
        if text[position] in ", \t\n\r":
            position += 1
            continue
        match = _ITEM.match(text, position)
        end = match.end() if match else position
        if end < len(text) and text[end] in "[]":
            raise HostlistError(text, f"a bracket at character {end + 1} has no partner")
        if match is None:
            raise HostlistError(text, f"an unsupported blank at character {position + 1}")
        items.append(match.group())
        position = end
    return items


def _expand_item(item: str, room: int) -> Iterable[str]:
    literals = _BRACKET.split(item)
    bodies = literals[1::2]
    literals = literals[0::2]
    if not bodies:
        _split(item)
        if room < 1:
            raise _too_many(item)
        return [item]
    ranges = [[_parse_range(item, part) for part in body.split(",")] for body in bodies]
    if math.prod(sum(high - low + 1 for low, high, _ in bracket) for bracket in ranges) > room:
        raise _too_many(item)
    if sum(map(len, literals)) + sum(max(width for *_, width in bracket) for bracket in ranges) > MAX_LENGTH:
        raise HostlistError(item, f"a name of more than {MAX_LENGTH} characters")
    numbers = [[f"{n:0{width}}" for low, high, width in bracket for n in range(low, high + 1)] for bracket in ranges]
    # Slurm's order: the last bracket runs fastest, then the first, the second, and so on.
    *leading, last = numbers
    return [
        "".join(text for pair in zip(literals, (*reversed(choice), final), strict=False) for text in pair)
        + literals[-1]
        for choice in product(*reversed(leading))
        for final in last
    ]


def _parse_range(item: str, text: str) -> tuple[int, int, int]:
    """`08-11` as (8, 11, width 2)."""
    match = _RANGE.fullmatch(text)
    if match is None:
        stepped = " (Slurm has no stepped ranges: name the hosts one by one)" if re.search(r"[/:]", text) else ""
        raise HostlistError(item, f"{text!r} is not a number or a range like 01-16{stepped}")
    low = _number(item, match[1])
    high = _number(item, match[2] or match[1])
    if high < low:
        raise HostlistError(item, f"the range {text!r} runs backwards")
    if high - low >= MAX_RANGE:
        raise HostlistError(item, f"the range {text!r} has more than {MAX_RANGE} names")
    return low, high, len(match[1])


def _number(item: str, digits: str) -> int:
    if len(digits.lstrip("0")) > 18:
        raise HostlistError(item, f"the number {_shorten(digits)} is too large for Slurm")
    if len(digits) > MAX_LENGTH:
        raise HostlistError(item, f"a name of more than {MAX_LENGTH} characters")
    return int(digits)


def _split(name: str) -> tuple[str, str]:
    """A name as its prefix and the digits it ends with."""
    if not name or _NOT_IN_A_NAME.search(name):
        raise ValueError(f"{name!r} is not the name of a host")
    if len(name) > MAX_LENGTH:
        raise ValueError(f"the name {_shorten(name)} has more than {MAX_LENGTH} characters")
    prefix = name.rstrip("0123456789")
    digits = name[len(prefix) :]
    if len(digits) > 18:
        _number(name, digits)
    return prefix, digits


def _close(items: list[str], prefix: str, ranges: list[list[str]]) -> None:
    """Write the collected ranges of one prefix as one part, and start again."""
    if ranges:
        text = ",".join(first if first == last else f"{first}-{last}" for first, last in ranges)
        items.append(f"{prefix}[{text}]" if "," in text or "-" in text else prefix + text)
        ranges.clear()


def _find_widths(names: Iterable[tuple[str, str]]) -> dict[str, tuple[int, ...]]:
    """For each prefix, the widths to which some of its numbers are padded with zeros, widest first."""
    widths: dict[str, set[int]] = {}
    for prefix, digits in names:
        if len(digits) > 1 and digits[0] == "0":
            widths.setdefault(prefix, set()).add(len(digits))
    return {prefix: tuple(sorted(counts, reverse=True)) for prefix, counts in widths.items()}


def _padding(digits: str, widths: tuple[int, ...]) -> int:
    """The padded series a number belongs to: 10 continues 08, 09 but not 8, 9. 0 for the plain one."""
    if digits[0] == "0" and len(digits) > 1:
        return len(digits)
    return next((width for width in widths if width <= len(digits)), 0)


def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A sort key in Slurm's order of prefixes: rack2 before rack10, and rack02 before both."""
    return tuple(
        (ord(run[0]), 0, run) if run[0] == "0" or not "0" <= run[0] <= "9" else (ord("1"), len(run), run)
        for run in _NATURAL.findall(text)
    )


def _too_many(item: str) -> ValueError:
    return HostlistError(item, f"stands for more than {MAX_NAMES} names")


def _shorten(text: str) -> str:
    return repr(text if len(text) <= 60 else text[:57] + "...")
