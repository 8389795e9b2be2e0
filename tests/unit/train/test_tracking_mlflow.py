"""The same guarantees against a real MLflow server with a database, where one is installed.

The other tests use a small server in place of MLflow; this shows that both behave the same. `mlflow` is searched
on PATH, or at SHOAL_TEST_MLFLOW.
"""

import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from shoal.train.env import read_env
from shoal.train.tracking import Tracker, tracker
from shoal.train.tracking.mlflow_client import MlflowClient, RequestRejected, ServerUnavailable
from shoal.train.tracking.send import send

MLFLOW = os.environ.get("SHOAL_TEST_MLFLOW") or shutil.which("mlflow")
pytestmark = pytest.mark.skipif(not MLFLOW, reason="mlflow is not installed (or name it in SHOAL_TEST_MLFLOW)")


class RealMlflow:
    def __init__(self, directory: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.uri = f"http://127.0.0.1:{self.port}"
        self._directory = directory
        self.start()

    def start(self) -> None:
        assert MLFLOW
        store = ["--backend-store-uri", "sqlite:///m.db", "--artifacts-destination", "./artifacts"]
        command = [MLFLOW, "server", *store, "--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, cwd=self._directory, start_new_session=True, **quiet)
        for _ in range(600):
            try:
                urllib.request.urlopen(self.uri + "/health", timeout=5).close()
                return
            except OSError:
                assert self._process.poll() is None, "the server ended"
                time.sleep(0.2)
        pytest.fail("the server does not answer")

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def get(self, path: str, /, **query: str) -> dict[str, Any]:
        return MlflowClient(self.uri, {}, 60).get(path, **query)

    def the_run(self) -> dict[str, Any]:
        server = MlflowClient(self.uri, {}, 60)
        experiment = server.get("experiments/get-by-name", experiment_name="digits")["experiment"]
        (run,) = server.post("runs/search", {"experiment_ids": [experiment["experiment_id"]]})["runs"]
        return dict(run)

    def rows(self, key: str) -> Counter[tuple[int, Any]]:
        run = self.the_run()["info"]["run_id"]
        found = self.get("metrics/get-history", run_id=run, metric_key=key).get("metrics", [])
        return Counter((int(row["step"]), row["value"]) for row in found)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealMlflow]:
    server = RealMlflow(tmp_path_factory.mktemp("mlflow"))
    yield server
    server.kill()


def start(real: RealMlflow, directory: Path, restart: int = 0) -> Tracker:
    environ = {"SLURM_JOB_ID": "17", "SHOAL_EXPERIMENT": "digits"}
    env = replace(read_env({}), node="n1", restart_count=restart)
    return tracker({"lr": 0.1}, directory=directory, uri=real.uri, env=env, environ=environ, system_every=0)


def send_all(directory: Path) -> None:
    for _ in range(20):
        try:
            send(directory)
            return
        except ServerUnavailable:
            time.sleep(0.5)
    pytest.fail("not sent")


def test_server_killed_and_restarted_midway_has_every_metric_once(real: RealMlflow, tmp_path: Path) -> None:
    first = start(real, tmp_path)
    for step in range(500):
        first.log({"loss": 1 / (step + 1)}, step=step)
    first.flush(60)
    for step in range(500, 3000):
        first.log({"loss": 1 / (step + 1)}, step=step)
    real.kill()
    for step in range(3000, 4000):
        first.log({"loss": 1 / (step + 1)}, step=step)
    first.close("SCHEDULED", timeout=2)
    real.start()
    # The server stored it and its answer was lost.
    for sent in tmp_path.glob("*.sent"):
        sent.unlink()
    second = start(real, tmp_path, restart=1)
    for step in range(3900, 5000):
        second.log({"loss": 1 / (step + 1), "nan": float("nan")}, step=step)
    second.log({"bad#name": 1.0}, step=1)
    second.params({"lr": 0.2})
    second.data("plots/loss.txt", b"curve")
    second.close(timeout=60)
    send_all(tmp_path)
    assert real.rows("loss") == {(step, 1 / (step + 1)): 1 for step in range(5000)}
    assert real.rows("nan") == {(step, "NaN"): 1 for step in range(3900, 5000)}
    run = real.the_run()
    tags = {tag["key"]: tag["value"] for tag in run["data"]["tags"]}
    assert run["info"]["status"] == "FINISHED" and run["data"]["params"] == [{"key": "lr", "value": "0.1"}]
    assert (tags["param.lr"], tags["shoal.restarts"]) == ("0.2", "1")
    files = real.get("artifacts/list", run_id=run["info"]["run_id"], path="plots")["files"]
    assert [(file["path"], int(file["file_size"])) for file in files] == [("plots/loss.txt", 5)]
    (line,) = (tmp_path / "metrics.jsonl.rejected").read_text().splitlines()
    assert "Names may only contain" in json.loads(line)["answer"]


def test_mlflow_answers_match_the_test_server(real: RealMlflow) -> None:
    server = MlflowClient(real.uri, {}, 60)
    with pytest.raises(RequestRejected) as missing:
        server.get("experiments/get-by-name", experiment_name="nothing")
    assert missing.value.missing
    with pytest.raises(RequestRejected) as run_missing:
        server.get("runs/get", run_id="0" * 32)
    assert run_missing.value.missing
    id = server.post("experiments/create", {"name": "answers"})["experiment_id"]
    with pytest.raises(RequestRejected, match="RESOURCE_ALREADY_EXISTS"):
        server.post("experiments/create", {"name": "answers"})
    run = server.post("runs/create", {"experiment_id": id, "start_time": 5})["run"]["info"]
    assert run["artifact_uri"].startswith("mlflow-artifacts:/")
    server.post("runs/delete", {"run_id": run["run_id"]})
    with pytest.raises(RequestRejected, match="must be in the 'active' state"):
        server.post("runs/log-batch", {"run_id": run["run_id"], "tags": [{"key": "a", "value": "b"}]})
    assert server.get("runs/get", run_id=run["run_id"])["run"]["info"]["lifecycle_stage"] == "deleted"
