"""Times a log call in a training step: Shoal's tracker with servers in several states, beside MLflow's own client.

Each call logs one metric; calls are 1 ms apart, so that the sender works in the meantime. MLflow is installed for it,
which takes minutes the first time; --no-mlflow and --small leave it out and use the fake server of the tests alone.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness import BenchError, bench_parser, describe_machine, peer_environment, report, run_bench, show_progress
from tests.unit.train.mlflow_server import FakeMlflow

from shoal.train.tracking import tracker

CLIENT = """
import sys, time, mlflow
mlflow.set_tracking_uri(sys.argv[1]); wait = sys.argv[2] == "wait"
mlflow.set_experiment("client"); mlflow.start_run()
for step in range(int(sys.argv[3])):
    time.sleep(0.001)
    start = time.perf_counter()
    mlflow.log_metric("loss", step / 7, step=step, synchronous=wait)
    print("took", time.perf_counter() - start)
"""


def main() -> None:
    parser = bench_parser("tracking", __doc__)
    parser.add_argument("--calls", type=int, default=3000)
    parser.add_argument("--no-mlflow", action="store_true", help="without MLflow's server and client")
    options = parser.parse_args()
    if options.small:
        options.calls, options.no_mlflow = 100, True
    versions = [] if options.no_mlflow else [mlflow_version()]
    rows = [
        describe_machine(options, *versions),
        f"{options.calls} calls; microseconds for each",
        "",
        f"{'':42} {'median':>8} {'99 %':>8} {'maximum':>9}",
        *(row(name, times) for name, times in measure(options.calls, not options.no_mlflow)),
    ]
    report("tracking", options, "\n".join(rows) + "\n")


def measure(calls: int, with_mlflow: bool) -> Iterator[tuple[str, list[float]]]:
    server = FakeMlflow()
    yield "Shoal, no server", time_calls("", calls)
    yield "Shoal, fake server", time_calls(server.uri, calls)
    server.faults = ["500"] * 10_000
    yield "Shoal, server answers 500", time_calls(server.uri, calls)
    server.faults = ["hang"] * 10_000
    yield "Shoal, server hangs", time_calls(server.uri, calls)
    server.stop()
    yield "Shoal, server down", time_calls(server.uri, calls)
    if with_mlflow:
        with mlflow_server() as uri:
            yield "Shoal, MLflow server", time_calls(uri, calls)
            yield "mlflow client, asynchronous", time_client(uri, "asynchronous", calls)
            yield "mlflow client, default", time_client(uri, "wait", min(calls, 300))


def time_calls(uri: str, calls: int) -> list[float]:
    times = []
    with tempfile.TemporaryDirectory() as directory:
        track = tracker(uri=uri, directory=directory, system_every=0)
        for step in range(calls):
            time.sleep(0.001)
            start = time.perf_counter()
            track.log({"loss": step / 7}, step=step)
            times.append(time.perf_counter() - start)
        track.close(timeout=1)
        lines = sum(path.read_text().count('"loss"') for path in Path(directory).rglob("*.jsonl"))
    if lines != calls:
        raise BenchError(f"{calls} metrics were logged, and {lines} are on disk")
    return times


def mlflow_programs() -> Path:
    return peer_environment("mlflow", "mlflow>=3")


def mlflow_version() -> str:
    line = [mlflow_programs() / "mlflow", "--version"]
    return subprocess.run(line, capture_output=True, text=True, check=True).stdout.strip().replace(", version", "")


@contextmanager
def mlflow_server() -> Iterator[str]:
    """The address of an MLflow server on the loopback interface."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    uri = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryDirectory() as directory:
        store = ["--backend-store-uri", "sqlite:///m.db", "--artifacts-destination", "./artifacts", "--workers", "1"]
        command = [str(mlflow_programs() / "mlflow"), "server", *store, "--host", "127.0.0.1", "--port", str(port)]
        with Path(os.devnull).open("w") as quiet:
            server = subprocess.Popen(command, cwd=directory, start_new_session=True, stdout=quiet, stderr=quiet)
        try:
            wait_for_server(uri)
            yield uri
        finally:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait()


def wait_for_server(uri: str) -> None:
    for _ in range(600):
        try:
            urllib.request.urlopen(uri + "/health", timeout=5).close()
        except OSError:
            time.sleep(0.2)
        else:
            return
    raise BenchError("the MLflow server does not answer")


def time_client(uri: str, mode: str, calls: int) -> list[float]:
    command = [str(mlflow_programs() / "python"), "-W", "ignore", "-c", CLIENT, uri, mode, str(calls)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("took ")]


def row(name: str, times: list[float]) -> str:
    values = sorted(second * 1e6 for second in times)
    line = f"{name:42} {statistics.median(values):8.1f} {values[int(len(values) * 0.99)]:8.1f} {values[-1]:9.1f}"
    show_progress(line)
    return line


if __name__ == "__main__":
    run_bench("tracking", main)
