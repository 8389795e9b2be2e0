"""The part of MLflow's REST API that a training job needs, over the standard library's HTTP client.

Not mlflow-skinny: its import takes 1.5 s of CPU in every process against 0.15 s (3.17.2, Python 3.11), it installs
116 MB in about 40 packages, and it cannot spool records to disk while the server is down.

A job has one run on the server, found by its tag. Creating a run is not idempotent, and an answer may be lost after the
run was created. So the run is searched by its tag before each attempt, and only rank 0 creates one. If there are two
(the server went on long after the client's timeout), rank 0 marks the one it uses, other nodes use only a marked one,
and the duplicate is deleted.
"""

from __future__ import annotations

import base64
import configparser
import http.client
import json
import os
import ssl
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal.train.tracking.bounded_http import Answer, AnswerError, BoundedOpener

API = "/api/2.0/mlflow/"
ARTIFACTS = "/api/2.0/mlflow-artifacts/artifacts/"
REQUEST_TIMEOUT_S = 10.0

_RETRY_CODES = (
    "TEMPORARILY_UNAVAILABLE",
    "REQUEST_LIMIT_EXCEEDED",
    "INTERNAL_ERROR",
    "PERMISSION_DENIED",
    "UNAUTHENTICATED",
)
_HINTS = {
    401: "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN, in the job",
    403: "the server refuses this user or this host name; see its --allowed-hosts",
    404: "this address is not an MLflow server",
}


class ServerUnavailable(Exception):
    """The server cannot accept this now. Whether it already has is unknown."""


class RequestRejected(Exception):
    """The server will never accept this."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code


class MlflowClient:
    """A tracking server at an http:// or https:// address."""

    def __init__(self, uri: str, environ: Mapping[str, str] = os.environ, timeout: float = REQUEST_TIMEOUT_S) -> None:
        """ValueError if the address is not that of a server."""
        self.uri, user, password = split_uri(uri)
        self._headers = {"User-Agent": "shoal"}
        user = user or environ.get("MLFLOW_TRACKING_USERNAME", "")
        password = password or environ.get("MLFLOW_TRACKING_PASSWORD", "")
        if not user:
            user, password = _read_stored_login(self.uri, environ)
        if user:
            self._headers["Authorization"] = "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()
        elif token := environ.get("MLFLOW_TRACKING_TOKEN"):
            self._headers["Authorization"] = f"Bearer {token}"
        certificate = environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
        self._opener = BoundedOpener(ssl.create_default_context(cafile=certificate) if certificate else None, timeout)

    def get(self, path: str, /, **query: str) -> dict[str, Any]:
        return self._request("GET", API + path + "?" + urllib.parse.urlencode(query), None, "application/json")

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self._request("POST", API + path, json.dumps(body).encode(), "application/json")

    def upload(self, path: str, data: bytes) -> None:
        """Store an artifact, replacing an existing one: idempotent."""
        self._request("PUT", ARTIFACTS + urllib.parse.quote(path), data, "application/octet-stream")

    def _request(self, method: str, path: str, data: bytes | None, kind: str) -> dict[str, Any]:
        headers = {**self._headers, "Content-Type": kind}
        request = urllib.request.Request(self.uri + path, data=data, headers=headers, method=method)
        try:
            answer = self._opener.send(request)
        except urllib.error.URLError as error:
            raise ServerUnavailable(f"{self.uri}: {error.reason}") from None
        except AnswerError as error:
            raise ServerUnavailable(f"{self.uri}: {error}: {_HINTS[404]}") from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerUnavailable(f"{self.uri}: {str(error) or type(error).__name__}") from None
        value: dict[str, Any] = answer.value if isinstance(answer.value, dict) else {}
        if answer.status >= 300:
            raise _map_error(answer, str(value.get("error_code") or ""), str(value.get("message") or ""))
        return value


def _read_stored_login(uri: str, environ: Mapping[str, str]) -> tuple[str, str]:
    """The login in `~/.mlflow/credentials`, where MLflow's client looks too: for the cluster's own server only."""
    if "MLFLOW_TRACKING_TOKEN" in environ or uri != environ.get("MLFLOW_TRACKING_URI", "").rstrip("/"):
        return "", ""
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read(Path(environ["HOME"], ".mlflow", "credentials"))
        return parser["mlflow"]["mlflow_tracking_username"], parser["mlflow"]["mlflow_tracking_password"]
    except (OSError, UnicodeDecodeError, configparser.Error, KeyError):
        return "", ""


