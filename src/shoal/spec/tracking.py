"""The server that keeps what training jobs report, as the file says it: one word, or a mapping."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, GetJsonSchemaHandler, WithJsonSchema, model_validator
from pydantic_core import CoreSchema

from shoal.spec.closed import Closed
from shoal.spec.environments import HostDirectory
from shoal.spec.problem import Problem, nearest
from shoal.spec.storage import CONTROLLER
from shoal.spec.words import Port, choice, host_name, refusal, show

KINDS = ("mlflow",)
DATABASES = ("sqlite", "postgresql")
MLFLOW_PORT = 5000
_OURS = ("host", "database", "artifacts", "port")
_DEFAULTS: Mapping[str, object] = {"database": "sqlite", "port": MLFLOW_PORT}


def _url(value: object) -> str:
    fix = "write it like https://tracking.example.org"
    if isinstance(value, str) and "@" in value:
        where = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where you run `shoal run`"
        raise refusal("an address with a password in it", f"leave it out; {where}", "(hidden)")
    if not isinstance(value, str) or not re.fullmatch(r"https?://[!-~]{1,500}", value):
        raise refusal("not the address of a tracking server", fix)
    return value.rstrip("/")


MemberName = Annotated[str, BeforeValidator(host_name), WithJsonSchema({"type": "string", "title": "host name"})]
TrackingUrl = Annotated[str, BeforeValidator(_url), WithJsonSchema({"type": "string", "title": "URL"})]


class Tracking(Closed):
    """Where training jobs report to.

    In the file it is a word (`tracking: mlflow`) or a mapping of the fields below: `{kind: mlflow, host: gpu01}` for a
    server that Shoal sets up, `{url: https://tracking.example.org}` for one that is there already.
    """

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

    @model_validator(mode="before")
    @classmethod
    def _from_text(cls, value: Any) -> Any:
        if not isinstance(value, str | dict | Tracking):
            raise refusal("not a tracking server", "write `mlflow`, or {url: https://tracking.example.org}")
        return {"kind": value} if isinstance(value, str) else value

    @classmethod
    def __get_pydantic_json_schema__(cls, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        mapping = handler.resolve_ref_schema(handler(schema))
        return {"anyOf": [{"type": "string", "enum": [*KINDS]}, {**mapping}], "description": mapping["description"]}


def tracking_problems(data: Mapping[str, Any], hosts: Sequence[str]) -> Iterator[Problem]:
    """Every rule about the tracking server that does not hold. `hosts` are the names of all members."""
    tracking = data.get("tracking")
    if not isinstance(tracking, Mapping):
        return
    if tracking.get("url") is not None:
        for key in _OURS:
            if tracking.get(key) not in (None, _DEFAULTS.get(key)):
                yield Problem(
                    ("tracking", key), f"`{key}` for a server that is there already", "", "delete it, or `url`"
                )
    host = tracking.get("host")
    if isinstance(host, str) and hosts and host not in hosts:
        fix = nearest(host, list(hosts))
        yield Problem(("tracking", "host"), "the server's host is none of the cluster", show(host), fix)
    elif hosts:
        yield from _artifacts(tracking, data.get("storage"), hosts[0])


def _artifacts(tracking: Mapping[str, Any], shares: object, controller: str) -> Iterator[Problem]:
    """The server can write to where its files go."""
    artifacts, runs_on = tracking.get("artifacts"), tracking.get("host") or controller
    if not isinstance(artifacts, str) or not isinstance(shares, Mapping):
        return
    for where, share in shares.items():
        if not isinstance(share, Mapping) or not f"{artifacts}/".startswith(f"{where}/"):
            continue
        keeper = share.get("host", CONTROLLER)
        keeper = controller if keeper == CONTROLLER else keeper
        why = "read-only" if share.get("read_only") is True else "a copy" if share.get("kind") == "stage" else ""
        if why and keeper != runs_on:
            fix = f"name another directory, or `host: {keeper}`, which keeps it"
            yield Problem(("tracking", "artifacts"), f"{where} is {why} on the server's host", show(artifacts), fix)
