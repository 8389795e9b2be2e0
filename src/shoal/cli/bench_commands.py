"""The commands that measure a cluster: bench links."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shoal.cli.options import with_session
from shoal.cli.output import plain
from shoal.cli.screen import group_by, show_failures
from shoal.cli.session import PARTLY, Session
from shoal.hostlist import compress

if TYPE_CHECKING:
    from shoal.verbs.links import LinksResult

HEAT = ("white on red", "black on dark_orange", "black on yellow", "black on green3", "white on green4")
"""From the worst measured value to the best."""

bench = typer.Typer(help="Measure the cluster.", no_args_is_help=True, rich_markup_mode=None)


@bench.command("links")
@with_session
def links(
    hosts: Annotated[
        str | None,
        typer.Option("--hosts", "-w", metavar="HOSTS", help="Only links between these: gpu01,gpu02. Default: all."),
    ] = None,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to measure each direction.", min=0.2, max=60)
    ] = 1.0,
    *,
    session: Session,
) -> None:
    """Measure latency and bandwidth between every two hosts.

    It uses the cluster's own network, in rounds in which no two pairs share a host. The next `up` tells Slurm which
    hosts are near each other, unless the file names sites. Jobs that use the network meanwhile get slower, and distort
    the result.
    """
    from shoal.verbs.links import bench_links

    result = session.run(bench_links(session.open(operator=True), hosts, seconds))
    if not session.finish({**plain(result), "whole": result.whole}, 0 if result.whole else PARTLY):
        show_links(session.console, result)


def show_links(console: Console, result: LinksResult) -> None:
    """Bandwidth and round trip as heat maps, from the host of a row to that of a column; then groups of near hosts."""
    links = {(link.source, link.target): link for link in result.links}
    speeds = {pair: link.mbit for pair, link in links.items() if link.mbit}
    trips = {pair: link.rtt_ms for pair, link in links.items() if link.rtt_ms}
    if links:
        console.print("[bold]bandwidth[/] from row to column, bits per second")
        _show_matrix(console, result.hosts, speeds, speed_text, best=max)
        console.print("\n[bold]round trip[/] from row to column, milliseconds")
        _show_matrix(console, result.hosts, trips, lambda value: f"{value:.2f}", best=min)
        console.print()
    for problem, failed_links in group_by(
        (link for link in result.links if link.problem), lambda link: link.problem
    ).items():
        pairs = ", ".join(f"{link.source} to {link.target}" for link in failed_links)
        console.print(Text(f"no link from {pairs}: {problem}", style="red"))
    show_failures(console, result.failures)
    if len(result.groups) > 1:
        group_text = " | ".join(compress(group) for group in result.groups)
        console.print(f"near each other: {group_text}", markup=False)
        console.print(
            "Unless the file names sites, the next `shoal up` tells Slurm: a job then stays inside one group."
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
    """The matrix, in pieces below one another where the terminal is too narrow."""
    choose_worst, choose_best = (min, max) if best is max else (max, min)
    limits = (choose_worst(values.values()), choose_best(values.values())) if values else (1.0, 1.0)

    def cell(row: str, column: str) -> Text:
        value = values.get((row, column))
        if row == column:
            return Text("·", style="dim")
        return Text("none", style="bold red") if value is None else Text(text(value), style=HEAT[heat(value, *limits)])

    name_width = max(map(len, hosts))
    cell_width = max(name_width, len("none"), *(len(text(value)) for value in values.values())) + 1
    columns_per_table = max((console.width - name_width - 1) // cell_width, 1)
    for start in range(0, len(hosts), columns_per_table):
        columns = hosts[start : start + columns_per_table]
        table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 1, 0, 0))
        table.add_column("", no_wrap=True)
        for name in columns:
            table.add_column(name, justify="right", no_wrap=True)
        for row in hosts:
            table.add_row(row, *(cell(row, column) for column in columns))
        if start:
            console.print()
        console.print(table)


def heat(value: float, worst: float, best: float) -> int:
    """Where a value lies between the worst and the best, by factors: 0 to 4. All are good where they are alike."""
    spread = math.log(best / worst)
    if abs(spread) < math.log(2):
        return len(HEAT) - 1
    fraction = math.log(value / worst) / spread
    return min(int(fraction * len(HEAT)), len(HEAT) - 1)
