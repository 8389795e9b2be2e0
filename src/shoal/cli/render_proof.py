"""What a person sees of a proof: a table of the ways the script was run, and why one failed."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shoal.cli.columns import Columns
from shoal.proof.compare import Difference
from shoal.proof.model import ProofResult, Row
from shoal.spec.words import printable


def show_proof(console: Console, result: ProofResult) -> None:
    table = Columns("launcher", "parallel", "losses", "first gradient", "parameters", "", wraps=("",))
    for row in result.rows:
        told = _differences(row) if row.found else ("-", "-", "-")
        table.add_row(row.launcher, row.parallel, *told, _verdict(row))
    console.print(
        f"largest relative differences between {result.processes} processes and one, over {result.steps} steps"
        f" in {result.dtype}:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(table)
    for cause in dict.fromkeys(row.cause for row in result.rows if row.cause):
        ways = ", ".join(f"{row.launcher} {row.parallel}" for row in result.rows if row.cause == cause)
        lines = [printable(line) for line in cause.split("\n")]
        console.print(f"[red]✗[/] {ways}: {escape(lines[0])}", highlight=False, soft_wrap=True)
        for line in lines[1:]:
            console.print(f"  {escape(line)}", highlight=False, soft_wrap=True)
    if result.passed:
        console.print(
            f"[green]✓[/] {escape(printable(result.script))} trains the same with {result.processes} processes as with"
            f" one: nothing differs by more than {result.tolerance:g}",
            highlight=False,
            soft_wrap=True,
        )


def _differences(row: Row) -> tuple[str, str, str]:
    assert row.found is not None
    found = row.found
    return _told(found.losses), _told(Difference(found.gradient.relative)), _told(found.parameters)


def _told(difference: Difference) -> str:
    if not difference.relative:
        return "none"
    where = f" ({escape(printable(difference.where))})" if difference.where else ""
    return f"{difference.relative:.1e}{where}"


def _verdict(row: Row) -> Text:
    if row.passed:
        return Text("✓ same", style="green")
    return Text("✗ differs" if row.found else "✗ failed", style="red")
