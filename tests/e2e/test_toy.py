"""examples/toy on a real cluster: one unchanged script, every launcher, DDP and FSDP, on two nodes with two ranks each.

The jobs are queued at once and run one after the other. Where there is an MLflow (on PATH, or at SHOAL_TEST_MLFLOW)
they report to a real server, else to their files alone.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
import xml.etree.ElementTree as xml
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from tests.documents import COMMANDS, PAGE, ROOT, TRAINING, changed_script, commands
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.standing import Standing
from tests.e2e.torch_env import PYTHONPATH

from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout
from shoal.sandbox.network import gateway
from shoal.train.tracking.mlflow_client import MlflowClient
from shoal.train.tracking.send import send

COVERS = "examples/toy train jobs/launchers tracking"
GROUP = "reef"
pytestmark = pytest.mark.sandbox

STEPS = 120
"""Ten epochs of 1,437 images in batches of 128."""
LAUNCHERS = ("srun", "torchrun", "spawn", "pmix", "python")
WAYS = [(launcher, parallel) for parallel in ("ddp", "fsdp") for launcher in LAUNCHERS]
EVERY_DAY = [("srun", "ddp"), ("python", "ddp"), ("pmix", "fsdp")]
"""torchrun and spawn train the page's script. All: `scripts/test -m "matrix or not matrix" tests/e2e/test_toy.py`."""
MLFLOW = os.environ.get("SHOAL_TEST_MLFLOW") or shutil.which("mlflow")


@dataclass(frozen=True)
class Outcome:
    """What a job that ended well has left."""

    printed: list[str]
    """By rank 0."""
    tracking: Path
    """The directory of its records."""

    def records(self, kind: str, file: str = "metrics.jsonl") -> list[dict[str, object]]:
        lines = (self.tracking / file).read_text().splitlines()
        return [record for record in map(json.loads, lines) if kind in record]

    def values(self, metric: str) -> list[tuple[int, float]]:
        records = self.records("metrics")
        return [(record["step"], record["metrics"][metric]) for record in records if metric in record["metrics"]]

    def losses(self) -> list[float]:
        return [value for _, value in self.values("loss")]

    def words(self, kind: str) -> dict[str, str]:
        """The run's tags, or its parameters."""
        return {key: value for record in self.records(kind) for key, value in record[kind].items()}


class Toy:
    """A job for each way, queued at once on a cluster with torch."""

    def __init__(self, cluster: Cluster, tree: Path, server: MlflowClient | None, ways: list[tuple[str, str]]) -> None:
        self.cluster, self.server = cluster, server
        self.shared = Layout(cache_dir(), cluster.name).shared
        self._ended: dict[tuple[str, str], Outcome] = {}
        with contextlib.chdir(shutil.copytree(ROOT / "examples/toy", tree)):
            self.jobs = {way: self._queue(*way) for way in ways}

    def _queue(self, launcher: str, parallel: str) -> str:
        options = ["--job", "job.yaml", "--launcher", launcher, "--export", f"PYTHONPATH={PYTHONPATH}"]
        # On a machine with fewer cores than processes, threads that wait for each other would take most of the time.
        options += ["--export", "OMP_NUM_THREADS=1"]
        options += ["-N1"] if launcher == "python" else []
        options += ["--tracking-uri", self.server.uri, "--experiment", "digits"] if self.server else []
        return str(self.cluster.json("run", *options, "train.py", "--parallel", parallel)["id"])

    def wait(self, *way: str) -> Outcome:
        if way not in self._ended:
            job = self.jobs[way[0], way[1]]
            self.cluster.shoal("logs", "--follow", job, status=None, timeout=900)
            result = self.cluster.json("logs", job)
            lines = [line["text"] for line in result["lines"] if line["rank"] == 0]
            assert result["record"]["state"] == "COMPLETED", result["reason"] or lines
            self._ended[way[0], way[1]] = Outcome(lines, self.shared / "jobs" / job / "tracking")
        return self._ended[way[0], way[1]]


@pytest.fixture(scope="module")
def toy(standing: Standing, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Toy]:
    everything = any(item.get_closest_marker("matrix") for item in request.session.items)
    directory = tmp_path_factory.mktemp("toy")
    with mlflow_server(standing.cluster, directory) as server:
        yield Toy(standing.cluster, directory / "tree", server, WAYS if everything else EVERY_DAY)