def split_uri(uri: str) -> tuple[str, str, str]:
    """An address without its credentials, the user and the password. Only the first may be written to a file."""
    try:
        url = urllib.parse.urlsplit(uri)
        port = url.port
    except ValueError:
        raise ValueError("the tracking address is not a URL") from None
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"the tracking address must begin with http:// or https://, not {url.scheme or 'nothing'!r}")
    host = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    clean = f"{url.scheme}://{host}{f':{port}' if port else ''}{url.path.rstrip('/')}"
    return clean, urllib.parse.unquote(url.username or ""), urllib.parse.unquote(url.password or "")


def _map_error(answer: Answer, code: str, message: str) -> ServerUnavailable | RequestRejected:
    status = answer.status
    if status == 413:
        return RequestRejected("TOO_LARGE", "the request is too large for the server")
    if 400 <= status < 500 and code and code not in _RETRY_CODES and status not in (401, 403, 408, 429):
        return RequestRejected(code, message[:500])
    text = message[:200] or answer.reason
    hint = _HINTS.get(status)
    return ServerUnavailable(f"the server answers {status} {text}" + (f": {hint}" if hint else ""))


RUN_TAG = "shoal.run"
USED_TAG = "shoal.used"


@dataclass(frozen=True)
class RunName:
    """What identifies a run before a server has given it an id."""

    run: str
    experiment: str
    title: str
    started: int
    """The first start of the job, in milliseconds."""


@dataclass(frozen=True)
class RemoteRun:
    """A run on a server."""

    id: str
    artifacts: str | None
    """The path at the server's artifact proxy; None if the server has no proxy."""


def find_run(server: MlflowClient, name: RunName, *, create: bool) -> RemoteRun:
    """The job's run. ServerUnavailable if there is none yet and this process may not create it."""
    experiment = _experiment(server, name.experiment, create=create)
    used_runs = _search(server, experiment, name, used=True)
    if used_runs:
        return _parse_run(used_runs[0])
    if not create:
        raise ServerUnavailable("rank 0 has not created the run yet")
    runs = _search(server, experiment, name, used=False)
    run = _parse_run(runs[0]) if runs else _create(server, experiment, name)
    server.post("runs/set-tag", {"run_id": run.id, "key": USED_TAG, "value": "1"})
    return run


def delete_duplicates(server: MlflowClient, name: RunName, run: RemoteRun) -> None:
    """Delete runs of the same name that exist because of a lost answer. They are empty."""
    for other in _search(server, _experiment(server, name.experiment, create=False), name, used=False):
        tags = {tag["key"]: tag["value"] for tag in other.get("data", {}).get("tags", [])}
        if other["info"]["run_id"] != run.id and USED_TAG not in tags:
            server.post("runs/delete", {"run_id": other["info"]["run_id"]})


def _experiment(server: MlflowClient, name: str, *, create: bool) -> str:
    for _ in range(2):
        try:
            experiment = server.get("experiments/get-by-name", experiment_name=name)["experiment"]
        except RequestRejected as error:
            if error.code != "RESOURCE_DOES_NOT_EXIST":
                raise ServerUnavailable(str(error)) from None
        else:
            if experiment.get("lifecycle_stage") == "deleted":
                raise ServerUnavailable(f"the experiment {name!r} is deleted: restore it, or choose another name")
            return str(experiment["experiment_id"])
        if not create:
            break
        try:
            return str(server.post("experiments/create", {"name": name})["experiment_id"])
        except RequestRejected as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":  # created by another job meanwhile: search again
                raise ServerUnavailable(str(error)) from None
    raise ServerUnavailable(f"there is no experiment {name!r} yet")


def _search(server: MlflowClient, experiment: str, name: RunName, *, used: bool) -> list[dict[str, Any]]:
    query = f"tags.`{RUN_TAG}` = '{name.run}'" + (f" and tags.`{USED_TAG}` = '1'" if used else "")
    body = {"experiment_ids": [experiment], "filter": query, "max_results": 20}
    runs = _post_or_retry(server, "runs/search", body).get("runs", [])
    return sorted(runs, key=lambda run: (int(run["info"].get("start_time") or 0), str(run["info"]["run_id"])))


def _create(server: MlflowClient, experiment: str, name: RunName) -> RemoteRun:
    tags = [{"key": RUN_TAG, "value": name.run}]
    body = {"experiment_id": experiment, "run_name": name.title, "start_time": name.started, "tags": tags}
    return _parse_run(_post_or_retry(server, "runs/create", body)["run"])


def _post_or_retry(server: MlflowClient, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """Without its run a job can send nothing: what the server rejects now is retried later too."""
    try:
        return server.post(path, body)
    except RequestRejected as error:
        raise ServerUnavailable(str(error)) from None


def _parse_run(run: dict[str, Any]) -> RemoteRun:
    info = run["info"]
    uri = urllib.parse.urlsplit(str(info.get("artifact_uri", "")))
    return RemoteRun(str(info["run_id"]), uri.path.strip("/") if uri.scheme == "mlflow-artifacts" else None)
