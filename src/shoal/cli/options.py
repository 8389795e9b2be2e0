"""Options that many commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

File = Annotated[
    Path | None,
    typer.Option("--file", "-f", envvar="SHOAL_FILE", help="The spec. Default: shoal.yaml here, else the sandbox."),
]
Cluster = Annotated[
    str | None, typer.Option("--cluster", envvar="SHOAL_CLUSTER", help="Name of a sandbox cluster that has no file.")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of text.")]
