"""The commands that serve a page or an API until Ctrl-C: ui, simulate."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Json, suggest, with_session
from shoal.cli.session import Session
from shoal.errors import Interrupted

if TYPE_CHECKING:
    from shoal.verbs.simulate import Simulated
    from shoal.verbs.ui import WebPage


@with_session
def ui(
    page: Annotated[str, typer.Argument(help="Which page: mlflow.", autocompletion=suggest("mlflow"))],
    port: Annotated[
        int, typer.Option(metavar="NUMBER", help="The port on this machine. Default: a free one.", min=0, max=65535)
    ] = 0,
    show_password: Annotated[bool, typer.Option("--show-password", help="Also print the password.")] = False,
    *,
    session: Session,
) -> None:
    """Open MLflow's page through SSH, until Ctrl-C.

    The login is the administrator's for the operator, and their own for every other user.
    """
    from shoal.verbs.ui import ui as verb

    def show(page: WebPage) -> None:
        if not session.finish({key: value for key, value in vars(page).items() if value}):
            session.console.print(page.url, soft_wrap=True)
            if page.user:
                password = page.password or "`--show-password` prints it"
                session.console.print(f"  user {page.user}, password: {password}", soft_wrap=True)
                if page.url.startswith("http://127.0.0.1:"):  # forwarded
                    session.errors.print("  until Ctrl-C")
        session.console.file.flush()

    with suppress(Interrupted):  # that is how it ends
        session.run(verb(session.open(), page, show, port=port, show_password=show_password), watching=True)


def simulate(
    kind: Annotated[
        str,
        typer.Argument(
            metavar="PROVIDER",
            help="Which provider: aws, digitalocean, gcp, lambda, nebius, paperspace, runpod, sandbox or vast.",
            autocompletion=suggest(
                "aws", "digitalocean", "gcp", "lambda", "nebius", "paperspace", "runpod", "sandbox", "vast"
            ),
        ),
    ],
    port: Annotated[int, typer.Option(metavar="NUMBER", help="The port. Default: a free one.", min=0, max=65535)] = 0,
    cluster: Annotated[
        str,
        typer.Option(metavar="NAME", help="Its machines are sandbox hosts on this cluster's network. Default: none."),
    ] = "",
    image: Annotated[
        str, typer.Option(metavar="NAME", help="Their system: debian11, debian12, debian13 or sid; else as ordered.")
    ] = "",
    faults: Annotated[Path | None, typer.Option(metavar="FILE", help="Faults to inject, as a JSON list.")] = None,
    boot_seconds: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Boot time of a machine. Default: as the provider, or the host.", min=0),
    ] = None,
    limits: Annotated[
        bool, typer.Option("--limits/--no-limits", help="Enforce the provider's rate limits. Default: --limits.")
    ] = True,
    keep: Annotated[
        bool, typer.Option("--keep", help="Keep its machines when it ends; the next start has them.")
    ] = False,
    json: Json = False,
) -> None:
    """Run a simulated cloud on this machine, until Ctrl-C.

    It answers as the provider's API does, accepts any key, keeps a bill and injects faults, at no cost. Set its address
    as the `url` of a provider account in shoal.yaml, and `shoal up` rents from it.
    """
    with Session(json) as session, suppress(Interrupted):  # that is how it ends
        from shoal.verbs.simulate import simulate as verb

        def show(cloud: Simulated) -> None:
            if not session.finish({key: value for key, value in vars(cloud).items() if value != ""}):
                host_text = f"sandbox hosts of cluster {cloud.cluster}" if cloud.cluster else "no real hosts"
                session.console.print(f"{cloud.kind} is simulated at {cloud.url}", soft_wrap=True)
                session.console.print(f"  {host_text}; bill: {cloud.url}/_simulator/bill", soft_wrap=True)
                if cloud.machines:
                    session.console.print(f"  {cloud.machines} machines from an earlier start")
                if cloud.warning:
                    session.errors.print(f"  {cloud.warning}", soft_wrap=True)
                session.errors.print("  until Ctrl-C")
            session.console.file.flush()

        session.run(verb(kind, show, port, cluster, image, faults, boot_seconds, limits, keep), watching=True)