@contextmanager
def mlflow_server(cluster: Cluster, directory: Path) -> Iterator[MlflowClient | None]:
    """A real one, on the address that this machine has on the cluster's network."""
    if not MLFLOW:
        yield None
        return
    address = gateway(Layout(cache_dir(), cluster.name).sites()["a"])
    with socket.socket() as free:
        free.bind((address, 0))
        port = free.getsockname()[1]
    store = ["--backend-store-uri", "sqlite:///m.db", "--artifacts-destination", "./artifacts"]
    command = [MLFLOW, "server", *store, "--host", address, "--port", str(port), "--workers", "1"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=directory, start_new_session=True, **quiet)
    try:
        uri, end = f"http://{address}:{port}", time.monotonic() + 120
        while True:
            try:
                urllib.request.urlopen(uri + "/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, "the MLflow server does not answer"
                time.sleep(0.2)
        yield MlflowClient(uri, {}, 60)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("launcher", "parallel"),
    [pytest.param(*way, marks=() if way in EVERY_DAY else pytest.mark.matrix) for way in WAYS],
)
def test_script_trains_under_every_launcher(toy: Toy, launcher: str, parallel: str) -> None:
    done = toy.wait(launcher, parallel)
    [output] = [line for line in done.printed if line.startswith("accuracy")]
    match = re.fullmatch(r"accuracy on 360 held-out images: (\d+\.\d+)%", output)
    assert match and float(match[1]) > 97
    assert done.values("accuracy") == [(STEPS, pytest.approx(float(match[1]) / 100, abs=1e-4))]

    ranks = 1 if launcher == "python" else 4
    tags = done.words("tags")
    assert int(tags["shoal.world_size"]) == ranks and len(tags["shoal.nodes"].split(",")) == (ranks + 1) // 2
    assert done.words("params")["parallel"] == parallel

    assert [step for step, _ in done.values("loss")] == list(range(1, STEPS + 1)), "each step once"
    losses = done.losses()
    assert losses[0] == pytest.approx(2.3, abs=0.2), "what ten digits cost who knows nothing"
    assert sum(losses[-12:]) < 0.05 * sum(losses[:12])

    [plot] = [record["artifact"] for record in done.records("artifact", "artifacts.jsonl") if "svg" in str(record)]
    assert plot["path"] == "loss.svg"
    drawn = xml.parse(done.tracking / plot["file"]).getroot().find("{http://www.w3.org/2000/svg}polyline")
    assert drawn is not None and len(drawn.attrib["points"].split()) == STEPS


def test_losses_are_equal_for_all_launchers_and_for_ddp_and_fsdp(toy: Toy) -> None:
    alone = toy.wait("python", "ddp").losses()
    for way in toy.jobs:
        # Sums of floats in another order differ in the last digits, and more with every step.
        assert toy.wait(*way).losses()[:20] == pytest.approx(alone[:20], rel=1e-3), way


def test_each_job_has_its_own_run(toy: Toy) -> None:
    names = set()
    for way in toy.jobs:
        [file] = toy.wait(*way).tracking.rglob("run.json")
        names.add(json.loads(file.read_text())["run"])
    assert len(names) == len(toy.jobs)


def test_mlflow_has_a_run_per_job_with_every_loss_and_the_plot(toy: Toy) -> None:
    if toy.server is None:
        pytest.skip("mlflow is not installed (or name it in SHOAL_TEST_MLFLOW)")
    outcomes = {done.words("tags")["shoal.job_id"]: done for done in (toy.wait(*way) for way in toy.jobs)}
    for done in outcomes.values():
        send(done.tracking)  # what a busy server did not take before the job's end
    experiment = toy.server.get("experiments/get-by-name", experiment_name="digits")["experiment"]["experiment_id"]
    runs = toy.server.post("runs/search", {"experiment_ids": [experiment]})["runs"]
    assert {run["info"]["status"] for run in runs} == {"FINISHED"}
    jobs = [{tag["key"]: tag["value"] for tag in run["data"]["tags"]}["shoal.job_id"] for run in runs]
    assert sorted(jobs) == sorted(outcomes)
    for job, run in zip(jobs, runs, strict=True):
        request = {"run_id": run["info"]["run_id"], "metric_key": "loss"}
        history = toy.server.get("metrics/get-history", **request)["metrics"]
        assert sorted((int(row["step"]), row["value"]) for row in history) == outcomes[job].values("loss")
        files = toy.server.get("artifacts/list", run_id=run["info"]["run_id"])["files"]
        assert {"loss.svg", "job.sbatch"} <= {file["path"] for file in files}


SHARED_PACKAGES = "/usr/local/lib/python3.11/dist-packages/shared.pth"
AS_IN_A_LAB = f"""\
set -e
echo {PYTHONPATH} > {SHARED_PACKAGES}
mkdir -p /shared/jobs /var/lib/shoal/jobs
mount --bind /shared/jobs /var/lib/shoal/jobs
"""
AS_BEFORE = f"umount /var/lib/shoal/jobs; rm {SHARED_PACKAGES}"


@pytest.fixture
def lab_nodes(toy: Toy) -> Iterator[None]:
    """Nodes as a lab has them: torch is installed, and the jobs' directory is on storage that they share."""
    hosts = ("controller", "fish1", "fish2")
    try:
        for host in hosts:
            toy.cluster.on(host, "sh", "-c", AS_IN_A_LAB)
        yield
    finally:
        for host in hosts:
            toy.cluster.on(host, "sh", "-c", AS_BEFORE)


@pytest.mark.usefixtures("lab_nodes")
def test_documented_training_commands_run(toy: Toy, tmp_path: Path) -> None:
    shutil.copy(toy.cluster.file, tmp_path)
    (tmp_path / "train.py").write_text(changed_script())
    lines = [line for line in commands(TRAINING)[0] if COMMANDS[line] == PAGE]
    losses = []
    for line in lines:
        environment = {**toy.cluster.env, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=LIMIT
        )
        assert done.returncode == 0 and "4 processes on 2 nodes" in done.stderr, done.stdout + done.stderr
        losses.append([float(loss) for loss in re.findall(r"\[0\] epoch \d: loss (\S+)", done.stdout)])
        assert len(losses[-1]) == 5
    assert len(losses) == 3
    for other in losses[1:]:
        assert other == pytest.approx(losses[0], rel=1e-3)
