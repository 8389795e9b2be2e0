"""The commands about job records: usage, restore."""

from __future__ import annotations

import sys
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.cli.options import Cluster, File, Json, Yes, suggest
from shoal.cli.screen import Columns, escape_text
from shoal.cli.session import Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.slurm.usage import UsageRow
    from shoal.verbs.restore import RestoreResult
    from shoal.verbs.usage import UsageResult


def usage(
    by: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="Sum by user, account, job or nodeset.",
            autocompletion=suggest("user", "account", "job", "nodeset"),
        ),
    ] = "user",
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Since then: 2026-11-01, 2026-11-01T14:30, 12h, 7d or 4w. Default: 30d."),
    ] = None,
    until: Annotated[str | None, typer.Option(metavar="TIME", help="Until then. Default: now.")] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show who used how many GPU hours.

    With their cost, where a nodeset has a `price`.
    """
    with Session(json) as session:
        from shoal.verbs.usage import usage as verb

        result = session.run(verb(session.open(file, cluster), by, since, until))
        if json:
            return session.finish_value(result)
        show_usage(session.console, result)


def restore(
    backup: Annotated[
        str | None, typer.Argument(help="The backup to restore, or latest. Without it: list them.")
    ] = None,
    yes: Yes = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """List backups of job records, or restore one.

    The current records are backed up first. Jobs keep running, and their records of that time are kept.
    """
    with Session(json) as session:
        from shoal.verbs.restore import list_backups
        from shoal.verbs.restore import restore as verb

        context = session.open(file, cluster)
        if backup is None:
            result = session.run(list_backups(context))
        else:
            _confirm(context.cluster, backup, yes)
            result = session.run(verb(context, backup))
        if json:
            return session.finish_value(result)
        show_restore(session.console, result)


def _confirm(cluster: str, backup: str, yes: bool) -> None:
    if yes:
        return
    what = f"the records of cluster {cluster} with {backup}"
    if not sys.stdin.isatty():
        raise UsageError(f"this replaces {what}", hint="use --yes")
    if not typer.confirm(f"Replace {what}?", err=True):
        raise Interrupted("nothing was changed")


def show_usage(console: Console, result: UsageResult) -> None:
    period = f"{_minute(result.since)} to {_minute(result.until)}"
    console.print(f"[bold]{result.cluster}[/]: {period}\n", highlight=False)
    if not result.rows:
        console.print("no usage")
        return
    costs = any(row.cost is not None for row in result.rows)
    detailed = result.by == "job"
    numbers = (*(() if detailed else ("jobs",)), "CPU hours", "GPU hours", *(("cost",) if costs else ()))
    table = Columns(result.by, *numbers, *(("what",) if detailed else ()), right=numbers, wraps=(result.by, "what"))
    for row in result.rows:
        table.add_row(*_cells(row, costs, detailed))
    if len(result.rows) > 1:
        table.add_row(*_cells(result.total, costs, detailed), style="bold")
    console.print(table)
    if costs and result.total.unpriced > 0:
        hours = f"{result.total.unpriced:.2f} GPU hours"
        console.print(f"\nnot in the cost: {hours} on nodesets that have no `price`", highlight=False)


def show_restore(console: Console, result: RestoreResult) -> None:
    if result.restored:
        console.print(f"[green]✓[/] {result.cluster}: restored {result.restored} on {result.host}", highlight=False)
        console.print(f"  the previous records are in {result.before}", highlight=False)
        console.print("  accounts and limits are those of that time; `shoal up` changes them to match the file")
        return
    if not result.backups:
        console.print("no backups yet: Shoal makes one every night and before every change")
        return
    table = Columns("backup", "made", "size", wraps=("backup", "made"))
    for backup in result.backups:
        table.add_row(backup.name, _minute(backup.made), _size(backup.size))
    console.print(table)
    console.print(f"\non {result.host}; `shoal restore NAME` restores one", highlight=False)


def _cells(row: UsageRow, costs: bool, detailed: bool) -> list[str]:
    cells = [escape_text(row.name)]
    if not detailed:
        cells.append(str(row.jobs))
    cells += [f"{row.cpu_hours:.2f}", f"{row.gpu_hours:.2f}"]
    if costs:
        cells.append("" if row.cost is None else f"{row.cost:.2f}")
    if detailed:
        cells.append(escape_text(row.detail))
    return cells


def _minute(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M")


def _size(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1024 * 1024 else f"{count / 1024 / 1024:.1f} MiB"


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(usage)
    app.command()(restore)
