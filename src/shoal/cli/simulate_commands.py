"""The command that stands in for a cloud: simulate."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.completion import words
from shoal.cli.options import Json
from shoal.cli.session import Session
from shoal.errors import Interrupted

if TYPE_CHECKING:
    from shoal.verbs.simulate import Simulated


def simulate(
    kind: Annotated[
        str,
        typer.Argument(
            help="Which provider: gcp, lambda, paperspace, runpod or sandbox.",
            autocompletion=words("gcp", "lambda", "paperspace", "runpod", "sandbox"),
        ),
    ],
    port: Annotated[int, typer.Option(help="The port. Default: one that is free.", min=0, max=65535)] = 0,
    cluster: Annotated[
        str,
        typer.Option(help="Make its machines sandbox hosts on the network of this cluster. Default: it has none."),
    ] = "",
    image: Annotated[str, typer.Option(help="What these run: debian12, debian13 or sid.")] = "debian12",
    faults: Annotated[Path | None, typer.Option(help="What it does wrong, as a JSON list.")] = None,
    boot_seconds: Annotated[
        float | None, typer.Option(help="Until a machine is up. Default: what the provider, or the host, takes.", min=0)
    ] = None,
    limits: Annotated[
        bool, typer.Option("--limits/--no-limits", help="Keep to the provider's rate limits. Default: --limits.")
    ] = True,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave machines when it ends; started again, it has them.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a simulated cloud on this machine, until Ctrl-C.

    It answers as the provider's API does, keeps a bill, and can be told to misbehave, with nothing to pay and any key.
    Put its address into shoal.yaml as the `url` of an account, and `shoal up` rents from it.
    """
    with Session(json) as session:
        from shoal.verbs.simulate import simulate as verb

        def opened(found: Simulated) -> None:
            if json:
                session.finish_value({key: value for key, value in vars(found).items() if value != ""})
            else:
                where = f"sandbox hosts of cluster {found.cluster}" if found.cluster else "no hosts behind it"
                session.console.print(f"{found.kind} is simulated at {found.url}", highlight=False, soft_wrap=True)
                session.console.print(f"  {where}; bill: {found.url}/_simulator/bill", highlight=False, soft_wrap=True)
                if found.machines:
                    session.console.print(f"  {found.machines} machines were there already", highlight=False)
                if found.warning:
                    session.errors.print(f"  {found.warning}", highlight=False, soft_wrap=True)
                session.errors.print("  until Ctrl-C", highlight=False)
            session.console.file.flush()

        try:
            session.run(
                verb(
                    kind,
                    opened,
                    port=port,
                    cluster=cluster,
                    image=image,
                    faults=faults,
                    boot_seconds=boot_seconds,
                    limited=limits,
                    keep=keep,
                ),
                watching=True,
            )
        except Interrupted:
            return  # that is how it ends


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(simulate)
