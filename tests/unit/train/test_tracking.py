"""One run for a whole job, as the script uses it."""

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.cases import cases
from tests.unit.train.mlflow_server import FakeMlflow

import shoal
from shoal.train.env import Env, read_env
from shoal.train.errors import StopExit
from shoal.train.tracking import Tracker, tracker
from shoal.train.tracking.run_identity import recovery_command, run_id
from shoal.train.tracking.send import main as send
from shoal.train.tracking.spool import read_spool

ALONE = replace(read_env({}), node="n1", nodes=("n1",))


@pytest.fixture
def mlflow() -> Iterator[FakeMlflow]:
    server = FakeMlflow()
    yield server
    server.stop()


Start = Callable[..., Tracker]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    made: list[Tracker] = []

    def start(uri: str = "", env: Env = ALONE, environ: dict[str, str] | None = None, **options: Any) -> Tracker:
        job = {"SLURM_JOB_ID": "17", "SHOAL_JOB_DIR": str(tmp_path), "SLURM_JOB_NAME": "digits"}
        made.append(tracker(uri=uri, env=env, environ={**job, **(environ or {})}, **{"system_every": 0, **options}))
        return made[-1]

    yield start
    for one in made:
        one.close(timeout=0)


def records(path: Path) -> list[dict[str, Any]]:
    return [record for _, record in read_spool(path, size=1 << 30) if record]


def metrics(directory: Path) -> list[tuple[int, dict[str, Any]]]:
    return [(r["step"], r["metrics"]) for r in records(directory / "tracking/metrics.jsonl") if "metrics" in r]


def test_records_are_json_lines_without_a_server(start: Start, tmp_path: Path) -> None:
    with start(params={"lr": 0.1, "net": {"depth": 3}}) as track:
        track.log({"loss": 0.5, "n": 3}, step=1)
        track.log({"loss": float("nan"), "a": float("inf"), "b": float("-inf")}, step=2)
        track.log({"loss": torch.ones(2, requires_grad=True).sum()}, step=3)  # torch would warn: an error here
        assert track.flush()
    not_finite = {"loss": "NaN", "a": "Infinity", "b": "-Infinity"}
    assert metrics(tmp_path) == [(1, {"loss": 0.5, "n": 3.0}), (2, not_finite), (3, {"loss": 2.0})]
    found = records(tmp_path / "tracking/metrics.jsonl")
    assert {"lr": "0.1", "net.depth": "3"} in [r.get("params") for r in found]
    assert [r["status"] for r in found if "status" in r] == ["RUNNING", "FINISHED"]


def test_run_on_the_server_has_parameters_metrics_tags_and_artifacts(
    start: Start, mlflow: FakeMlflow, tmp_path: Path
) -> None:
    plot = tmp_path / "loss.png"
    plot.write_bytes(b"old")
    track = start(mlflow.uri, replace(ALONE, job_id="17"), {"SHOAL_CODE_HASH": "c0de"}, params={"lr": 1})
    track.log({"loss": 0.5}, step=1)
    track.artifact(plot, "plots/loss.png")
    plot.write_bytes(b"changed later")
    assert track.close(timeout=30)
    run = mlflow.the_run()
    assert run["params"] == {"lr": "1"} and mlflow.rows() == {(1, 0.5): 1} and run["info"]["status"] == "FINISHED"
    assert (run["tags"]["shoal.job_id"], run["tags"]["shoal.code_hash"], run["tags"]["shoal.run"]) == (
        "17",
        "c0de",
        "slurm-17",
    )
    assert mlflow.files[f"1/{run['info']['run_id']}/artifacts/plots/loss.png"] == b"old"
    assert mlflow.experiments == {"digits": "1"}


def test_batch_script_is_attached(
    start: Start, mlflow: FakeMlflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scontrol = tmp_path / "bin/scontrol"
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\n[ "$*" = "write batch_script 17 -" ] && echo "#SBATCH -N2"\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent}:{os.environ['PATH']}")
    track = start(mlflow.uri, replace(ALONE, job_id="17"))
    while not records(tmp_path / "tracking/artifacts.jsonl"):
        time.sleep(0.01)
    assert track.close(timeout=30)
    assert list(mlflow.files.values()) == [b"#SBATCH -N2\n"]


