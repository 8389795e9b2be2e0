"""`shoal prove` on the toy example as jobs of a real cluster. test_local_prove.py has it on this machine."""

import json
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, Cluster
from tests.e2e.standing import Standing
from tests.e2e.test_local_prove import SCRIPT, prove

from shoal.sandbox.layout import Layout

COVERS = "proof verbs/prove train/proof_record.py train/proof_watch.py"
GROUP = "reef"
pytestmark = pytest.mark.sandbox

HANG = """\
import time
from shoal.train import init
init()
time.sleep(3000)
"""


class Jobs(Cluster):
    """A cluster whose commands run where the toy example is."""

    tree: Path

    def give_tree(self, directory: Path) -> None:
        self.tree = directory / "tree"
        shutil.copytree(ROOT / "examples/toy", self.tree)
        (self.tree / "hang.py").write_text(HANG)
        shutil.copy(SCRIPT, self.tree / "wrong.py")

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return self.background(*arguments, stderr=subprocess.PIPE, cwd=self.tree)

    def prove(self, *arguments: str, status: int = 0) -> Any:
        running = self.start("prove", "--json", "--export", "PYTHONPATH=/shared/env", *arguments)
        out, err = running.communicate(timeout=900)
        assert running.returncode == status, f"{out}\n{err}"
        return json.loads(out)


@pytest.fixture(scope="module")
def cluster(standing: Standing, tmp_path_factory: pytest.TempPathFactory) -> Jobs:
    made = standing.view(Jobs)
    made.give_tree(tmp_path_factory.mktemp("prove"))
    return made


@ON_DEBIAN_12
@pytest.mark.parametrize(
    ("ranks", "launchers"), [("2", "srun"), pytest.param("4", "srun,pmix", marks=pytest.mark.matrix)]
)
def test_toy_passes_on_two_nodes(cluster: Jobs, ranks: str, launchers: str) -> None:
    report = cluster.prove("train.py", "-n", ranks, "-N2", "--launcher", launchers)
    ways = [(launcher, parallel) for launcher in launchers.split(",") for parallel in ("ddp", "fsdp")]
    assert [(row["launcher"], row["parallel"]) for row in report["rows"]] == ways
    assert report["passed"] and report["steps"] == 10, report
    assert report["losses"][-1] < report["losses"][0]
    records = cluster.on(
        "fish1", "sh", "-c", f"find /var/lib/shoal/jobs/{cluster.name} -name 'rank-*.end' | grep proof || true"
    )
    assert records == "", "they are taken away from the nodes"


@pytest.mark.matrix
def test_toy_passes_on_this_machine_in_single_precision(cluster: Jobs) -> None:
    arguments = ("--launcher", "torchrun", "--parallel", "ddp", "--dtype", "float32", "--steps", "3", "--json")
    packages = Layout(cluster.provider.cache, cluster.name).shared / "env"
    report = json.loads(prove(cluster.tree, "train.py", "-n", "2", *arguments, path=str(packages)).stdout)
    assert report["passed"] and (report["tolerance"], report["steps"]) == (1e-6, 3), report


@pytest.mark.matrix  # the next test has it every day, as a user and with DDP
def test_wrong_script_fails_on_the_cluster(cluster: Jobs) -> None:
    report = cluster.prove("wrong.py", "-n", "2", "--parallel", "fsdp", "--steps", "3", "--", "divides twice", status=1)
    [row] = report["rows"]
    assert not report["passed"] and "it is divided by the number of ranks twice" in row["cause"]


@ON_DEBIAN_12
def test_user_proves_a_script_with_jobs_of_their_own(cluster: Jobs, standing: Standing) -> None:
    alice = standing.client("alice", "prove")
    alice.json("join", "alice@desktop")
    for name in ("train.py", "curve.py", "wrong.py"):
        shutil.copy(cluster.tree / name, alice.tree)
    options = ("-n", "2", "-N2", "--cluster", cluster.name, "--parallel", "ddp", "--export", "PYTHONPATH=/shared/env")
    report = alice.json("prove", *options, "train.py")
    assert report["passed"] and report["steps"] == 10, report
    report = alice.json("prove", *options, "--steps", "3", "wrong.py", "--", "divides twice", status=1)
    assert "it is divided by the number of ranks twice" in report["rows"][0]["cause"]
    place = "/shared/shoal-jobs/alice"
    assert cluster.on("controller", "find", place, "-name", "proof", "-o", "!", "-user", "alice") == ""
    assert len(alice.json("jobs")["jobs"]) >= 4


def test_ctrl_c_cancels_the_job(cluster: Jobs) -> None:
    running = cluster.start("prove", "--export", "PYTHONPATH=/shared/env", "hang.py")
    jobs = ("squeue", "-h", "-n", "prove-hang", "-o", "%T")
    cluster.wait("it runs", lambda: cluster.on("controller", *jobs).strip() == "RUNNING")
    running.send_signal(signal.SIGINT)
    _, output = running.communicate(timeout=LIMIT)
    assert running.returncode == 130 and "stopped; its job is cancelled" in output, output
    cluster.wait("the job has ended", lambda: cluster.on("controller", *jobs).strip() == "")
