"""The links between members as `shoal bench links` measured them, and the groups of near hosts."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations, pairwise

LINKS = "/var/lib/shoal/links.json"
"""On the controller: the last measurement, which `shoal up` reads."""
SWITCH_PREFIX = "near-"
"""Prefix of switches derived from a measurement: no site's name has a hyphen."""
NCCL = "/etc/shoal/nccl.env"
"""On a node: settings of NCCL derived from the measurement. Jobs read it."""

SPLIT = 4.0
"""Links this many times slower than the next faster ones are between groups, not inside one."""
FAST_MBIT = 5000.0
"""Links with at least this speed never separate hosts, however fast others are."""
PARALLEL_CONNECTIONS = 16
"""The most connections that NCCL opens between two ranks: four threads with four each."""
MIN_PARALLEL_GAIN = 1.2
"""Many connections must be this many times faster than one, or one is enough."""
NO_LINK_MBIT = 0.001
"""The speed of a link that carried nothing."""

Pair = tuple[str, str]


@dataclass(frozen=True)
class LinkSpeed:
    """One direction between two members: its speed, or a `problem`."""

    source: str
    target: str
    rtt_ms: float | None = None
    """The median round trip of one byte over TCP."""
    mbit: float | None = None
    """Mbit/s that reached the target over one connection."""
    mbit_many: float | None = None
    """The same over `PARALLEL_CONNECTIONS` connections at once."""
    problem: str = ""


def rounds(names: Sequence[str], sites: Mapping[str, str] | None = None) -> list[tuple[Pair, ...]]:
    """Every pair once, in rounds in which no pair slows another: a round-robin tournament.

    A host is in at most one pair of a round. Pairs between sites that share a site take turns, as they share its
    uplink.
    """
    sites = sites or {}
    table: list[str | None] = [*names, *([None] if len(names) % 2 else [])]
    scheduled: list[tuple[Pair, ...]] = []
    for _ in range(len(table) - 1):
        half = len(table) // 2
        facing = zip(table[:half], reversed(table[half:]), strict=True)
        scheduled += _turns(
            [(first, second) for first, second in facing if first is not None and second is not None], sites
        )
        table.insert(1, table.pop())
    return scheduled


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


def groups(links: Iterable[LinkSpeed], names: Iterable[str]) -> tuple[tuple[str, ...], ...]:
    """Groups of near hosts: every link inside a group is fast, none between groups is.

    One group where links do not divide like that. A host that was not measured is in a group of its own.
    """
    names = list(dict.fromkeys(names))
    speeds = _speeds(links)
    measured = [name for name in names if any(name in pair for pair in speeds)]
    pairs = {pair: speeds.get(_pair(*pair), NO_LINK_MBIT) for pair in combinations(measured, 2)}
    limit = _split_speed(sorted(pairs.values()))
    if limit is None:
        return (tuple(names),) if names else ()
    near: list[list[str]] = []
    for name in measured:
        group = next((group for group in near if pairs[group[0], name] >= limit), None)
        if group is None:
            near.append([name])
        else:
            group.append(name)
    inside = {pair for group in near for pair in combinations(group, 2)}
    if any((speed >= limit) != (pair in inside) for pair, speed in pairs.items()):
        return (tuple(names),)  # a is near b and b near c, but not a near c
    return (*map(tuple, near), *((name,) for name in names if name not in measured))


def _speeds(links: Iterable[LinkSpeed]) -> dict[Pair, float]:
    """The slower direction of every measured pair."""
    speeds: dict[Pair, float] = {}
    for link in links:
        pair = _pair(link.source, link.target)
        speeds[pair] = min(speeds.get(pair, float("inf")), link.mbit or NO_LINK_MBIT)
    return speeds


def _pair(first: str, second: str) -> Pair:
    return (first, second) if first < second else (second, first)


def _split_speed(speeds: Sequence[float]) -> float | None:
    """The speed of the slowest fast link, where slow and fast links are far apart; else None."""
    steps = [(fast / slow, fast) for slow, fast in pairwise(speeds) if slow < FAST_MBIT]
    step, limit = max(steps, default=(1.0, 0.0))
    return limit if step >= SPLIT else None


def switches(text: str, names: Iterable[str]) -> dict[str, str]:
    """The switch of each host by the measurement, named after its first host; {} where all are near."""
    near = groups(read_links(text), names)
    return {name: SWITCH_PREFIX + group[0] for group in near for name in group} if len(near) > 1 else {}


def sockets(text: str, name: str, names: Iterable[str]) -> int | None:
    """How many connections fill the links from a host: one, or `PARALLEL_CONNECTIONS`. None without a measurement.

    The slowest link decides: the others wait for it.
    """
    others = set(names)
    speeds = [
        (link.mbit, link.mbit_many)
        for link in read_links(text)
        if link.source == name and link.target in others and link.mbit and link.mbit_many
    ]
    if not speeds:
        return None
    single, parallel = min(speeds)
    return PARALLEL_CONNECTIONS if parallel >= single * MIN_PARALLEL_GAIN else 1


def nccl_settings(connections: int) -> str:
    """The environment variables that make NCCL open this many connections, as shell lines."""
    each = round(connections**0.5)
    return f"NCCL_SOCKET_NTHREADS={each}\nNCCL_NSOCKS_PERTHREAD={each}\n"


def merge_measurements(
    before: Iterable[LinkSpeed], now: Iterable[LinkSpeed], names: Iterable[str]
) -> tuple[LinkSpeed, ...]:
    """A new measurement with those links of an older one whose hosts are still members."""
    members = set(names)
    earlier = {(link.source, link.target): link for link in before if {link.source, link.target} <= members}
    return tuple({**earlier, **{(link.source, link.target): link for link in now}}.values())


def links_text(links: Iterable[LinkSpeed]) -> str:
    """The file on the controller."""
    return json.dumps({"links": [asdict(link) for link in links]}, indent=1) + "\n"


def read_links(text: str) -> tuple[LinkSpeed, ...]:
    """The links in that file; none where it is invalid."""
    try:
        return tuple(LinkSpeed(**link) for link in json.loads(text)["links"])
    except (ValueError, KeyError, TypeError):
        return ()
