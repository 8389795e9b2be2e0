"""The one run on the server that stands for a whole job: found again by its tag, made once.

Making a run has no key that would stop a second one, and an answer may get lost after the run was made. So a run is
looked for before each attempt, by the tag it was made with. Only rank 0 makes one. If two come to be all the same (the
server worked on, long after the client gave up), rank 0 marks the one it uses, the other nodes take only a marked one,
and the other is deleted.
"""

from __future__ import annotations

import urllib.parse
from dataclasses import dataclass
from typing import Any

from shoal.train.tracking.server import Rejected, Server, Unavailable

RUN_TAG = "shoal.run"
USED_TAG = "shoal.used"


@dataclass(frozen=True)
class RunName:
    """What identifies a run before a server has given it an id."""

    run: str
    experiment: str
    title: str
    started: int
    """When the job started for the first time, in milliseconds."""


@dataclass(frozen=True)
class RemoteRun:
    """A run on a server."""

    id: str
    artifacts: str | None
    """Where the server's artifact proxy keeps its files; None where the server has no proxy."""


def find_run(server: Server, name: RunName, *, create: bool) -> RemoteRun:
    """The job's run. Unavailable where there is none yet and this process is not the one to make it."""
    experiment = _experiment(server, name.experiment, create=create)
    used = _search(server, experiment, name, used=True)
    if used:
        return _of(used[0])
    if not create:
        raise Unavailable("rank 0 has not made the run yet")
    found = _search(server, experiment, name, used=False)
    run = _of(found[0]) if found else _create(server, experiment, name)
    server.post("runs/set-tag", {"run_id": run.id, "key": USED_TAG, "value": "1"})
    return run


def delete_doubles(server: Server, name: RunName, run: RemoteRun) -> None:
    """Delete runs of the same name that came to be by a lost answer. They are empty."""
    for other in _search(server, _experiment(server, name.experiment, create=False), name, used=False):
        tags = {tag["key"]: tag["value"] for tag in other.get("data", {}).get("tags", [])}
        if other["info"]["run_id"] != run.id and USED_TAG not in tags:
            server.post("runs/delete", {"run_id": other["info"]["run_id"]})


def is_deleted(server: Server, run: RemoteRun) -> bool:
    """Whether somebody deleted the run by hand. Rejected, and `missing`, where the server never heard of it."""
    found = server.get("runs/get", run_id=run.id)
    return bool(found["run"]["info"].get("lifecycle_stage") == "deleted")


def _experiment(server: Server, name: str, *, create: bool) -> str:
    for _ in range(2):
        try:
            found = server.get("experiments/get-by-name", experiment_name=name)["experiment"]
        except Rejected as error:
            if not error.missing:
                raise Unavailable(str(error)) from None
        else:
            if found.get("lifecycle_stage") == "deleted":
                raise Unavailable(f"the experiment {name!r} is deleted: restore it, or choose another name")
            return str(found["experiment_id"])
        if not create:
            break
        try:
            return str(server.post("experiments/create", {"name": name})["experiment_id"])
        except Rejected as error:
            if error.code != "RESOURCE_ALREADY_EXISTS":  # another job was faster: look again
                raise Unavailable(str(error)) from None
    raise Unavailable(f"there is no experiment {name!r} yet")


def _search(server: Server, experiment: str, name: RunName, *, used: bool) -> list[dict[str, Any]]:
    wanted = f"tags.`{RUN_TAG}` = '{name.run}'" + (f" and tags.`{USED_TAG}` = '1'" if used else "")
    body = {"experiment_ids": [experiment], "filter": wanted, "max_results": 20}
    try:
        found = list(server.post("runs/search", body).get("runs", []))
    except Rejected as error:
        raise Unavailable(str(error)) from None
    return sorted(found, key=lambda run: (int(run["info"].get("start_time") or 0), str(run["info"]["run_id"])))


def _create(server: Server, experiment: str, name: RunName) -> RemoteRun:
    body = {
        "experiment_id": experiment,
        "run_name": name.title,
        "start_time": name.started,
        "tags": [{"key": RUN_TAG, "value": name.run}],
    }
    try:
        return _of(server.post("runs/create", body)["run"])
    except Rejected as error:
        raise Unavailable(str(error)) from None


def _of(run: dict[str, Any]) -> RemoteRun:
    info = run["info"]
    where = urllib.parse.urlsplit(str(info.get("artifact_uri", "")))
    return RemoteRun(str(info["run_id"]), where.path.strip("/") if where.scheme == "mlflow-artifacts" else None)
