"""The command that opens a page of the cluster: ui."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import words
from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import Session
from shoal.errors import Interrupted

if TYPE_CHECKING:
    from shoal.verbs.ui import Page


def ui(
    page: Annotated[str, typer.Argument(help="Which page: mlflow.", autocompletion=words("mlflow"))],
    port: Annotated[int, typer.Option(help="The port here. Default: one that is free.", min=0, max=65535)] = 0,
    show_password: Annotated[bool, typer.Option("--show-password", help="Print the password, too.")] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Open MLflow's page through SSH, until Ctrl-C."""
    with Session(json) as session:
        from shoal.verbs.ui import ui as verb

        def opened(found: Page) -> None:
            if json:
                session.finish_value({key: value for key, value in vars(found).items() if value})
            else:
                session.console.print(found.url, highlight=False, soft_wrap=True)
                if found.user:
                    told = found.password or "`--show-password` tells it"
                    session.console.print(f"  user {found.user}, password: {told}", highlight=False, soft_wrap=True)
                    session.errors.print("  until Ctrl-C", highlight=False)
            session.console.file.flush()

        try:
            session.run(
                verb(session.open(file, cluster), page, opened, port=port, show_password=show_password), watching=True
            )
        except Interrupted:
            return  # that is how it ends


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(ui)
