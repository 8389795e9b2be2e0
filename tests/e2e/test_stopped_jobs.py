"""Jobs that Slurm stops continue where they were, on a real cluster. tests/matrix/signals has every way to stop one.

The tests share one cluster, whose jobs run at the same time.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tests.e2e.cluster import LIMIT, taken_down
from tests.matrix.stopped_jobs import JOBS, Cell, Matrix, Outcome, Stopped, judge

from shoal.jobs.model import job_from_options
from shoal.verbs.run import run

pytestmark = pytest.mark.sandbox

PREEMPTED = Cell("srun", "preemption", 2)
WARNED = Cell("torchrun", "USR1", 2)
ENDED = Cell("python", "TERM", 0)
CELLS = [PREEMPTED, WARNED, pytest.param(ENDED, marks=pytest.mark.matrix)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Matrix]:
    made = Matrix(tmp_path_factory.mktemp("stopping"), "x-stopping", at_once=4)
    with taken_down(made):
        made.start()
        yield made


@pytest.fixture(scope="module")
def outcomes(cluster: Matrix, request: pytest.FixtureRequest) -> dict[Cell, Outcome]:
    """All stopped, and at their end."""
    matrix = any(item.get_closest_marker("matrix") for item in request.session.items)
    cells = (PREEMPTED, WARNED, ENDED) if matrix else (PREEMPTED, WARNED)
    whole, jobs = cluster.baselines(cells), list[Stopped]()
    cluster.play(cells, jobs, hurry=True)
    return {job.cell: judge(job, whole[job.cell.world_size]) for job in jobs}


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_stopped_job_loses_no_step_and_trains_bit_for_bit_equal(outcomes: dict[Cell, Outcome], cell: Cell) -> None:
    outcome = outcomes[cell]
    assert outcome.problems == ()
    assert outcome.lost == 0
    assert outcome.resumed_at == outcome.stopped_at


def test_preempted_job_gets_its_requested_signal(outcomes: dict[Cell, Outcome]) -> None:
    assert outcomes[PREEMPTED].reason == "SIGUSR1"


LIGHTNING = """\
import os, time
import lightning, torch
from torch.utils.data import DataLoader, TensorDataset
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        time.sleep(0.2)
        print("step", self.global_step, "of turn", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
        return self.layer(batch[0]).mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
data = DataLoader(TensorDataset(torch.randn(4000, 4)), batch_size=4)
options = dict(accelerator="cpu", devices=1, num_nodes=2, logger=False, enable_progress_bar=False)
lightning.Trainer(max_steps=150, default_root_dir=os.environ["SHOAL_JOB_DIR"], **options).fit(Model(), data)
"""
SUBMITIT = """\
import os, time
import submitit
class Count:
    def __init__(self, start=0):
        self.at = self.start = start
    def __call__(self):
        while self.at < 1000 and not os.path.exists("/shared/submitit/end"):
            self.at += 1
            time.sleep(0.2)
        return self.start
    def checkpoint(self):
        return submitit.helpers.DelayedSubmission(Count(self.at))
executor = submitit.AutoExecutor(folder="/shared/submitit/logs")
executor.update_parameters(timeout_min=10, slurm_partition="main")
print("started from", executor.submit(Count()).result())
"""
PACKAGES = ("lightning", "pytorch-lightning", "torchmetrics", "lightning-utilities", "PyYAML", "fsspec", "packaging")
PACKAGES += ("tqdm", "submitit", "cloudpickle", "typing-extensions", "setuptools<81")


@pytest.fixture(scope="module")
def frameworks(cluster: Matrix) -> str:
    """Frameworks beside torch, from PyPI; the value of PYTHONPATH."""
    place = cluster.jobs.parent / "frameworks"
    line = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--only-binary=:all:", f"--target={place}"]
    subprocess.run([*line, "--python-version=3.11", *PACKAGES], check=True, timeout=LIMIT)
    return f"/shared/frameworks:{cluster.python}"


@pytest.mark.matrix
def test_lightning_saves_and_requeues_itself(cluster: Matrix, frameworks: str) -> None:
    (cluster.tree / "fit.py").write_text(LIGHTNING)
    options = {"script": "fit.py", "nodes": 2, "ntasks_per_node": 1, "gpus_per_node": 0, "directory": JOBS}
    job = job_from_options({**options, "export": {"PYTHONPATH": frameworks}})
    number = asyncio.run(run(cluster.context, job, cluster.tree)).id
    log = cluster.jobs / number / "rank-0.0.log"
    cluster.wait("it trains", lambda: log.exists() and "step 5 of turn 0" in log.read_text(), 300)
    cluster.on("controller", "scancel", "--batch", "--signal=USR1", number)
    cluster.wait("it is queued again", lambda: cluster.queue().get(number) == "PENDING")

    def has_ended() -> bool:
        cluster.on("controller", "scontrol", "update", f"JobId={number}", "StartTime=now", status=None)
        return number not in cluster.queue()

    cluster.wait("it has ended", has_ended, 600)
    lines = (cluster.jobs / number / "rank-0.1.log").read_text().splitlines()
    steps = [int(line.split()[2]) for line in lines if " of turn " in line]
    assert steps[0] > 5 and steps[-1] == 149


@pytest.mark.matrix
def test_submitit_job_checkpoints_and_requeues_itself(cluster: Matrix, frameworks: str) -> None:
    place = cluster.jobs.parent / "submitit"
    place.mkdir()
    (place / "submit.py").write_text(SUBMITIT)
    line = f"cd /shared/submitit && PYTHONPATH={frameworks} python3 -u submit.py > out 2>&1"
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(cluster.on, "controller", "sh", "-c", line)
        cluster.wait("it runs", lambda: "RUNNING" in cluster.queue().values(), 300)
        [number] = cluster.queue()
        time.sleep(10)  # until it counts
        cluster.on("controller", "scancel", "--signal=USR2", number)
        cluster.wait("it is queued again", lambda: cluster.queue().get(number) == "PENDING")
        cluster.on("controller", "scontrol", "update", f"JobId={number}", "StartTime=now", status=None)
        cluster.wait("it runs again", lambda: cluster.queue().get(number) == "RUNNING", 300)
        (place / "end").touch()
        waits.result(300)
    [last] = (place / "out").read_text().splitlines()[-1:]
    assert last.startswith("started from ") and int(last.split()[-1]) > 0


def test_check_reports_a_cluster_that_breaks_the_preemption_contract(cluster: Matrix) -> None:
    less = "jobs have less time to save after SIGTERM than they count on"
    lost = "a preempted job does not save its work and start again"
    assert not {less, lost} & {*_findings(cluster)}
    cluster.edit("SlurmdTimeout: 20", "SlurmdTimeout: 20, KillWait: 5, PreemptMode: CANCEL")
    cluster.json("up")
    cluster.edit(", KillWait: 5, PreemptMode: CANCEL", "")  # the file is corrected, the cluster not yet
    fixes = _findings(cluster)
    assert (fixes[less], fixes[lost]) == ("run `shoal up`, which sets 30", "run `shoal up`, which sets REQUEUE")
    cluster.json("up")
    assert not {less, lost} & {*_findings(cluster)}


def _findings(cluster: Matrix) -> dict[str, str]:
    """What `shoal check` finds, and the fix for each."""
    return {finding["what"]: finding["fix"] for finding in cluster.json("check", status=None)["findings"]}
