"""The commands about Python environments: env build, env list, env clean."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from shoal.cli.options import Cluster, File, Json
from shoal.cli.screen import Columns, show_failures, show_findings
from shoal.cli.session import PARTLY, Session
from shoal.hostlist import compress

if TYPE_CHECKING:
    from shoal.verbs.env import CleanResult, EnvironmentState
    from shoal.verbs.env_build import BuildResult

env_app = typer.Typer(
    help="Build, list and clean the Python environments in the file.", no_args_is_help=True, rich_markup_mode=None
)


@env_app.command("build")
def env_build(
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Which ones. Default: all in the file.")
    ] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Build environments on the controller and copy them to the nodes.

    Existing environments stay as they are, so running jobs keep theirs. Run it again after you change packages or add
    nodes.
    """
    with Session(json) as session:
        from shoal.verbs.env_build import build

        result = session.run(build(session.open(file, cluster), names or []))
        session.finish_value(result) if json else show_built(session.console, result)
        if any(finding.level == "error" for finding in result.findings):
            session.status = 1
        elif result.failures:
            session.status = PARTLY


@env_app.command("list")
def env_list(file: File = None, cluster: Cluster = None, json: Json = False) -> None:
    """Show the environments in the file, and which are built."""
    with Session(json) as session:
        from shoal.verbs.env import list_environments

        listed = session.run(list_environments(session.open(file, cluster)))
        session.finish_value({"environments": listed}) if json else show_list(session.console, listed)


@env_app.command("clean")
def env_clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be removed, and remove nothing.")] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Remove environments that were replaced and that no job uses."""
    with Session(json) as session:
        from shoal.verbs.env import clean

        result = session.run(clean(session.open(file, cluster), dry_run=dry_run))
        session.finish_value(result) if json else show_cleaned(session.console, result, dry_run)
        if result.failures:
            session.status = PARTLY


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
            console.print(f"{entry.name} is in {entry.made.path}", highlight=False, soft_wrap=True)
    stale = [entry.name for entry in listed if entry.state != "built"]
    if stale:
        console.print(f"\n`shoal env build {' '.join(stale)}` builds what is missing", highlight=False)


def show_cleaned(console: Console, result: CleanResult, dry_run: bool) -> None:
    show_failures(console, dict(result.failures))
    for host, ids in result.removed.items():
        console.print(f"{'would remove' if dry_run else 'removed'} {', '.join(ids)} from {host}", highlight=False)
    for number, reason in result.kept.items():
        console.print(f"kept {number}: {reason}", highlight=False)
    if not result.removed and not result.kept:
        console.print("nothing to clean")


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(env_app, name="env")
