"""Links between hosts as a heat map: red is slow, green is fast. Colours only where the console has them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.say import show_failures
from shoal.hostlist import compress
from shoal.network.links import Link
from shoal.verbs.links import LinksResult

HEAT = ("white on red", "black on dark_orange", "black on yellow", "black on green3", "white on green4")
"""From the worst to the best of what was measured."""


def show_links(console: Console, result: LinksResult) -> None:
    """Two matrices, from the host of a row to the host of a column; then what they come to."""
    links = {(link.source, link.target): link for link in result.links}
    speeds = {pair: link.mbit for pair, link in links.items() if link.mbit}
    trips = {pair: link.rtt_ms for pair, link in links.items() if link.rtt_ms}
    if links:
        console.print("[bold]bandwidth[/] from row to column, bits a second", highlight=False)
        _show_matrix(console, result.hosts, speeds, speed_text, best=max)
        console.print("\n[bold]round trip[/] from row to column, milliseconds", highlight=False)
        _show_matrix(console, result.hosts, trips, lambda value: f"{value:.2f}", best=min)
        console.print()
    for problem, some in _problems(result.links).items():
        told = ", ".join(f"{link.source} to {link.target}" for link in some)
        console.print(Text(f"no link from {told}: {problem}", style="red"))
    show_failures(console, dict(result.failures))
    if len(result.groups) > 1:
        near = " | ".join(compress(group) for group in result.groups)
        console.print(f"near each other: {near}", highlight=False, markup=False)
        console.print(
            "Where the file names no sites, the next `shoal up` tells Slurm so: a job stays inside one group."
        )
    elif speeds:
        console.print("no host is far from the others")


def speed_text(mbit: float) -> str:
    """A speed in three or four characters and its unit: `94.2M`, `9.41G`."""
    value, unit = (mbit / 1000, "G") if mbit >= 1000 else (mbit, "M")
    digits = 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f}{unit}"


def _show_matrix(
    console: Console,
    hosts: Sequence[str],
    values: Mapping[tuple[str, str], float],
    text: Callable[[float], str],
    best: Callable[[float, float], float],
) -> None:
    """The matrix, in as many pieces below one another as the terminal is too narrow for."""
    worst, top = (min, max) if best is max else (max, min)
    ends = (worst(values.values()), top(values.values())) if values else (1.0, 1.0)

    def cell(row: str, column: str) -> Text:
        value = values.get((row, column))
        if row == column:
            return Text("·", style="dim")
        return Text("none", style="bold red") if value is None else Text(text(value), style=HEAT[heat(value, *ends)])

    names = max(map(len, hosts))
    wide = max(names, len("none"), *(len(text(value)) for value in values.values())) + 1
    fit = max((console.width - names - 1) // wide, 1)
    for first in range(0, len(hosts), fit):
        columns = hosts[first : first + fit]
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in hosts:
            table.add_row(row, *(cell(row, column) for column in columns))
        if first:
            console.print()
        console.print(table)


def heat(value: float, worst: float, best: float) -> int:
    """Where a value lies between the worst and the best, by factors: 0 to 4. All are good where they are alike."""
    spread = math.log(best / worst)
    if abs(spread) < math.log(2):
        return len(HEAT) - 1
    part = math.log(value / worst) / spread
    return min(int(part * len(HEAT)), len(HEAT) - 1)


def _problems(links: Sequence[Link]) -> dict[str, list[Link]]:
    found: dict[str, list[Link]] = {}
    for link in links:
        if link.problem:
            found.setdefault(link.problem, []).append(link)
    return found
