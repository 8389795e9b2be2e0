"""The commands about job records: usage, restore."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.cli.options import Yes, suggest, with_session
from shoal.cli.screen import Columns, escape_text
from shoal.cli.session import Session, confirm

if TYPE_CHECKING:
    from shoal.slurm.usage import UsageRow
    from shoal.verbs.restore import RestoreResult
    from shoal.verbs.usage import UsageResult


@with_session
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
    *,
    session: Session,
) -> None:
    """Show who used how many GPU hours.

    With their cost, where a nodeset has a `price`. Ordinary users see what Slurm shows them.
    """
    from shoal.verbs.usage import usage as verb

    result = session.run(verb(session.open(), by, since, until))
    if not session.finish(result):
        show_usage(session.console, result)


@with_session
def restore(
    backup: Annotated[
        str | None, typer.Argument(help="The backup to restore, or latest. Without it: list them.")
    ] = None,
    yes: Yes = False,
    *,
    session: Session,
) -> None:
    """List backups of job records, or restore one.

    The current records are backed up first. Jobs keep running, and their records of that time are kept.
    """
    from shoal.verbs.restore import list_backups
    from shoal.verbs.restore import restore as verb

    context = session.open(operator=True)
    if backup is None:
        result = session.run(list_backups(context))
    else:
        records = f"the records of cluster {context.cluster} with {backup}"
        confirm(f"replaces {records}", f"Replace {records}?", yes)
        result = session.run(verb(context, backup))
    if not session.finish(result):
        show_restore(session.console, result)


def show_usage(console: Console, result: UsageResult) -> None:
    period = f"{_format_minute(result.since)} to {_format_minute(result.until)}"
    console.print(f"[bold]{result.cluster}[/]: {period}\n")
    if not result.rows:
        console.print("no usage")
        return
    has_costs = any(row.cost is not None for row in result.rows)
    is_by_job = result.by == "job"
    numbers = (*(() if is_by_job else ("jobs",)), "CPU hours", "GPU hours", *(("cost",) if has_costs else ()))
    table = Columns(result.by, *numbers, *(("what",) if is_by_job else ()), right=numbers, wraps=(result.by, "what"))
    for row in result.rows:
        table.add_row(*_cells(row, has_costs, is_by_job))
    if len(result.rows) > 1:
        table.add_row(*_cells(result.total, has_costs, is_by_job), style="bold")
    console.print(table)
    if has_costs and result.total.unpriced > 0:
        hours = f"{result.total.unpriced:.2f} GPU hours"
        console.print(f"\nnot in the cost: {hours} on nodesets that have no `price`")


def show_restore(console: Console, result: RestoreResult) -> None:
    if result.restored:
        console.print(f"[green]✓[/] {result.cluster}: restored {result.restored} on {result.host}")
        console.print(f"  the previous records are in {result.before}")
        console.print("  accounts and limits are those of that time; `shoal up` changes them to match the file")
        return
    if not result.backups:
        console.print("no backups yet: Shoal makes one every night and before every change")
        return
    table = Columns("backup", "made", "size", wraps=("backup", "made"))
    for backup in result.backups:
        table.add_row(backup.name, _format_minute(backup.made), _format_size(backup.size))
    console.print(table)
    console.print(f"\non {result.host}; `shoal restore NAME` restores one")


def _cells(row: UsageRow, has_costs: bool, is_by_job: bool) -> list[str]:
    cost = [] if not has_costs else ["" if row.cost is None else f"{row.cost:.2f}"]
    hours = [f"{row.cpu_hours:.2f}", f"{row.gpu_hours:.2f}", *cost]
    name = escape_text(row.name)
    return [name, *hours, escape_text(row.detail)] if is_by_job else [name, str(row.jobs), *hours]


def _format_minute(time_s: float) -> str:
    return datetime.fromtimestamp(time_s).strftime("%Y-%m-%d %H:%M")


def _format_size(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1024 * 1024 else f"{count / 1024 / 1024:.1f} MiB"
