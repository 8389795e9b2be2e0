"""The commands about Python environments: env build, env list, env clean."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import PARTLY, Session

env_app = typer.Typer(
    help="Build, list and clean the Python environments of the file.", no_args_is_help=True, rich_markup_mode=None
)


@env_app.command("build")
def env_build(
    names: Annotated[list[str] | None, typer.Argument(help="Which ones. Default: all of the file.")] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Make environments on the controller and bring them to the nodes.

    What is there already stays as it is: jobs that run keep theirs. Run it again after a change of the packages, and
    when nodes were added.
    """
    with Session(json) as session:
        from shoal.cli.render_env import show_built
        from shoal.verbs.env_build import build

        result = session.run(build(session.open(file, cluster), names or []))
        session.finish_value(result) if json else show_built(session.console, result)
        if any(finding.level == "error" for finding in result.findings):
            session.status = 1
        elif result.failures:
            session.status = PARTLY


@env_app.command("list")
def env_list(file: File = None, cluster: Cluster = None, json: Json = False) -> None:
    """Show the environments of the file, and which of them are built."""
    with Session(json) as session:
        from shoal.cli.render_env import show_list
        from shoal.verbs.env import list_environments

        listed = session.run(list_environments(session.open(file, cluster)))
        session.finish_value({"environments": listed}) if json else show_list(session.console, listed)


@env_app.command("clean")
def env_clean(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and remove nothing.")] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Remove environments that were replaced and that no job uses."""
    with Session(json) as session:
        from shoal.cli.render_env import show_cleaned
        from shoal.verbs.env import clean

        result = session.run(clean(session.open(file, cluster), dry_run=dry_run))
        session.finish_value(result) if json else show_cleaned(session.console, result, dry_run)
        if result.failures:
            session.status = PARTLY


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(env_app, name="env")
