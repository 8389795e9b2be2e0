"""The links between members as `shoal bench links` measured them, and which hosts are near each other by them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise
from pathlib import Path

LINKS = "/var/lib/shoal/links.json"
"""On the controller: the last measurement. `shoal up` reads it as a fact."""
NEAR = "near-"
"""How the names of switches begin that come of a measurement: no site's name has a hyphen."""
NCCL = "/etc/shoal/nccl.env"
"""On a node: what the measurement of its links says for NCCL. Jobs read it."""
PROGRAM = Path(__file__).with_name("links_program.py")

SPLIT = 4.0
"""Links that are so many times slower than the next faster ones lie between groups, not inside one."""
PLENTY = 5000.0
"""Million bits a second. Links that carry so much never keep hosts apart, however fast others are."""
MANY = 16
"""Connections that NCCL opens at most between two ranks over a link that one does not fill: four threads of four."""
GAIN = 1.2
"""Many connections must carry so many times what one carries, or one is enough."""
NO_LINK = 0.001
"""Counts as the speed of a link over which nothing came."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class Link:
    """One direction between two members. Without figures there is a `problem`."""

    source: str
    target: str
    rtt_ms: float | None = None
    """The median round trip of a byte over TCP."""
    mbit: float | None = None
    """Million bits a second that reached the target over one connection."""
    mbit_many: float | None = None
    """The same over `MANY` connections at once."""
    problem: str = ""


def rounds(names: Sequence[str], sites: Mapping[str, str] | None = None) -> list[tuple[Pair, ...]]:
    """Every pair once, in rounds in which no pair disturbs another: a tournament of all against all.

    A host is in one pair of a round at most. Of the pairs between sites, those that share a site take turns: their
    packets meet on its uplink.
    """
    sites = sites or {}
    table: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    found: list[tuple[Pair, ...]] = []
    for _ in range(len(table) - 1):
        half = len(table) // 2
        facing = zip(table[:half], reversed(table[half:]), strict=True)
        found += _turns([(one, other) for one, other in facing if one is not None and other is not None], sites)
        table.insert(1, table.pop())
    return found


def _turns(pairs: list[Pair], sites: Mapping[str, str]) -> list[tuple[Pair, ...]]:
    turns: list[tuple[Pair, ...]] = []
    while pairs:
        busy: set[str] = set()
        now: list[Pair] = []
        for pair in pairs:
            uplinks = {sites.get(name, "") for name in pair}
            if len(uplinks) == 1 or not uplinks & busy:
                now.append(pair)
                busy |= uplinks if len(uplinks) > 1 else set()
        turns.append(tuple(now))
        pairs = [pair for pair in pairs if pair not in now]
    return turns


def groups(links: Iterable[Link], names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """The hosts that are near each other: inside a group every link is fast, between groups none is.

    One group where no such line can be drawn. A host that was not measured is in a group of its own.
    """
    names = list(dict.fromkeys(names))
    speeds = _speeds(links)
    known = [name for name in names if any(name in pair for pair in speeds)]
    pairs = {pair: speeds.get(_pair(*pair), NO_LINK) for pair in combinations(known, 2)}
    limit = _line_between(sorted(pairs.values()))
    if limit is None:
        return (tuple(names),) if names else ()
    found: list[list[str]] = []
    for name in known:
        near = next((group for group in found if pairs[group[0], name] >= limit), None)
        if near is None:
            found.append([name])
        else:
            near.append(name)
    inside = {pair for group in found for pair in combinations(group, 2)}
    if any((speed >= limit) != (pair in inside) for pair, speed in pairs.items()):
        return (tuple(names),)  # a is near b and b near c, but not a near c
    return (*map(tuple, found), *((name,) for name in names if name not in known))


def _speeds(links: Iterable[Link]) -> dict[Pair, float]:
    """The slower direction of every pair that was measured."""
    speeds: dict[Pair, float] = {}
    for link in links:
        pair = _pair(link.source, link.target)
        speeds[pair] = min(speeds.get(pair, float("inf")), link.mbit or NO_LINK)
    return speeds


def _pair(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def _line_between(speeds: Sequence[float]) -> float | None:
    """The slowest of the fast links, where the step from the slow ones to it is large; None where there is no step."""
    steps = [(fast / slow, fast) for slow, fast in pairwise(speeds) if slow < PLENTY]
    step, limit = max(steps, default=(1.0, 0.0))
    return limit if step >= SPLIT else None


def switches(text: str, names: Iterable[str]) -> dict[str, str]:
    """The switch that each host is at by a measurement, named after the first host there; {} where all are near."""
    found = groups(read_links(text), names)
    return {name: NEAR + group[0] for group in found for name in group} if len(found) > 1 else {}


def sockets(text: str, name: str, names: Iterable[str]) -> int | None:
    """How many connections fill the links from a host to others by a measurement: one, or `MANY`. None without one.

    The slowest link counts: the others wait for it.
    """
    others = set(names)
    found = [
        (link.mbit, link.mbit_many)
        for link in read_links(text)
        if link.source == name and link.target in others and link.mbit and link.mbit_many
    ]
    if not found:
        return None
    one, many = min(found)
    return MANY if many >= one * GAIN else 1


def nccl_settings(connections: int) -> str:
    """The variables by which NCCL opens so many connections, as lines for a shell."""
    each = round(connections**0.5)
    return f"NCCL_SOCKET_NTHREADS={each}\nNCCL_NSOCKS_PERTHREAD={each}\n"


def merged(before: Iterable[Link], now: Iterable[Link], names: Iterable[str]) -> tuple[Link, ...]:
    """A new measurement beside an older one: what was not measured again stays, as long as its hosts are members."""
    members = set(names)
    kept = {(link.source, link.target): link for link in before if {link.source, link.target} <= members}
    return tuple({**kept, **{(link.source, link.target): link for link in now}}.values())


def links_text(links: Iterable[Link]) -> str:
    """What is kept on the controller."""
    return json.dumps({"links": [asdict(link) for link in links]}, indent=1) + "\n"


def read_links(text: str) -> tuple[Link, ...]:
    """The links that a controller keeps; none where the text is not ours, or broken."""
    try:
        found = json.loads(text)["links"]
        return tuple(Link(**link) for link in found)
    except (ValueError, KeyError, TypeError):
        return ()
