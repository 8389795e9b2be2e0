"""Options that many commands share, and what the shell completes for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from shoal.errors import ShoalError

File = Annotated[
    Path | None,
    typer.Option(
        *("--file", "-f"),
        metavar="FILE",
        envvar="SHOAL_FILE",
        help="The spec. Default: shoal.yaml here, else the sandbox.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(metavar="NAME", envvar="SHOAL_CLUSTER", help="Name of a sandbox cluster that has no file."),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]


def suggest(*words: str) -> Callable[[str], list[str]]:
    """Completes from a fixed list of words."""

    def matching(incomplete: str) -> list[str]:
        return [word for word in words if word.startswith(incomplete)]

    return matching


def suggest_hosts(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the hosts of the cluster that the command line names. Connects to nothing."""
    from shoal.verbs.context import open_hosts

    try:
        members = open_hosts(context.params.get("file"), context.params.get("cluster")).members
    except ShoalError:
        return []  # the command itself reports what is wrong with the file
    return [member.name for member in members if member.name.startswith(incomplete)]
