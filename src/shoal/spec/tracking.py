"""The tracking server in the file: one word or a mapping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import BeforeValidator

from shoal.spec.checks import choice, web_address
from shoal.spec.environments import HostDirectory
from shoal.spec.finding import Problem, nearest, show
from shoal.spec.storage import Shares
from shoal.spec.values import MemberName, Port, ShortForm, text_schema

KINDS = ("mlflow",)
DATABASES = ("sqlite", "postgresql")
MLFLOW_PORT = 5000
_OWN_SERVER_FIELDS = ("host", "database", "artifacts", "port")


_url = web_address(
    "a tracking server",
    "https://tracking.example.org",
    "leave it out; set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you run `shoal run`",
)
TrackingUrl = Annotated[str, BeforeValidator(_url), text_schema("URL")]


class Tracking(ShortForm):
    """Where training jobs report to.

    In the file it is a word (`tracking: mlflow`) or a mapping of the fields below: `{kind: mlflow, host: gpu01}` for a
    server that Shoal sets up, `{url: https://tracking.example.org}` for one that is there already.
    """

    short_schema: ClassVar = {"type": "string", "enum": [*KINDS]}
    refusal = ("not a tracking server", "write `mlflow`, or {url: https://tracking.example.org}")

    kind: Annotated[Literal["mlflow"], BeforeValidator(choice("tracking server", KINDS))] = "mlflow"
    """MLflow."""
    url: TrackingUrl | None = None
    """A server that is there already. Its user and password come from MLflow's own variables where you are."""
    host: MemberName | None = None
    """The host that the server runs on. Without it, the controller."""
    database: Annotated[Literal["sqlite", "postgresql"], BeforeValidator(choice("database", DATABASES))] = "sqlite"
    """`postgresql` is set up on the same host, and bears many jobs that report at once."""
    artifacts: HostDirectory | None = None
    """The directory for models and other files. Without it, in a share that its host keeps, or on its own disk."""
    port: Port = MLFLOW_PORT
    """The server's port, open to members only."""


def tracking_problems(tracking: Tracking | None, shares: Shares, hosts: Sequence[str]) -> Iterator[Problem]:
    """Every rule about the tracking server that does not hold. `hosts` are all members, the controller first."""
    if tracking is None:
        return
    if tracking.is_set("url"):
        for key in tracking.set_among(_OWN_SERVER_FIELDS):
            what = f"`{key}` for a server that is there already"
            yield Problem(("tracking", key), what, "", "delete it, or `url`")
    if tracking.host is not None and hosts and tracking.host not in hosts:
        fix = nearest(tracking.host, list(hosts))
        yield Problem(("tracking", "host"), "the server's host is not in the cluster", show(tracking.host), fix)
    elif hosts and tracking.artifacts is not None:
        yield from _artifact_problems(tracking.artifacts, tracking.host or hosts[0], shares, hosts[0])


def _artifact_problems(artifacts: str, runs_on: str, shares: Shares, controller: str) -> Iterator[Problem]:
    """The server can write to its directory."""
    for mount, share in shares.items():
        if share is None or not f"{artifacts}/".startswith(f"{mount}/"):
            continue
        server = share.server(controller)
        state = "read-only" if share.read_only else "a copy" if share.kind == "stage" else ""
        if state and server != runs_on:
            fix = f"name another directory, or `host: {server}`, which keeps it"
            yield Problem(("tracking", "artifacts"), f"{mount} is {state} on the server's host", show(artifacts), fix)
