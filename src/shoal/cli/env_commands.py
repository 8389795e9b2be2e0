"""The commands about Python environments: env build, env list, env clean."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.cli.options import with_session
from shoal.cli.screen import Columns, count, show_failures, show_findings
from shoal.cli.session import PARTLY, Session
from shoal.hostlist import compress

if TYPE_CHECKING:
    from shoal.verbs.env import CleanResult, EnvironmentState
    from shoal.verbs.env_build import BuildResult

env = typer.Typer(
    help="Build, list and clean the Python environments in the file.", no_args_is_help=True, rich_markup_mode=None
)


@env.command("build")
@with_session
def env_build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which ones. Default: all in the file.")
    ] = None,
    *,
    session: Session,
) -> None:
    """Build environments on the controller and copy them to the nodes.

    Existing environments stay as they are, so running jobs keep theirs. Run it again after you change packages or add
    nodes.
    """
    from shoal.verbs.env_build import build

    result = session.run(build(session.open(), names or []))
    has_errors = any(finding.level == "error" for finding in result.findings)
    if not session.finish(result, 1 if has_errors else PARTLY if result.failures else 0):
        show_built(session.console, result)


@env.command("list")
@with_session
def env_list(session: Session) -> None:
    """Show the environments in the file, and which are built."""
    from shoal.verbs.env import list_environments

    environments = session.run(list_environments(session.open()))
    if not session.finish({"environments": environments}):
        show_list(session.console, environments)


@env.command("clean")
@with_session
def env_clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    *,
    session: Session,
) -> None:
    """Remove environments that were replaced and that no job uses."""
    from shoal.verbs.env import clean

    result = session.run(clean(session.open(), dry_run=dry_run))
    if not session.finish(result, PARTLY if result.failures else 0):
        show_cleaned(session.console, result, dry_run)


def show_built(console: Console, result: BuildResult) -> None:
    show_findings(console, result.findings)
    show_failures(console, result.failures)
    for environment in result.made:
        action = "built" if environment.name in result.fresh else "no changes"
        packages = count(len(environment.packages), "package")
        cuda = f" for CUDA {environment.cuda}" if environment.cuda else ""
        torch = f", torch {environment.torch}{cuda}" if environment.torch else ""
        console.print(
            f"[green]✓[/] {environment.name}: {action}; {packages}, Python {environment.python}{torch}; "
            f"{environment.path}",
            soft_wrap=True,
        )
        if environment.name in result.copied:
            console.print(f"  copied to {compress(result.copied[environment.name])}")


def show_list(console: Console, listed: list[EnvironmentState]) -> None:
    titles = ("environment", "state", "place", "python", "packages", "torch", "built")
    table = Columns(*titles, wraps=("environment", "built"))
    for entry in listed:
        if entry.made is None:
            table.add_row(entry.name, entry.state, entry.place, "-", "-", "-", "-")
            continue
        torch = " ".join(filter(None, (entry.made.torch, entry.made.cuda and f"cuda {entry.made.cuda}"))) or "-"
        made_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.made.made_at))
        count = str(len(entry.made.packages))
        table.add_row(entry.name, entry.state, entry.place, entry.made.python, count, torch, made_at)
    console.print(table)
    # Paths are copied, so they are not broken into a column.
    for entry in listed:
        if entry.made is not None:
            console.print(f"{entry.name} is in {entry.made.path}", soft_wrap=True)
    stale = [entry.name for entry in listed if entry.state != "built"]
    if stale:
        console.print(f"\n`shoal env build {' '.join(stale)}` builds what is missing")


def show_cleaned(console: Console, result: CleanResult, dry_run: bool) -> None:
    show_failures(console, result.failures)
    for host, ids in result.removed.items():
        console.print(f"{'would remove' if dry_run else 'removed'} {', '.join(ids)} from {host}")
    for number, reason in result.kept.items():
        console.print(f"kept {number}: {reason}")
    if not result.removed and not result.kept:
        console.print("nothing to clean")
