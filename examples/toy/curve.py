"""Draws a metric that a run recorded: as an SVG for the run's artifacts, as text for the terminal.

python curve.py metrics.jsonl [METRIC]          `-` reads standard input
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

Points = list[tuple[int, float]]


def read(path: Path, metric: str) -> Points:
    """The values of a metric by step, from the file that the tracker keeps."""
    with path.open() as file:
        return points(file, metric)


def points(lines: Iterable[str], metric: str) -> Points:
    """Of a step that was done twice, because the job was stopped, the later value."""
    found = {}
    for line in lines:
        record = json.loads(line)
        value = record.get("metrics", {}).get(metric)
        if isinstance(value, float | int):  # a value that is not finite is recorded as a word
            found[record["step"]] = float(value)
    return sorted(found.items())


def svg(points: Points, title: str, width: int = 640, height: int = 360) -> str:
    """A line with the smallest and largest value at the axes."""
    left, right, top, bottom = 60, width - 20, 40, height - 40
    (x0, x1), (y0, y1) = _range([x for x, _ in points]), _range([y for _, y in points])
    spots = " ".join(
        f"{left + (x - x0) / (x1 - x0) * (right - left):.1f},{bottom - (y - y0) / (y1 - y0) * (bottom - top):.1f}"
        for x, y in points
    )
    texts = [
        (left - 8, top + 4, "end", f"{y1:.3g}"),
        (left - 8, bottom, "end", f"{y0:.3g}"),
        (left, bottom + 20, "start", f"{x0:.0f}"),
        (right, bottom + 20, "end", f"step {x1:.0f}"),
        (width // 2, 22, "middle", title),
    ]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">',
            f'<rect width="{width}" height="{height}" fill="white"/>',
            f'<path d="M{left} {top}V{bottom}H{right}" fill="none" stroke="black"/>',
            f'<polyline points="{spots}" fill="none" stroke="#1f77b4" stroke-width="1.5"/>',
            *(f'<text x="{x}" y="{y}" font-size="12" text-anchor="{at}">{text}</text>' for x, y, at, text in texts),
            "</svg>\n",
        ]
    )


def text(points: Points, title: str, width: int = 72, height: int = 12) -> str:
    """The same in Braille characters, each of which has room for 2 × 4 dots."""
    (x0, x1), (y0, y1) = _range([x for x, _ in points]), _range([y for _, y in points])
    cells = [[0] * width for _ in range(height)]
    before = None
    for column, y in _columns(points, x0, x1, 2 * width):
        row = round((y1 - y) / (y1 - y0) * (4 * height - 1))
        # Where it is steep, all dots down (or up) to it, so that the line has no gaps.
        first = row if before is None or before == row else before + (1 if row > before else -1)
        for dot in range(min(first, row), max(first, row) + 1):
            cells[dot // 4][column // 2] |= _DOTS[dot % 4][column % 2]
        before = row
    labels = [f"{y1:8.3g}", *[" " * 8] * (height - 2), f"{y0:8.3g}"]
    lines = [
        f"{label} ┤{''.join(chr(0x2800 + dots) for dots in row)}" for label, row in zip(labels, cells, strict=True)
    ]
    last = f"step {x1:.0f}"
    foot = [f"{'':8} └{'─' * width}", f"{'':10}{x0:<{width - len(last)}.0f}{last}"]
    return "\n".join([f"{'':10}{title}", *lines, *foot])


_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))
"""The bit of each dot of a Braille character, by row and column."""


def _columns(points: Points, x0: float, x1: float, count: int) -> Points:
    """One height a column: the mean of the points in it, or on the line between its neighbours."""
    found: dict[int, list[float]] = {}
    for x, y in points:
        found.setdefault(round((x - x0) / (x1 - x0) * (count - 1)), []).append(y)
    means = sorted((column, sum(ys) / len(ys)) for column, ys in found.items())
    between = means[:1]
    for (a, from_y), (b, to_y) in pairwise(means):
        between += [(c, from_y + (to_y - from_y) * (c - a) / (b - a)) for c in range(a + 1, b + 1)]
    return between


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values, default=0.0), max(values, default=1.0)
    return (low, high) if high > low else (low, low + 1)


def main(arguments: list[str]) -> int:
    source, metric = [*arguments, "loss"][:2] if arguments else ("-", "loss")
    found = points(sys.stdin, metric) if source == "-" else read(Path(source), metric)
    if not found:
        print(f"there is no metric {metric} in {source}", file=sys.stderr)
        return 1
    print(text(found, metric))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