def test_requeued_job_continues_the_same_run(start: Start, mlflow: FakeMlflow) -> None:
    for attempt in range(3):
        track = start(mlflow.uri, replace(ALONE, restart_count=attempt), params={"lr": 1})
        for step in range(attempt * 10, attempt * 10 + 10):
            track.log({"loss": 1 / (step + 1)}, step=step)
        assert track.close("SCHEDULED" if attempt < 2 else "FINISHED", timeout=30)
        assert mlflow.the_run()["info"]["status"] == ("SCHEDULED" if attempt < 2 else "FINISHED")
    assert mlflow.rows() == {(step, 1 / (step + 1)): 1 for step in range(30)}
    assert mlflow.the_run()["tags"]["shoal.restarts"] == "2"


def test_run_is_resumed_when_the_directory_is_lost(start: Start, mlflow: FakeMlflow, tmp_path: Path) -> None:
    for attempt in ("a", "b"):
        track = start(mlflow.uri, directory=tmp_path / attempt)
        track.log({attempt: 1}, step=1)
        assert track.close(timeout=30)
    assert {row[0] for row in mlflow.the_run()["metrics"]} == {"a", "b"}


def test_repeated_equal_steps_after_a_restart_are_recorded_once(start: Start, tmp_path: Path) -> None:
    first = start()
    for step in range(10):
        first.log({"loss": step / 2, "speed": step}, step=step)
    first.close("SCHEDULED")
    second = start()
    for step in range(6, 14):
        second.log({"loss": step / 2, "speed": -step}, step=step)
    second.close()
    losses = [(step, values["loss"]) for step, values in metrics(tmp_path) if "loss" in values]
    assert losses == [(step, step / 2) for step in range(14)]
    # A number that came out differently is kept: it is another fact.
    assert [step for step, values in metrics(tmp_path) if values["speed"] < 0] == list(range(6, 14))


def test_only_rank_0_records_metrics_and_only_local_rank_0_system_metrics(
    start: Start, mlflow: FakeMlflow, tmp_path: Path
) -> None:
    tracks = []
    for rank in range(4):
        env = replace(ALONE, rank=rank, local_rank=rank % 2, world_size=4, node=f"n{rank // 2}")
        tracks.append(start(mlflow.uri, env, system_every=0.02))
        tracks[-1].log({"loss": 1.0}, step=rank)
        tracks[-1].tags({f"rank{rank}": "here"})
        tracks[-1].data("x", b"")
    while not all(records(tmp_path / f"tracking/system-n{node}.jsonl")[3:] for node in (0, 1)):
        time.sleep(0.02)
    assert all(track.close(timeout=30) for track in tracks)
    keys = {row[0] for row in mlflow.the_run()["metrics"]}
    assert {"loss", "system/n0/cpu_utilization_percentage", "system/n1/system_memory_usage_percentage"} <= keys
    assert mlflow.rows() == {(0, 1.0): 1}
    assert [key for key in mlflow.the_run()["tags"] if key.startswith("rank")] == ["rank0"]
    assert (tracks[1].directory, tracks[3].directory) == (None, None)


