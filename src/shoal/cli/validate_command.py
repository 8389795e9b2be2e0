"""The command `validate`: options, the table, and what earlier runs showed."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli.options import suggest, suggest_hosts, with_session
from shoal.cli.output import plain
from shoal.cli.screen import Columns, count, escape_text, print_fix, print_wrapped, show_findings
from shoal.cli.session import PARTLY, Session
from shoal.errors import Interrupted, UsageError
from shoal.hostlist import compress

if TYPE_CHECKING:
    from shoal.validation.types import ValidationResult, ValidationRow
    from shoal.verbs.validate import ValidationHistory

MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not run": ("–", "yellow")}


@with_session
def validate(
    quick: Annotated[bool, typer.Option("--quick", help="Measure small sizes only; takes about a minute.")] = False,
    launcher: Annotated[
        str,
        typer.Option(
            metavar="WORD",
            help="What starts the ranks, comma-separated. mpirun includes MPI programs under srun.",
            autocompletion=suggest("srun", "torchrun", "mpirun"),
        ),
    ] = "srun,torchrun,mpirun",
    nodelist: Annotated[
        str | None,
        typer.Option(
            *("--nodelist", "-w"),
            metavar="HOSTS",
            help="Exactly these nodes: gpu[01-02]. Default: all of the partition that take jobs, no rented ones.",
            autocompletion=suggest_hosts,
        ),
    ] = None,
    partition: Annotated[
        str | None, typer.Option("--partition", "-p", metavar="NAME", help="The partition. Default: the cluster's.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option("--env", metavar="NAME", help="The environment that has torch.")
    ] = None,
    python: Annotated[
        str | None, typer.Option(metavar="PROGRAM", help="The Python on the nodes that has torch. Default: python3.")
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=VALUE", help="A variable for the environment of the tests; may be repeated."),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="Run the tests of srun and mpirun in this image, too.")
    ] = None,
    account: Annotated[
        str | None, typer.Option("--account", "-A", metavar="NAME", help="The account to charge.")
    ] = None,
    time: Annotated[
        str | None,
        typer.Option(
            "--time", "-t", metavar="TIME", help="The time limit of each job. Default: 2 hours; quick 10 minutes."
        ),
    ] = None,
    since: Annotated[
        str | None,
        typer.Option(metavar="TIME", help="Run nothing: show the results since then, as 7d or 2026-11-01."),
    ] = None,
    *,
    session: Session,
) -> None:
    """Test that jobs run, communicate and read and write on all nodes, and how fast.

    The tests run as jobs of yours, one after the other. Each has its nodes for itself, and waits until they are free.
    Exit status: 0 all passed, 1 something failed or is slow, 3 some tests could not be run.
    """
    from shoal.verbs.validate import LAUNCHERS, ValidationSettings, validation_history
    from shoal.verbs.validate import validate as verb

    if since is not None:
        return finish_history(session, session.run(validation_history(session.open(), since), watching=True))
    names = tuple(dict.fromkeys(name.strip() for name in launcher.split(",") if name.strip()))
    if not names or any(name not in LAUNCHERS for name in names):
        raise UsageError(
            f"--launcher names {launcher or 'nothing'}", hint=f"use {', '.join(LAUNCHERS)}, comma-separated"
        )
    if environment and python:
        raise UsageError("--env brings its own Python, and --python names another", hint="leave one of them out")
    options: dict[str, Any] = {"environment": environment, "python": python, "account": account, "time": time}
    options = {name: value for name, value in options.items() if value is not None}
    if export:
        options["export"] = parse_exports(export)
    settings = ValidationSettings(quick, names, nodelist, partition, image or "", options)
    try:
        result = session.run(verb(session.open(), settings))
    except Interrupted:
        raise Interrupted("stopped; its jobs are cancelled") from None
    finish_validation(session, result)


def parse_exports(texts: Iterable[str]) -> dict[str, str]:
    pairs = [text.partition("=") for text in texts]
    if wrong := next((name for name, equals, _ in pairs if not equals), None):
        raise UsageError(f"--export {wrong} has no value", hint=f"write --export {wrong}=VALUE")
    return {name: value for name, _, value in pairs}


def finish_validation(session: Session, result: ValidationResult) -> None:
    status = 1 if not result.passed else 0 if result.complete else PARTLY
    values = {**plain(result), "passed": result.passed, "complete": result.complete}
    if not session.finish(values, status):
        show_validation(session.console, result)


def finish_history(session: Session, history: ValidationHistory) -> None:
    if session.finish(history):
        return
    if not history.runs:
        session.console.print(f"no result since {datetime.fromtimestamp(history.since):%Y-%m-%d %H:%M}")
    for result in history.runs:
        kind = "quick" if result.quick else "full"
        when = f"{datetime.fromtimestamp(result.time):%Y-%m-%d %H:%M}"
        session.console.print(f"[bold]{when}[/] {kind}, {escape_text(compress(result.nodes))}: {_summary(result)}")
        for row in result.rows:
            if row.status == "failed":
                print_wrapped(session.console, f"  [red]✗[/] {_row_name(row)}: {escape_text(row.detail)}")
        values = ", ".join(f"{_row_name(row)} {_value(row)}" for row in result.rows if row.value is not None)
        if values:
            print_wrapped(session.console, f"  {values}")


def show_validation(console: Console, result: ValidationResult) -> None:
    """The table; then sizes as nccl-tests prints them, mpirun, environments, findings, and a summary."""
    table = Columns("launcher", "test", "nodes", "result", "value", "", right=("value",), wraps=("", "nodes"))
    for row in result.rows:
        mark, style = MARKS[row.status]
        cells = (escape_text(row.launcher), escape_text(row.test), escape_text(row.nodes))
        table.add_row(*cells, Text(f"{mark} {row.status}", style=style), _value(row), escape_text(row.detail))
    console.print(table)
    for row in result.rows:
        if row.status != "passed" and row.fix:
            print_wrapped(console, f"{_row_name(row)}: {row.status}")
            print_fix(console, row.fix)
    for row in result.rows:
        if row.sizes and not row.test.endswith("in a node"):
            _show_sizes(console, row)
        if len(row.pairs) > 1:
            _show_pairs(console, row)
    _show_programs(console, result)
    show_findings(console, result.findings)
    mark = "[green]✓[/]" if result.passed and result.complete else "[yellow]–[/]" if result.passed else "[red]✗[/]"
    console.print(f"{mark} {result.cluster}, {escape_text(compress(result.nodes))}: {_summary(result)}", soft_wrap=True)


def _summary(result: ValidationResult) -> str:
    statuses = [row.status for row in result.rows]
    parts = [f"{statuses.count(status)} {status}" for status in MARKS if status in statuses]
    problems = sum(finding.level != "info" for finding in result.findings)
    return ", ".join([*parts, *([count(problems, "finding")] if problems else [])]) or "no test was run"


def _row_name(row: ValidationRow) -> str:
    return escape_text(f"{row.launcher} {row.test}".strip())


def _value(row: ValidationRow) -> str:
    return f"{row.value:.3g} {row.unit}" if row.value is not None else ""


def _show_sizes(console: Console, row: ValidationRow) -> None:
    """As nccl-tests prints it, so that numbers can be laid beside those of others."""
    version = f", {row.version}" if row.version else ""
    console.print(f"\n[bold]{_row_name(row)}[/] {row.ranks} ranks{escape_text(version)}", soft_wrap=True)
    lines = [
        "#       size         count      time   algbw   busbw  #wrong",
        "#        (B)    (elements)      (us)  (GB/s)  (GB/s)",
        *(
            f"{size.size:12} {size.count:13} {size.us:9.1f} {size.algbw:7.2f} {size.busbw:7.2f} {size.wrong:7}"
            for size in row.sizes
        ),
    ]
    for line in lines:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _show_pairs(console: Console, row: ValidationRow) -> None:
    """The slowest pairs: a node that is in all of them is the slow one."""
    slowest = sorted(row.pairs, key=lambda pair: pair.speed)[:5]
    text = ", ".join(f"{pair.first}–{pair.second} {pair.speed:.3g} {row.unit}" for pair in slowest)
    print_wrapped(console, f"[bold]{_row_name(row)}[/] slowest of {len(row.pairs)} pairs: {escape_text(text)}")


def _show_programs(console: Console, result: ValidationResult) -> None:
    from shoal.validation.compare import environment_differences

    programs: dict[str, list[str]] = {}
    for program in result.mpiruns:
        text = f"{program.path}, {program.version}, PMIx: {program.pmix or 'no'}"
        programs.setdefault(text, []).append(program.node)
    if programs or result.environments:
        console.print()
    for text, nodes in programs.items():
        print_wrapped(console, f"mpirun on {escape_text(compress(nodes))}: {escape_text(text)}")
    for environment in result.environments:
        text = f"{environment.cpus} CPUs, locked memory {environment.memlock}, Python {environment.python}"
        print_wrapped(console, f"{escape_text(environment.launcher)} on {environment.node}: {escape_text(text)}")
    for name, values in environment_differences(result.environments).items():
        console.print(f"  {escape_text(name)} differs between launchers:", soft_wrap=True)
        for launcher, value in values.items():
            console.print(f"    {escape_text(launcher)}: {escape_text(value) or '(not set)'}", soft_wrap=True)
