"""The commands about job records: usage, restore."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from shoal.cli.completion import words
from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import Session
from shoal.errors import Interrupted, UsageError


def usage(
    by: Annotated[
        str,
        typer.Option(
            help="Sum up by user, account, job or nodeset.", autocompletion=words("user", "account", "job", "nodeset")
        ),
    ] = "user",
    since: Annotated[
        str | None, typer.Option(help="From then on: 2026-11-01, 2026-11-01T14:30, 12h, 7d or 4w. Default: 30d.")
    ] = None,
    until: Annotated[str | None, typer.Option(help="Up to then. Default: now.")] = None,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show who used how many GPU hours.

    With what they cost, where a nodeset has a `price`.
    """
    with Session(json) as session:
        from shoal.verbs.usage import usage as verb

        result = session.run(verb(session.open(file, cluster), by, since, until))
        if json:
            return session.finish_value(result)
        from shoal.cli.render_accounting import show_usage

        show_usage(session.console, result)


def restore(
    backup: Annotated[
        str | None, typer.Argument(help="The backup to put back, or latest. Without it: list them.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """List backups of job records, or put one back.

    What is there now is backed up first. Jobs run on, and what they have to say meanwhile is kept.
    """
    with Session(json) as session:
        from shoal.cli.render_accounting import show_restore
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


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command()(usage)
    app.command()(restore)
