"""The commands about keys: keys rotate."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.completion import words
from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import PARTLY, Session

keys_app = typer.Typer(help="Give a running cluster new keys.", no_args_is_help=True, rich_markup_mode=None)


@keys_app.command("rotate")
def rotate(
    key: Annotated[
        str,
        typer.Argument(
            help="Which: munge, slurm, wireguard, tailscale or all.",
            autocompletion=words("munge", "slurm", "wireguard", "tailscale", "all"),
        ),
    ],
    leave_unreachable: Annotated[
        bool, typer.Option("--leave-unreachable", help="Go on without hosts that do not answer; `up` repairs them.")
    ] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Replace a key on all hosts at once.

    Running jobs go on. For how long Slurm did not answer is measured and printed. If it is stopped half-way, run it
    again: it goes on with the key it had begun with.
    """
    with Session(json) as session:
        from shoal.verbs.keys import rotate as verb

        result = session.run(verb(session.open(file, cluster), key, leave_unreachable=leave_unreachable))
        if result.left:
            session.status = PARTLY
        if json:
            return session.finish_value(result)
        from shoal.cli.render_accounting import show_keys

        show_keys(session.console, result)


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(keys_app, name="keys")
