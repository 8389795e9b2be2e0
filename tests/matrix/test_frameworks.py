"""Real frameworks from PyPI, in jobs of an ordinary user over WireGuard: their signals and their progress bars.

A framework that handles the warning saves and requeues itself; what does not is left alone until its end. The tests
share one cluster: eight nodes with two CPUs, for sixteen ranks. They take about a quarter of an hour.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tests.documents import ROOT
from tests.e2e.cluster import LIMIT, Cluster, login_keys, running
from tests.e2e.test_lab import joined_clients

COVERS = "jobs/failure jobs/logs train/progress.py"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

SPEC = """\
cluster: x-frameworks
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 8, cpus: 2, memory: 2500M}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
slurm: {options: {SlurmdTimeout: 120}}
"""
PACKAGES = "torch==2.13.0\nnumpy\nlightning\ntransformers\naccelerate\nsubmitit\ntqdm\n"
FRAMEWORKS = "/shared/frameworks"
JOBS = "/shared/shoal-jobs/alice"
ENVIRONMENT = ("--export", f"PYTHONPATH={FRAMEWORKS}", "--gpus-per-node", "0")

LIGHTNING = """\
import os, pathlib, sys, time
import lightning, torch
from lightning.pytorch.callbacks import TQDMProgressBar
from torch.utils.data import DataLoader, TensorDataset
class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        time.sleep(0.2)
        if "--bars" not in sys.argv:
            print("step", self.global_step, "of turn", os.environ.get("SLURM_RESTART_COUNT", "0"), flush=True)
        return self.layer(batch[0]).mean()
    def validation_step(self, batch, index):
        time.sleep(0.2)
        while index == 5 and not pathlib.Path(os.environ["SHOAL_JOB_DIR"], "go").exists():
            time.sleep(0.1)
        self.log("val_loss", self.layer(batch[0]).mean())
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)
nodes, ranks = int(os.environ["SLURM_NNODES"]), int(os.environ["LOCAL_WORLD_SIZE"])
options = dict(accelerator="cpu", devices=ranks, num_nodes=nodes, logger=False, enable_model_summary=False)
options["default_root_dir"] = os.environ["SHOAL_JOB_DIR"]
data = DataLoader(TensorDataset(torch.randn(40 * nodes * ranks, 4)), batch_size=1)
if "--bars" in sys.argv:
    lightning.Trainer(max_epochs=2, callbacks=[TQDMProgressBar()], **options).fit(Model(), data, data)
else:
    lightning.Trainer(max_steps=100, enable_progress_bar=False, **options).fit(Model(), data)
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
TRAINER = """\
import os, pathlib, sys, time
import torch
from transformers import Trainer, TrainingArguments
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
        self.evaluated = 0
    def forward(self, x, labels=None):
        time.sleep(0.2)
        self.evaluated += not self.training
        while "--bars" in sys.argv and self.evaluated == 5 and not go.exists():
            time.sleep(0.1)
        out = self.layer(x).squeeze(-1)
        return {"loss": (out - labels).pow(2).mean(), "logits": out}
go = pathlib.Path(os.environ["SHOAL_JOB_DIR"], "go")
data = [{"x": torch.randn(4), "labels": torch.tensor(1.0)} for _ in range(10 * int(os.environ["WORLD_SIZE"]))]
options = dict(per_device_train_batch_size=1, per_device_eval_batch_size=1, logging_steps=10, save_strategy="no")
options.update(output_dir=os.environ["SHOAL_JOB_DIR"] + "/out", eval_strategy="steps", eval_steps=20, report_to=[])
arguments = TrainingArguments(max_steps=40, use_cpu=True, **options)
Trainer(model=Model(), args=arguments, train_dataset=data, eval_dataset=data).train()
print("at its end", flush=True)
"""
ACCELERATE = """\
import time
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm
accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
data = DataLoader(TensorDataset(torch.randn(200, 4)), batch_size=1)
model, optimizer, data = accelerator.prepare(model, optimizer, data)
for (x,) in tqdm(data, disable=not accelerator.is_main_process, desc="train"):
    accelerator.backward(model(x).mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.2)
print("at its end", accelerator.process_index, "of", accelerator.num_processes, flush=True)
"""
TQDM = """\
import os, pathlib, sys, time
from tqdm import tqdm, trange
go = pathlib.Path(os.environ["SHOAL_JOB_DIR"], "go")
for epoch in trange(2, desc=f"epochs of {os.environ['RANK']}"):
    for batch in tqdm(range(500), desc=f"batches {epoch}", leave=False):
        time.sleep(0.01)
        while batch == 300 and not go.exists():
            time.sleep(0.1)
    tqdm.write(f"epoch {epoch} done")
"""
FOREVER = "import os, time\nprint('turn', os.environ.get('SLURM_RESTART_COUNT', '0'), flush=True)\ntime.sleep(3600)\n"


