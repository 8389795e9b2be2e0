"""No metric is lost or doubled, whatever the server does."""

import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.cases import cases
from tests.unit.train.mlflow_server import FakeMlflow

from shoal.train.tracking.delivery import Delivery, DeliveryThread, retry_pause
from shoal.train.tracking.mlflow_client import MlflowClient, RunName, ServerUnavailable, split_uri
from shoal.train.tracking.spool import Spool

NAME = RunName("cluster-17", "digits", "train", 1_700_000_000_000)


@pytest.fixture
def mlflow() -> Iterator[FakeMlflow]:
    server = FakeMlflow()
    yield server
    server.stop()


@pytest.fixture
def spool(tmp_path: Path) -> Iterator[Spool]:
    spool = Spool(tmp_path / "metrics.jsonl")
    yield spool
    spool.close()


def record(spool: Spool, first: int, last: int) -> None:
    for step in range(first, last):
        spool.append({"t": 1000 + step, "step": step, "metrics": {"loss": 1 / (step + 1)}})


def shipping(mlflow: FakeMlflow, *paths: Path, create: bool = True, timeout: float = 5.0) -> Delivery:
    return Delivery(MlflowClient(mlflow.uri, {}, timeout), NAME, paths, create=create)


def ship_all(shipping: Delivery, tries: int = 50) -> list[str]:
    """Ship until nothing is left. Returns the errors."""
    troubles: list[str] = []
    while True:
        try:
            if not shipping.deliver():
                return troubles
        except ServerUnavailable as error:
            troubles.append(str(error))
            assert len(troubles) < tries, troubles


def each_once(first: int, last: int) -> dict[tuple[int, float], int]:
    return {(step, 1 / (step + 1)): 1 for step in range(first, last)}


@cases("fault", "500", "drop", "refuse")
@cases("on", "", "experiments/create", "runs/create", "set-tag", "log-batch", "search", "get-by-name")
def test_failed_request_loses_and_duplicates_nothing(mlflow: FakeMlflow, spool: Spool, fault: str, on: str) -> None:
    record(spool, 0, 30)
    mlflow.fault_on, mlflow.faults = on, [fault]
    assert ship_all(shipping(mlflow, spool.path)) and mlflow.rows() == each_once(0, 30) and len(mlflow.runs) == 1


def test_many_faults_with_concurrent_records_lose_and_duplicate_nothing(mlflow: FakeMlflow, spool: Spool) -> None:
    mlflow.faults = ["drop", "500", "ok", "refuse", "drop", "ok", "ok", "drop", "drop", "500", "ok", "drop"] * 3
    sending = shipping(mlflow, spool.path)
    for start in range(0, 300, 10):
        record(spool, start, start + 10)
        ship_all(sending)
    assert mlflow.rows() == each_once(0, 300) and len(mlflow.active_runs()) == 1


def test_late_answer_after_storing_duplicates_nothing(mlflow: FakeMlflow, spool: Spool) -> None:
    record(spool, 0, 10)
    mlflow.fault_on, mlflow.faults = "log-batch", ["hang"]
    assert ship_all(shipping(mlflow, spool.path, timeout=3)) == [f"{mlflow.uri}: timed out"]
    assert mlflow.rows() == each_once(0, 10)


def test_server_that_returns_midway_gets_all_records(mlflow: FakeMlflow, spool: Spool) -> None:
    sending = shipping(mlflow, spool.path)
    record(spool, 0, 10)
    ship_all(sending)
    mlflow.stop()
    record(spool, 10, 20)
    with pytest.raises(ServerUnavailable, match="Connection refused"):
        sending.deliver()
    mlflow.start()
    record(spool, 20, 30)
    ship_all(sending)
    assert mlflow.rows() == each_once(0, 30)


def test_sender_killed_before_storing_its_position_duplicates_nothing(mlflow: FakeMlflow, spool: Spool) -> None:
    record(spool, 0, 10)
    ship_all(shipping(mlflow, spool.path))
    spool.path.with_name("metrics.jsonl.sent").unlink()
    record(spool, 10, 12)
    ship_all(shipping(mlflow, spool.path))
    assert mlflow.rows() == each_once(0, 12)


