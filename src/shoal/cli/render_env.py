"""How environments look on a terminal."""

from __future__ import annotations

import time

from rich.console import Console

from shoal.cli.columns import Columns
from shoal.cli.say import show_failures, show_findings
from shoal.hostlist import compress
from shoal.verbs.env import CleanResult, Listed
from shoal.verbs.env_build import BuildResult


def show_built(console: Console, result: BuildResult) -> None:
    show_findings(console, result.findings)
    show_failures(console, dict(result.failures))
    for made in result.made:
        word = "built" if made.name in result.fresh else "no changes"
        packages = f"{len(made.packages)} package" + "s" * (len(made.packages) != 1)
        torch = f", torch {made.torch}" + (f" for CUDA {made.cuda}" if made.cuda else "") if made.torch else ""
        console.print(
            f"[green]✓[/] {made.name}: {word}; {packages}, Python {made.python}{torch}; {made.path}",
            highlight=False,
            soft_wrap=True,
        )
        if made.name in result.copied:
            console.print(f"  copied to {compress(result.copied[made.name])}", highlight=False)


def show_list(console: Console, listed: list[Listed]) -> None:
    titles = ("environment", "state", "place", "python", "packages", "torch", "built")
    table = Columns(*titles, wraps=("environment", "built"))
    for one in listed:
        if one.made is None:
            table.add_row(one.name, one.state, one.place, "-", "-", "-", "-")
            continue
        torch = " ".join(filter(None, (one.made.torch, one.made.cuda and f"cuda {one.made.cuda}"))) or "-"
        made_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.made.made_at))
        count = str(len(one.made.packages))
        table.add_row(one.name, one.state, one.place, one.made.python, count, torch, made_at)
    console.print(table)
    # Paths are copied, so they are not broken into a column.
    for one in listed:
        if one.made is not None:
            console.print(f"{one.name} is in {one.made.path}", highlight=False, soft_wrap=True)
    stale = [one.name for one in listed if one.state != "built"]
    if stale:
        console.print(f"\n`shoal env build {' '.join(stale)}` makes what is missing", highlight=False)


def show_cleaned(console: Console, result: CleanResult, dry_run: bool) -> None:
    show_failures(console, dict(result.failures))
    for host, ids in result.removed.items():
        console.print(f"{'would remove' if dry_run else 'removed'} {', '.join(ids)} from {host}", highlight=False)
    for number, reason in result.kept.items():
        console.print(f"kept {number}: {reason}", highlight=False)
    if not result.removed and not result.kept:
        console.print("nothing to clean")