class Site:
    """The cluster, and an ordinary user of it."""

    def __init__(self, cluster: Cluster, keys: Path) -> None:
        self.cluster, [self.alice] = cluster, joined_clients(cluster, keys, "alice")
        requirements = keys / "frameworks.txt"
        requirements.write_text(PACKAGES)
        line = [sys.executable, ROOT / "scripts/environment", cluster.name, requirements, "frameworks"]
        subprocess.run(line, check=True, timeout=3 * LIMIT)

    def submit(self, script: str, *words: str, arguments: tuple[str, ...] = ()) -> str:
        """A job of a script with the frameworks. Its path in the tree is `job.py`."""
        (self.alice.tree / "job.py").write_text(script)
        return str(self.alice.json("run", *ENVIRONMENT, *words, "job.py", *arguments)["id"])

    def on(self, *words: str, status: int | None = 0) -> str:
        return self.cluster.on("controller", *words, status=status)

    def log(self, job: str, rank: int = 0, turn: int = 0) -> list[str]:
        """The stored log of a rank, without the times."""
        text = self.on("sh", "-c", f"cat {JOBS}/{job}/rank-{rank}.{turn}.log 2> /dev/null", status=None)
        return [line.partition(" ")[2] for line in text.splitlines()]

    def bars(self, job: str) -> dict[int, str]:
        """The unfinished line of each rank, as `shoal logs` shows it."""
        lines = self.alice.json("logs", job)["lines"]
        return {line["rank"]: line["text"] for line in lines if line["file"].endswith(".bar")}

    def state(self, job: str) -> str:
        return self.on("squeue", "-h", "-j", job, "-o", "%T", status=None).strip()

    def start_again(self, job: str) -> None:
        """Not in two minutes, as Slurm would."""
        self.on("scontrol", "update", f"JobId={job}", "StartTime=now", status=None)

    def wait_for_end(self, job: str) -> None:
        def has_ended() -> bool:
            self.start_again(job)
            return self.state(job) == ""

        self.cluster.wait("it has ended", has_ended, 600)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    place = tmp_path_factory.mktemp("frameworks")
    with login_keys("alice") as keys, running(place, SPEC.replace("KEYS", str(keys)), 1800) as cluster:
        yield Site(cluster, keys)


def test_lightning_saves_and_requeues_itself(site: Site) -> None:
    job = site.submit(LIGHTNING, "-N2", "--ntasks-per-node", "1")
    site.cluster.wait("it trains", lambda: "step 5 of turn 0" in site.log(job), 300)
    site.on("scancel", "--batch", "--signal=USR1", job)
    site.cluster.wait("it is queued again", lambda: site.state(job) == "PENDING", 300)
    site.wait_for_end(job)
    steps = [int(line.split()[1]) for line in site.log(job, turn=1) if " of turn " in line]
    assert steps[0] > 5 and steps[-1] == 99