def test_acknowledged_records_are_not_sent_again(mlflow: FakeMlflow, spool: Spool) -> None:
    record(spool, 0, 10)
    ship_all(shipping(mlflow, spool.path))
    mlflow.requests.clear()
    ship_all(shipping(mlflow, spool.path))
    assert not [path for path in mlflow.requests if "log-batch" in path]


def test_batches_stay_within_the_mlflow_limits(mlflow: FakeMlflow, spool: Spool) -> None:
    record(spool, 0, 2500)
    spool.append({"t": 1, "step": 0, "metrics": {f"m{n}": float(n) for n in range(2500)}})
    spool.append({"t": 1, "params": {f"p{n}": "x" * 9000 for n in range(250)}})
    spool.append({"t": 1, "tags": {f"t{n}": "ü" * 9000 for n in range(150)}})
    spool.append({"t": 2, "tags": {"t0": "last"}})
    assert ship_all(shipping(mlflow, spool.path)) == []
    run = mlflow.the_run()
    assert len(run["metrics"]) == 5000 and len(run["params"]) == 250 and len(run["params"]["p7"]) == 6000
    assert (run["tags"]["t0"], len(run["tags"]["t149"])) == ("last", 8000)


def test_non_json_numbers_arrive(mlflow: FakeMlflow, spool: Spool) -> None:
    spool.append({"t": 1, "step": 1, "metrics": {"loss": "NaN"}})
    ship_all(shipping(mlflow, spool.path))
    assert mlflow.rows() == {(1, "NaN"): 1}


