"""What the shell offers when somebody presses the tab key: hosts of the file, and words that an option knows."""

from __future__ import annotations

from collections.abc import Callable

import typer

from shoal.errors import ShoalError


def hosts(context: typer.Context, incomplete: str) -> list[str]:
    """The hosts of the cluster that the command line names. Connects to nothing."""
    from shoal.verbs.context import open_hosts

    try:
        found = open_hosts(context.params.get("file"), context.params.get("cluster")).members
    except ShoalError:
        return []  # what is wrong with the file is told when the command runs
    return [member.name for member in found if member.name.startswith(incomplete)]


def words(*known: str) -> Callable[[str], list[str]]:
    """Some words that are always the same."""

    def matching(incomplete: str) -> list[str]:
        return [word for word in known if word.startswith(incomplete)]

    return matching