def test_submitit_job_checkpoints_and_requeues_itself(site: Site) -> None:
    site.on("install", "-d", "-o", "alice", "/shared/submitit")
    site.on("sh", "-c", f"cat > /shared/submitit/submit.py <<'END'\n{SUBMITIT}END")
    line = f"cd /shared/submitit && PYTHONPATH={FRAMEWORKS} python3 -u submit.py > out 2>&1"
    running_jobs = ("squeue", "-h", "-t", "RUNNING", "-o", "%A", "-n", "submitit")
    with ThreadPoolExecutor(1) as thread:
        waits = thread.submit(site.on, "runuser", "-u", "alice", "--", "sh", "-c", line)
        site.cluster.wait("it runs", lambda: site.on(*running_jobs) != "", 300)
        job = site.on(*running_jobs).strip()
        time.sleep(10)  # until it counts
        site.on("scancel", "--signal=USR2", job)
        site.cluster.wait("it is queued again", lambda: site.state(job) == "PENDING")
        site.start_again(job)
        site.cluster.wait("it runs again", lambda: site.state(job) == "RUNNING", 300)
        site.on("runuser", "-u", "alice", "--", "touch", "/shared/submitit/end")
        waits.result(300)
    [last] = site.on("cat", "/shared/submitit/out").splitlines()[-1:]
    assert last.startswith("started from ") and int(last.split()[-1]) > 0


@pytest.mark.parametrize(
    ("script", "bar"), [(TRAINER, "/40 ["), (ACCELERATE, "train: ")], ids=["trainer", "accelerate"]
)
def test_framework_without_a_handler_is_left_alone_until_its_end(site: Site, script: str, bar: str) -> None:
    job = site.submit(script, "-N2", "--ntasks-per-node", "1", "--launcher", "torchrun")
    site.cluster.wait("it trains", lambda: bar in site.bars(job).get(0, ""), 300)
    site.on("scancel", "--batch", "--signal=USR1", job)
    site.cluster.wait("it has ended", lambda: site.state(job) == "", 600)
    record = site.alice.record(job)
    assert (record["state"], record["restarts"]) == ("COMPLETED", 0)
    assert site.log(job)[-1].startswith("at its end") and bars_of(site.log(job)) <= 2


def bars_of(log: list[str]) -> int:
    return sum("|" in line and "%" in line for line in log)


SIXTEEN = ("-N8", "--ntasks-per-node", "2")


def test_bars_of_sixteen_ranks_are_shown_live_and_stored_once(site: Site) -> None:
    """Two bars below one another on each rank, watched in a terminal of 100 columns and 40 lines."""
    job = site.submit(TQDM, *SIXTEEN)
    site.cluster.wait("all wait at the same batch", lambda: len(waiting_bars(site.bars(job))) == 16, 300)
    if shutil.which("tmux"):
        with Terminal(site, "logs", "-f", job) as show:
            site.cluster.wait("all bars are on the screen", lambda: len(waiting_bars(screen_bars(show()))) == 16, 60)
            assert len([line for line in show().splitlines() if line.strip()]) == 16
            site.on("runuser", "-u", "alice", "--", "touch", f"{JOBS}/{job}/go")
            site.cluster.wait("all ends are shown", lambda: show().count(" 2/2 [") == 16, 300)
            assert screen_bars(show()).keys() == {*range(16)}
    site.on("runuser", "-u", "alice", "--", "touch", f"{JOBS}/{job}/go")
    site.cluster.wait("it has ended", lambda: site.state(job) == "", 300)
    for rank in range(16):
        log = site.log(job, rank)
        assert log[:2] == ["epoch 0 done", "epoch 1 done"] and len(log) == 3
        assert log[2].startswith(f"epochs of {rank}: 100%|") and "2/2 [" in log[2]


