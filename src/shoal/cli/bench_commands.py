"""The commands that measure a cluster: bench links."""

from __future__ import annotations

from typing import Annotated

import typer

from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import PARTLY, Session

bench_app = typer.Typer(help="Measure the cluster.", no_args_is_help=True, rich_markup_mode=None)


@bench_app.command("links")
def links(
    hosts: Annotated[
        str | None, typer.Option("--hosts", "-w", help="Only the links between these: gpu01,gpu02. Default: all.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="How long each direction is measured.", min=0.2, max=60)] = 1.0,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Measure latency and bandwidth between every two hosts.

    Over the cluster's own network, in rounds in which no pair disturbs another. The next `up` tells Slurm which hosts
    are near each other, where you have named no sites. Jobs that use the network meanwhile are slower, and so is what
    is measured.
    """
    with Session(json) as session:
        from shoal.verbs.links import bench_links

        result = session.run(bench_links(session.open(file, cluster), hosts, seconds))
        if json:
            from shoal.cli.as_json import plain

            session.finish_value({**plain(result), "whole": result.whole})
        else:
            from shoal.cli.render_links import show_links

            show_links(session.console, result)
        if not result.whole:
            session.status = PARTLY


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.add_typer(bench_app, name="bench")