def test_invalid_entry_does_not_delay_or_lose_the_others(
    mlflow: FakeMlflow, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    record(spool, 0, 20)
    spool.append({"t": 1, "step": 3, "metrics": {"bad#name": 1.0}})
    record(spool, 20, 40)
    with caplog.at_level(logging.ERROR):
        ship_all(shipping(mlflow, spool.path))
    assert mlflow.rows() == each_once(0, 40)
    (line,) = spool.path.with_name("metrics.jsonl.rejected").read_text().splitlines()
    assert json.loads(line)["entry"]["key"] == "bad#name"
    assert "the server rejected metric INVALID_PARAMETER_VALUE: Invalid value 'bad#name'" in caplog.text


def test_parameter_changed_by_a_restart_becomes_a_tag(mlflow: FakeMlflow, spool: Spool) -> None:
    for value in ("0.1", "0.1", "0.2"):
        spool.append({"t": 1, "params": {"lr": value}})
    ship_all(shipping(mlflow, spool.path))
    assert mlflow.the_run()["params"] == {"lr": "0.1"} and mlflow.the_run()["tags"]["param.lr"] == "0.2"


def test_invalid_lines_are_skipped(mlflow: FakeMlflow, spool: Spool) -> None:
    record(spool, 0, 2)
    with spool.path.open("a") as file:
        file.write("\x00\x00\n[1]\n")
    record(spool, 2, 4)
    ship_all(shipping(mlflow, spool.path))
    assert mlflow.rows() == each_once(0, 4)


def test_server_that_lost_its_database_gets_everything_again(mlflow: FakeMlflow, spool: Spool) -> None:
    sending = shipping(mlflow, spool.path)
    record(spool, 0, 10)
    ship_all(sending)
    mlflow.runs.clear()
    mlflow.experiments.clear()
    record(spool, 10, 20)
    assert "not found" in ship_all(sending)[0] and mlflow.rows() == each_once(0, 20)


def test_deleted_run_is_explained(mlflow: FakeMlflow, spool: Spool) -> None:
    sending = shipping(mlflow, spool.path)
    record(spool, 0, 1)
    ship_all(sending)
    id = mlflow.the_run()["info"]["run_id"]
    mlflow.the_run()["info"]["lifecycle_stage"] = "deleted"
    record(spool, 1, 2)
    with pytest.raises(ServerUnavailable, match=f"the run {id} was deleted: `mlflow runs restore --run-id {id}`"):
        sending.deliver()


def test_another_node_waits_for_the_run_created_by_rank_0(mlflow: FakeMlflow, spool: Spool, tmp_path: Path) -> None:
    other = Spool(tmp_path / "system-n2.jsonl")
    other.append({"t": 1, "step": 0, "metrics": {"system/n2/cpu": 5.0}})
    node = shipping(mlflow, other.path, create=False)
    with pytest.raises(ServerUnavailable, match="there is no experiment 'digits' yet"):
        node.deliver()
    mlflow.experiments["digits"] = "1"
    with pytest.raises(ServerUnavailable, match="rank 0 has not created the run yet"):
        node.deliver()
    record(spool, 0, 1)
    ship_all(shipping(mlflow, spool.path))
    ship_all(node)
    other.close()
    assert mlflow.rows("system/n2/cpu") == {(0, 5.0): 1} and len(mlflow.runs) == 1


def test_second_run_created_by_a_late_server_is_deleted_at_the_end(mlflow: FakeMlflow, spool: Spool) -> None:
    sending = shipping(mlflow, spool.path)
    record(spool, 0, 3)
    ship_all(sending)
    used, tags = mlflow.the_run()["info"]["run_id"], [{"key": "shoal.run", "value": NAME.run}]
    mlflow._runs_create({"experiment_id": "1", "start_time": NAME.started - 1, "tags": tags})
    spool.append({"t": 9, "status": "FINISHED"})
    ship_all(sending)
    assert mlflow.the_run()["info"]["run_id"] == used and mlflow.the_run()["info"]["status"] == "FINISHED"
    assert mlflow.rows() == each_once(0, 3)


def test_failed_artifact_store_does_not_delay_metrics(mlflow: FakeMlflow, spool: Spool, tmp_path: Path) -> None:
    (tmp_path / "plot.png").write_bytes(b"plot")
    artifacts = Spool(tmp_path / "artifacts.jsonl")
    artifacts.append({"t": 1, "artifact": {"path": "plots/loss 1.png", "file": "plot.png"}})
    artifacts.close()
    record(spool, 0, 3)
    mlflow.fault_on, mlflow.faults = "mlflow-artifacts", ["500"] * 3
    sending = shipping(mlflow, artifacts.path, spool.path)
    with pytest.raises(ServerUnavailable, match="the server answers 500 database is locked"):
        sending.deliver()
    assert mlflow.rows() == each_once(0, 3)
    ship_all(sending)
    id = mlflow.the_run()["info"]["run_id"]
    assert mlflow.files == {f"1/{id}/artifacts/plots/loss 1.png": b"plot"}


def test_server_without_an_artifact_proxy_leaves_the_file_in_place(mlflow: FakeMlflow, tmp_path: Path) -> None:
    mlflow.artifact_root = "s3://bucket"
    artifacts = Spool(tmp_path / "artifacts.jsonl")
    artifacts.append({"t": 1, "artifact": {"path": "a", "file": "a"}})
    artifacts.close()
    ship_all(shipping(mlflow, artifacts.path))
    assert "without --serve-artifacts" in (tmp_path / "artifacts.jsonl.rejected").read_text()


@cases(
    "status, text",
    (401, "MLFLOW_TRACKING_USERNAME"),
    (403, "--allowed-hosts"),
    (404, "not an MLflow server"),
    (302, "answers 302"),
)
def test_rejected_request_is_retried_later_with_a_hint(
    mlflow: FakeMlflow, monkeypatch: pytest.MonkeyPatch, status: int, text: str
) -> None:
    monkeypatch.setattr(mlflow, "handle", lambda request: (request.send_response(status), request.end_headers()))
    with pytest.raises(ServerUnavailable, match=text):
        MlflowClient(mlflow.uri, {}).get("experiments/get-by-name", experiment_name="x")


def test_password_is_sent_only_to_the_server(mlflow: FakeMlflow) -> None:
    host = mlflow.uri.removeprefix("http://")
    server = MlflowClient(f"http://ann:s%40cret@{host}/", {})
    assert server.uri == mlflow.uri and "s@cret" not in repr(vars(server)) and "s%40cret" not in repr(server)
    server.post("experiments/create", {"name": "x"})
    assert mlflow.headers[-1]["Authorization"] == "Basic YW5uOnNAY3JldA=="
    MlflowClient(mlflow.uri, {"MLFLOW_TRACKING_TOKEN": "tok"}).post("experiments/create", {"name": "y"})
    assert mlflow.headers[-1]["Authorization"] == "Bearer tok"


def test_stored_login_is_sent_to_the_cluster_server_only(mlflow: FakeMlflow, tmp_path: Path) -> None:
    (tmp_path / ".mlflow").mkdir()
    login = "[mlflow]\nmlflow_tracking_username = ann\nmlflow_tracking_password = s@cret\n"
    (tmp_path / ".mlflow" / "credentials").write_text(login)
    own = {"HOME": str(tmp_path), "MLFLOW_TRACKING_URI": mlflow.uri}
    sent = {
        "own": (own, "Basic YW5uOnNAY3JldA=="),
        "named": ({**own, "MLFLOW_TRACKING_USERNAME": "x", "MLFLOW_TRACKING_PASSWORD": "y"}, "Basic eDp5"),
        "token": ({**own, "MLFLOW_TRACKING_TOKEN": "tok"}, "Bearer tok"),
        "other": ({**own, "MLFLOW_TRACKING_URI": "http://elsewhere:5000"}, None),
        "homeless": ({"MLFLOW_TRACKING_URI": mlflow.uri}, None),
    }
    for name, (environ, header) in sent.items():
        MlflowClient(mlflow.uri, environ).post("experiments/create", {"name": name})
        assert mlflow.headers[-1].get("Authorization") == header, name


@cases("uri", "sqlite:///a.db", "./mlruns", "http://", "http://a:pw@h:port/")
def test_invalid_uri_is_rejected_without_its_value(uri: str) -> None:
    with pytest.raises(ValueError, match="the tracking address") as error:
        split_uri(uri)
    assert "pw" not in str(error.value)


def test_pause_grows_to_a_minute_with_jitter() -> None:
    assert [retry_pause(n, lambda: 1.0) for n in (1, 2, 3, 7, 5000)] == [1, 2, 4, 60, 60]
    assert retry_pause(3, lambda: 0.0) == 2


def test_flush_stops_for_an_unreachable_server_and_keeps_the_records(
    mlflow: FakeMlflow, spool: Spool, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow.stop()
    record(spool, 0, 5)
    assert not DeliveryThread([spool], shipping(mlflow, spool.path)).stop(30)
    assert "Connection refused" in caplog.text and "records stay on disk, training continues" in caplog.text
    mlflow.start()
    second = DeliveryThread([spool], shipping(mlflow, spool.path))
    assert second.stop(30) and mlflow.rows() == each_once(0, 5)


def test_flush_of_a_hanging_server_ends_at_its_timeout(mlflow: FakeMlflow, spool: Spool) -> None:
    mlflow.faults = ["hang"]
    record(spool, 0, 5)
    assert not DeliveryThread([spool], shipping(mlflow, spool.path, timeout=20)).stop(0.1)
    assert not mlflow.release.is_set()  # it still hangs, and we are here
    mlflow.release.set()


def test_unexpected_answer_does_not_end_the_thread(
    mlflow: FakeMlflow, spool: Spool, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = mlflow._experiments_get_by_name
    monkeypatch.setattr(mlflow, "_experiments_get_by_name", lambda given: {"surprise": 1})
    record(spool, 0, 5)
    background = DeliveryThread([spool], shipping(mlflow, spool.path), period=0.01)
    assert not background.flush(30)
    monkeypatch.setattr(mlflow, "_experiments_get_by_name", answer)
    mlflow.experiments["digits"] = "1"
    assert background.stop(30) and mlflow.rows() == each_once(0, 5)


def test_concurrent_senders_send_a_spool_once(mlflow: FakeMlflow, spool: Spool) -> None:
    record(spool, 0, 5)
    mlflow.fault_on, mlflow.faults = "log-batch", ["hang"]
    background = DeliveryThread([spool], shipping(mlflow, spool.path, timeout=20))
    while not any("log-batch" in path for path in mlflow.requests):
        time.sleep(0.01)
    with pytest.raises(ServerUnavailable, match=r"another process is sending metrics\.jsonl"):
        shipping(mlflow, spool.path).deliver()
    mlflow.release.set()
    background.stop(30)
    ship_all(shipping(mlflow, spool.path))
    assert mlflow.rows() == each_once(0, 5)
