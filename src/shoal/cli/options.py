"""Options that many commands share, what the shell completes for them, and the session that they open."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal.cli.session import Session
from shoal.errors import ShoalError

File = Annotated[
    Path | None,
    typer.Option(
        *("--file", "-f"),
        metavar="FILE",
        envvar="SHOAL_FILE",
        help="The spec. Default: shoal.yaml here, else a joined cluster, else the sandbox.",
    ),
]
Cluster = Annotated[
    str | None,
    typer.Option(
        metavar="NAME", envvar="SHOAL_CLUSTER", help="A cluster you joined, or a sandbox cluster, without a file."
    ),
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
DrainTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="How long to wait for jobs on nodes that leave. Default: until they end.", min=0
    ),
]


def with_session(function: Callable[..., None]) -> Callable[..., None]:
    """A command of the function: --file and --cluster stand where its parameter `session` stands, --json is last."""

    @functools.wraps(function)
    def command(file: Path | None, cluster: str | None, json: bool, **values: Any) -> None:
        with Session(json, file, cluster) as session:
            function(session=session, **values)

    options: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if parameter.name == "session":
            options += [_option("file", File, None), _option("cluster", Cluster, None)]
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    command.__signature__ = inspect.Signature([*options, _option("json", Json, False)])  # type: ignore[attr-defined]
    return command


def _option(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def suggest(*words: str) -> Callable[[str], list[str]]:
    """Completes from a fixed list of words."""
    return lambda incomplete: [word for word in words if word.startswith(incomplete)]


def suggest_hosts(context: typer.Context, incomplete: str) -> list[str]:
    """Completes the hosts of the cluster that the command line names. Connects to nothing."""
    from shoal.verbs.context import open_hosts

    try:
        members = open_hosts(context.params.get("file"), context.params.get("cluster")).members
    except ShoalError:
        return []  # the command itself reports what is wrong with the file
    return [member.name for member in members if member.name.startswith(incomplete)]