def test_system_metrics_continue_their_count_after_a_restart(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "tracking/system-n1.jsonl"
    path.parent.mkdir()
    path.write_text('{"t":1,"step":41,"metrics":{"system/n1/x":1}}\n')
    track = start(system_every=0.01)
    while len([r for r in records(path) if "step" in r]) < 3:
        time.sleep(0.01)
    track.close()
    assert [r["step"] for r in records(path) if "step" in r][:3] == [41, 42, 43]


def test_equal_values_within_a_millisecond_are_two_records(start: Start, tmp_path: Path) -> None:
    track = start()
    for _ in range(200):
        track.log({"loss": 1.0}, step=5)
        track.log({"loss": 1.0}, step=6)
    track.close()
    rows = [(r["t"], r["step"]) for r in records(tmp_path / "tracking/metrics.jsonl") if "metrics" in r]
    assert len(set(rows)) == 400 and [t for t, _ in rows] == sorted(t for t, _ in rows)


def test_recovery_command_of_a_job_runs_on_its_node_with_the_login_of_its_user(tmp_path: Path) -> None:
    job = {"SLURMD_NODENAME": "gpu01", "SLURM_JOB_PARTITION": "main", "SLURM_JOB_ACCOUNT": "(null)"}
    line = recovery_command(tmp_path, {**job, "MLFLOW_TRACKING_USERNAME": "alice", "MLFLOW_TRACKING_PASSWORD": "pw"})
    root = Path(shoal.__file__).parents[1]
    assert line == (
        "srun --nodes=1 --ntasks=1 --mpi=none --nodelist=gpu01 --partition=main"
        f" env PYTHONPATH={root} {sys.executable} -m shoal.train.tracking.send {tmp_path}"
    )
    own = recovery_command(tmp_path, {**job, "SLURM_JOB_ACCOUNT": "lab", "MLFLOW_TRACKING_USERNAME": "jobs"})
    read = "cat" if os.geteuid() == 0 else "sudo cat"
    assert own.startswith(
        f'MLFLOW_TRACKING_USERNAME=jobs MLFLOW_TRACKING_PASSWORD="$({read} /etc/shoal/mlflow/jobs-password)" srun '
    )
    assert "--account=lab" in own


def test_unreachable_server_loses_no_record_and_the_command_sends_them_later(
    start: Start,
    mlflow: FakeMlflow,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    mlflow.stop()
    track = start(mlflow.uri)
    for step in range(100):
        track.log({"loss": float(step)}, step=step)
    assert not track.close(timeout=30)
    directory = tmp_path / "tracking"
    command = caplog.text.partition("the job's next start sends them, or: ")[2].splitlines()[0]
    assert command.endswith(f" -m shoal.train.tracking.send {directory}") and send([str(directory)]) == 1
    assert "not sent: " in (said := capsys.readouterr().err) and "Connection refused" in said
    mlflow.start()
    bare = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    printed = subprocess.run(["sh", "-c", command], cwd="/", env=bare, capture_output=True, text=True, timeout=60)
    assert (printed.returncode, printed.stderr) == (0, "") and f"the server has all of {directory}" in printed.stdout
    assert send([str(directory)]) == 0 and f"the server has all of {directory}" in capsys.readouterr().out
    assert mlflow.rows() == {(step, float(step)): 1 for step in range(100)}
    assert mlflow.the_run()["info"]["status"] == "FINISHED"


def test_command_reports_missing_input(tmp_path: Path, capsys: pytest.CaptureFixture[str], start: Start) -> None:
    assert send([str(tmp_path)]) == 1
    assert "has no run.json: it is not the tracking directory of a job" in capsys.readouterr().err
    start().close()
    assert send([str(tmp_path / "tracking")]) == 1
    assert "the job had no tracking server: name one with --uri" in capsys.readouterr().err


def test_job_killed_midway_continues_its_run(mlflow: FakeMlflow, tmp_path: Path) -> None:
    program = (
        "import sys, itertools; from shoal.train.tracking import tracker\n"
        "track = tracker(uri=sys.argv[1], directory=sys.argv[2], system_every=0)\n"
        "for step in itertools.count(int(sys.argv[3])):\n"
        "    track.log({'loss': step / 4}, step=step)\n"
        "    print(step, flush=True)\n"
        "    if step == int(sys.argv[4]): break\n"
    )
    environ = {**os.environ, "SLURM_JOB_ID": "5"}
    mlflow.faults = ["ok"] * 6 + ["drop", "500", "drop"] * 5

    def run(first: int, last: int, kill: bool) -> None:
        command = [sys.executable, "-c", program, mlflow.uri, str(tmp_path / "t"), str(first), str(last)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environ)
        if kill:
            while int(process.stdout.readline()) < 500:
                pass
            process.send_signal(signal.SIGKILL)
        process.stdout.read()
        process.stdout.close()
        process.wait()

    run(0, -1, kill=True)
    run(450, 20_000, kill=False)
    mlflow.faults.clear()
    assert send([str(tmp_path / "t")]) == 0 and mlflow.rows() == {(step, step / 4): 1 for step in range(20_001)}


def test_unclosed_run_gets_the_status_of_its_script(mlflow: FakeMlflow, tmp_path: Path) -> None:
    program = "import sys; from shoal.train.tracking import tracker; tracker(uri=sys.argv[1], directory=sys.argv[2])\n"
    for number, (end, status) in enumerate([("", "FINISHED"), ("1/0", "FAILED")]):
        command = [sys.executable, "-c", program + end, mlflow.uri, str(tmp_path / str(number))]
        subprocess.run(command, stderr=subprocess.DEVNULL, env={**os.environ, "SHOAL_RUN_ID": str(number)})
        found = [run for run in mlflow.active_runs() if run["tags"]["shoal.run"] == str(number)]
        assert [run["info"]["status"] for run in found] == [status]


@cases(
    "error, status",
    (ValueError(), "FAILED"),
    (KeyboardInterrupt(), "KILLED"),
    (SystemExit(1), "FAILED"),
    (SystemExit(0), "FINISHED"),
    (StopExit(0, requeued=True), "SCHEDULED"),
    (StopExit(143, requeued=False), "KILLED"),
    (SystemExit(85), "FAILED"),
)
def test_with_block_sets_the_status_of_the_run(start: Start, tmp_path: Path, error: BaseException, status: str) -> None:
    with pytest.raises(type(error)), start():
        raise error
    assert records(tmp_path / "tracking/metrics.jsonl")[-1]["status"] == status


def test_invalid_number_or_file_is_logged_once_and_ignored(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    track = start()
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            track.log({"loss": None, "good": 1}, step=step)
        track.artifact(tmp_path / "none.png")
        track.data("../up", b"")
    assert [record.getMessage() for record in caplog.records] == [
        "tracking: the metric loss is not a number: float() argument must be a string or a real number, not 'NoneType'",
        f"tracking: {tmp_path}/none.png is not attached: No such file or directory",
        "tracking: '../up' cannot be the name of an artifact",
    ]
    assert metrics(tmp_path) == [(step, {"good": 1.0}) for step in range(3)]


def test_invalid_uri_keeps_records_on_disk(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    track = start("sqlite:///m.db")
    track.log({"loss": 1}, step=1)
    assert "must begin with http:// or https://, not 'sqlite'; records stay on disk" in caplog.text
    assert metrics(tmp_path) == [(1, {"loss": 1.0})]


def test_unusable_directory_is_replaced_with_an_error_log(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    track = start(directory=tmp_path / "file/below")
    track.log({"loss": 1}, step=1)
    assert track.directory and track.directory.name.startswith("shoal-tracking-")
    assert f"Not a directory: '{tmp_path}/file/below'" in caplog.text
    assert f"records go to {track.directory} on n1 instead" in caplog.text
    assert any("metrics" in record for record in records(track.directory / "metrics.jsonl"))


def test_password_in_the_uri_is_in_no_file_and_no_log(
    start: Start, mlflow: FakeMlflow, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uri = mlflow.uri.replace("http://", "http://ann:hunter2@")
    mlflow.faults = ["500"] * 3
    track = start(uri)
    track.flush(30)
    track.close(timeout=0)
    text = caplog.text + "".join(path.read_text() for path in (tmp_path / "tracking").iterdir() if path.is_file())
    assert "database is locked" in text and "hunter2" not in text
    assert json.loads((tmp_path / "tracking/run.json").read_text())["uri"] == mlflow.uri


def test_directory_of_another_run_is_unchanged(start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    start().close()
    before = (tmp_path / "tracking/metrics.jsonl").read_bytes()
    second = start(environ={"SLURM_JOB_ID": "18"})
    second.log({"loss": 1}, step=1)
    assert second.directory == tmp_path / "tracking/slurm-18"
    assert (tmp_path / "tracking/metrics.jsonl").read_bytes() == before
    assert "holds the run slurm-17; this one goes into slurm-18" in caplog.text


@cases(
    "environ, expected",
    ({}, ""),
    ({"SLURM_JOB_ID": "7"}, "slurm-7"),
    ({"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "reef"}, "reef-7"),
    ({"SLURM_JOB_ID": "9", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "2"}, "slurm-7_2"),
    ({"SLURM_JOB_ID": "7", "SHOAL_RUN_ID": "mine"}, "mine"),
    ({"TORCHELASTIC_RUN_ID": "none"}, ""),
    ({"TORCHELASTIC_RUN_ID": "a'b"}, "a_b"),
)
def test_run_is_named_by_its_job(environ: dict[str, str], expected: str) -> None:
    assert run_id(environ) == expected


def test_nothing_is_recorded_after_close(start: Start, tmp_path: Path) -> None:
    track = start()
    assert track.close()
    size = (tmp_path / "tracking/metrics.jsonl").stat().st_size
    track.log({"loss": 1}, step=1)
    track.params({"a": 1})
    track.tags({"a": 1})
    track.data("a", b"")
    assert track.close() and (tmp_path / "tracking/metrics.jsonl").stat().st_size == size


def test_forked_child_that_exits_does_not_end_the_run(tmp_path: Path) -> None:
    program = (
        "import os, sys; from shoal.train.tracking import tracker\n"
        "track = tracker(directory=sys.argv[1], system_every=0)\n"
        "child = os.fork()\n"
        "if child == 0: sys.exit()\n"
        "os.waitpid(child, 0); track.log({'loss': 1}, step=1); track.close('SCHEDULED')\n"
    )
    subprocess.run([sys.executable, "-c", program, str(tmp_path)], check=True, env={**os.environ, "SHOAL_RUN_ID": "x"})
    assert [r["status"] for r in records(tmp_path / "metrics.jsonl") if "status" in r] == ["RUNNING", "SCHEDULED"]