@pytest.mark.parametrize(
    ("script", "bar"), [(LIGHTNING, "Epoch 0: "), (TRAINER, "/40 [")], ids=["lightning", "trainer"]
)
def test_bars_of_a_framework_on_sixteen_ranks(site: Site, script: str, bar: str) -> None:
    """Rank 0 alone draws them, with one for the evaluation below that of the training."""
    job = site.submit(script, *SIXTEEN, arguments=("--bars",))
    site.cluster.wait("two bars are shown", lambda: site.bars(job).get(0, "").count("%|") == 2, 600)
    bars = site.bars(job)  # they stand still: the evaluation waits
    assert bars.keys() == {0} and bar in bars[0]
    site.on("runuser", "-u", "alice", "--", "touch", f"{JOBS}/{job}/go")
    site.cluster.wait("it has ended", lambda: site.state(job) == "", 600)
    assert site.alice.record(job)["state"] == "COMPLETED"
    log = site.log(job)
    assert 1 <= bars_of(log) <= 4 and not any("\x1b" in line or "\r" in line for line in log), log


def test_job_whose_host_dies_and_is_back_is_requeued_or_fails_with_that_reason(site: Site) -> None:
    """Slurm does not miss the host: it is back before SlurmdTimeout. srun would wait for its ranks."""
    both = ("-N2", "--ntasks-per-node", "1", "--nodelist", "fish[1-2]")
    again, once = site.submit(FOREVER, *both), site.submit(FOREVER, *both, "--no-requeue")
    options = ("--parsable", "--nodelist=fish[3-4]", "--output=/shared/plain")
    plain = site.on("sbatch", *options, "--wrap", "srun sleep 3600").strip()
    for job in (again, once):
        site.cluster.wait("both ranks run", lambda: [site.log(job, rank) for rank in (0, 1)] == [["turn 0"]] * 2, 120)  # noqa: B023
    site.cluster.wait("srun has begun", lambda: f"{plain}.0" in site.on("squeue", "-h", "-s", "-o", "%i"), 120)
    for host in ("fish2", "fish4"):
        site.cluster.fault("kill", host)
        site.cluster.fault("start", host)
    site.cluster.wait("one is queued again", lambda: site.state(again) == "PENDING", 300)
    site.cluster.wait("the other has ended", lambda: site.state(once) == "", 300)
    reason = site.alice.json("logs", once)["reason"]
    assert reason["kind"] == "node failure"
    assert reason["text"] == "ranks of the job are gone: rank 1 on fish2: the host was started again"
    site.cluster.wait("srun of plain sbatch has ended", lambda: site.state(plain) == "", 300)
    assert f"fish4 was started again: its ranks of step {plain}.0 are gone" in site.on("cat", "/shared/plain")
    site.cluster.wait("fish2 is back", lambda: site.cluster.states()["fish2"] == {"IDLE"}, 120)
    site.start_again(again)
    site.cluster.wait("it runs again", lambda: site.log(again, 1, 1) == ["turn 1"], 300)
    site.on("scancel", again)


def waiting_bars(bars: dict[int, str]) -> dict[int, str]:
    """Those before batch 300. tqdm draws ten times a second at most."""
    return {rank: text for rank, text in bars.items() if re.search(r" 0/2 \[.*batches 0:  (5\d|60)%", text)}


def screen_bars(screen: str) -> dict[int, str]:
    rows = [line.partition("] ") for line in screen.splitlines() if line.startswith("[")]
    return {int(rank[1:]): text for rank, _, text in rows if "%|" in text and rank[1:].isdecimal()}


class Terminal:
    """A command of the user's in a terminal of tmux; what the terminal shows."""

    def __init__(self, site: Site, *words: str) -> None:
        self.site, self.words, self.name = site, words, f"x-frameworks-{time.monotonic_ns()}"

    def __enter__(self) -> Any:
        line = self.site.alice.line(*self.words)
        size = ("-x", "100", "-y", "40")
        start = ["tmux", "-L", self.name, "new-session", "-d", *size, *line, ";", "set", "remain-on-exit", "on"]
        subprocess.run(start, check=True, timeout=LIMIT)
        return self.show

    def show(self) -> str:
        line = ["tmux", "-L", self.name, "capture-pane", "-p"]
        return subprocess.run(line, capture_output=True, text=True, check=True, timeout=LIMIT).stdout

    def __exit__(self, *error: object) -> None:
        subprocess.run(["tmux", "-L", self.name, "kill-server"], check=False, timeout=LIMIT)
