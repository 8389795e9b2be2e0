"""What a person sees of job records and of keys: use and cost, backups, rotations."""

from __future__ import annotations

from datetime import datetime

from rich.console import Console
from rich.markup import escape

from shoal.cli.columns import Columns
from shoal.cli.say import show_failures
from shoal.hostlist import compress
from shoal.slurm.usage import UsageRow
from shoal.spec.words import printable
from shoal.verbs.keys import KeysResult
from shoal.verbs.restore import RestoreResult
from shoal.verbs.usage import UsageResult


def show_usage(console: Console, result: UsageResult) -> None:
    period = f"{_minute(result.since)} to {_minute(result.until)}"
    console.print(f"[bold]{result.cluster}[/]: {period}\n", highlight=False)
    if not result.rows:
        console.print("nothing was used")
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
        console.print(f"  what was there until now is in {result.before}", highlight=False)
        console.print("  accounts and limits are those of that time; `shoal up` brings them to what the file says")
        return
    if not result.backups:
        console.print("no backups yet: one is made every night, and before every change")
        return
    table = Columns("backup", "made", "size", wraps=("backup", "made"))
    for backup in result.backups:
        table.add_row(backup.name, _minute(backup.made), _size(backup.size))
    console.print(table)
    console.print(f"\non {result.host}; `shoal restore NAME` puts one back", highlight=False)


def show_keys(console: Console, result: KeysResult) -> None:
    for key in result.rotated:
        how = "an earlier rotation is finished" if key.finished else "a new key"
        console.print(f"[green]✓[/] {key.key}: {how} on {compress(key.hosts)}", highlight=False)
        quiet = "Slurm always answered" if not key.failed_seconds else f"Slurm failed for {key.failed_seconds:.2f} s"
        slowest = f"{key.asked} times asked, the slowest answer took {key.slowest_answer:.1f} s"
        console.print(f"  {quiet} ({slowest})", highlight=False)
    show_failures(console, dict(result.left))
    if result.left:
        console.print(f"  {compress(result.left)} has the old key: run `shoal up` when it answers", highlight=False)


def _cells(row: UsageRow, costs: bool, detailed: bool) -> list[str]:
    cells = [escape(printable(row.name))]
    if not detailed:
        cells.append(str(row.jobs))
    cells += [f"{row.cpu_hours:.2f}", f"{row.gpu_hours:.2f}"]
    if costs:
        cells.append("" if row.cost is None else f"{row.cost:.2f}")
    if detailed:
        cells.append(escape(printable(row.detail)))
    return cells


def _minute(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d %H:%M")


def _size(count: int) -> str:
    return f"{count / 1024:.0f} KiB" if count < 1024 * 1024 else f"{count / 1024 / 1024:.1f} MiB"
