"""The table at the end of scripts/test, and the one that was saved."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    # tests/conftest.py reads the saved table: imported at once, Shoal's modules would be under every test.
    from scripts.suite.machine import Samples

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "bench/results/tests.txt"
SLOWEST = 10
BRIEF_S = 3.0
"""Unit files below it are in the saved table alone."""
Record = dict[str, Any]


@dataclass(frozen=True)
class Span:
    """A part of the run, by the clock of time.monotonic()."""

    name: str
    begin: float
    end: float


def saved_seconds(file: Path = SAVED) -> dict[str, float]:
    """Seconds of each part, phase and file in the saved table."""
    text = file.read_text() if file.exists() else ""
    rows = re.findall(r"^([\w./-]+\.py|[a-z][a-z-]+) +(?:\d+ +)?(\d+\.\d)(?: |$)", text, re.MULTILINE)
    return {name: float(seconds) for name, seconds in rows}


def saved_heading(file: Path = SAVED) -> str:
    return file.read_text().partition("\n")[0] if file.exists() else ""


def read_records(directory: Path) -> list[Record]:
    """What tests/timing.py has recorded; a killed process may leave half a line."""
    lines = [line for file in sorted(directory.glob("*.jsonl")) for line in file.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def failed_files(records: Iterable[Record]) -> list[str]:
    return sorted({row["file"] for row in records if row.get("outcome") == "failed"})


def render(
    heading: str, spans: list[Span], records: list[Record], samples: Samples, saved: Mapping[str, float], whole: bool
) -> str:
    """The table; `whole` has every file."""
    records = [row for row in records if row["kind"] != "test" or row.get("outcome")]
    hosts = host_seconds(records, samples)
    lines = [heading, *_parts(spans, samples, saved), "", *_phases(records, hosts, samples, saved)]
    lines += ["", *_slowest(records), "", *_files(records, hosts, samples, saved, whole)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def host_seconds(records: list[Record], samples: Samples) -> dict[int, float]:
    """CPU seconds of hosts while a record lasted, by its place in the list; of nested ones each has them.

    A host belongs to the process that started it, and to what this process did at the moment.
    """
    rows: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for moment, process, seconds in samples.hosts:
        rows[process].append((moment, seconds))
    used = {}
    for at, row in enumerate(records):
        mine = rows.get(row["process"], ())
        used[at] = sum(seconds for moment, seconds in mine if row["begin"] < moment <= row["end"])
    return used


def _parts(spans: list[Span], samples: Samples, saved: Mapping[str, float]) -> Iterable[str]:
    yield f"{'part':<28}{'seconds':>9}{'change':>9}{'CPU s':>9}{'idle':>7}"
    total = Span("total", min(span.begin for span in spans), max(span.end for span in spans))
    for span in [*spans, total]:
        seconds = span.end - span.begin
        idle, busy = samples.idle(span.begin, span.end)
        share = f"{100 * idle / (idle + busy):5.0f} %" if idle + busy else ""
        used = f"{busy:9.1f}" if idle + busy else f"{'':9}"
        yield f"{span.name:<28}{seconds:9.1f}{_change(span.name, seconds, saved)}{used}{share:>7}"


def _phases(
    records: list[Record], hosts: Mapping[int, float], samples: Samples, saved: Mapping[str, float]
) -> Iterable[str]:
    """Seconds added up over processes. Of the tests on clusters, what is neither `up` nor `down`."""
    count: Counter[str] = Counter()
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0])
    with_clusters = {row["file"] for row in records if row["kind"] == "up"}
    up: set[tuple[str, str]] = set()
    for at, row in enumerate(records):
        kind = row["kind"]
        amounts = (row["end"] - row["begin"], row["cpu"], hosts[at])
        cluster = (row["process"], row["name"])
        if kind == "up" and cluster not in up:
            count["clusters-built"] += 1
            up.add(cluster)
            kind = "first-up"
        elif kind == "down":
            up.discard(cluster)
        if kind in ("up", "first-up") and row.get("boot"):
            # What hosts use meanwhile is in the lines of `up`.
            sums["boot"][0] += row["boot"]
            sums[kind][0] -= row["boot"]
            count["boot"] += 1
        if kind == "test" and row["file"] not in with_clusters:
            continue
        count[kind] += 1
        for place, amount in enumerate(amounts):
            sums[kind][place] += amount
            if kind in ("up", "first-up", "down"):
                sums["test"][place] -= amount
    yield f"{'phase':<21}{'count':>7}{'seconds':>9}{'change':>9}{'CPU s':>9}{'hosts':>9}"
    titles = {
        "collection": "collection",
        "boot": "boot",
        "first-up": "build-up",
        "up": "later-up",
        "test": "tests",
        "down": "down",
    }
    for kind, title in titles.items():
        seconds, cpu, used = sums[kind]
        of_hosts = f"{used:9.1f}" if samples.counted else ""
        yield f"{title:<21}{count[kind]:7}{seconds:9.1f}{_change(title, seconds, saved)}{cpu:9.1f}{of_hosts}"
    mine = {row["process"] for row in records}
    others = sum(process in mine for _, process in samples.clusters)
    seen = f"; with those of benches and of the sandbox's own tests: {others}" if samples.counted else ""
    yield f"clusters built: {count['clusters-built']}{seen}"


def _slowest(records: list[Record]) -> Iterable[str]:
    tests = sorted((row for row in records if row["kind"] == "test"), key=lambda row: row["begin"] - row["end"])
    yield f"the {SLOWEST} slowest tests"
    for row in tests[:SLOWEST]:
        yield f"{row['end'] - row['begin']:9.1f} {row['cpu']:8.1f}  {row['name']}"


def _files(
    records: list[Record], hosts: Mapping[int, float], samples: Samples, saved: Mapping[str, float], whole: bool
) -> Iterable[str]:
    sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0, 0.0, 0.0])
    for at, row in enumerate(records):
        if row["kind"] == "test":
            for place, amount in enumerate((row["end"] - row["begin"], row["cpu"], hosts[at], 1)):
                sums[row["file"]][place] += amount
    yield f"{'file':<52}{'tests':>7}{'seconds':>9}{'change':>9}{'CPU s':>9}{'hosts':>9}"
    left = 0
    for file, (seconds, cpu, used, tests) in sorted(sums.items(), key=lambda item: -item[1][0]):
        if not whole and seconds < BRIEF_S and "e2e" not in file:
            left += 1
            continue
        of_hosts = f"{used:9.1f}" if samples.counted and "e2e" in file else ""
        yield f"{file:<52} {tests:6.0f}{seconds:9.1f}{_change(file, seconds, saved)}{cpu:9.1f}{of_hosts}"
    if left:
        yield f"{left} files below {BRIEF_S:.0f} s each"


def _change(name: str, seconds: float, saved: Mapping[str, float]) -> str:
    return f"{seconds - saved[name]:+9.1f}" if name in saved else f"{'':9}"
