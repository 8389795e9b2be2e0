"""The scripts that the jobs of tests/e2e/test_jobs.py run."""

import subprocess
from pathlib import Path
from typing import Any

from tests.e2e.cluster import LIMIT, Cluster

from shoal.contract import EXIT_REQUEUE

HELLO = """\
import os, sys
names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "CUDA_VISIBLE_DEVICES")
print("hello", *(os.environ[name] for name in names), os.environ["SLURMD_NODENAME"], sys.argv[1:], flush=True)
print("bye", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.getcwd(), file=sys.stderr)
"""
TURNS = """\
import os, pathlib, time
rank, told = int(os.environ["RANK"]), pathlib.Path("/shared/turns")  # all hosts have /shared in common
told.mkdir(exist_ok=True)
log = pathlib.Path(os.environ["SHOAL_JOB_DIR"], f"rank-{rank}.0.log")
for turn in range(2):
    while len(list(told.iterdir())) < 4 * turn + 3 - rank:
        time.sleep(0.05)
    print("turn", turn, "of", rank, flush=True)
    while f"turn {turn} of {rank}" not in log.read_text():  # when it is there, its time is noted
        time.sleep(0.05)
    (told / f"{turn}-{rank}").touch()
"""
FAIL = """\
import os, time
rank = int(os.environ["RANK"])
if rank == 2:
    time.sleep(1)
    raise ValueError("bad data in shard 7")
time.sleep(600)
"""
SLOW = """\
import signal, sys, time
signal.signal(signal.SIGUSR1, lambda number, frame: print("warned", flush=True))
print("started", flush=True)
time.sleep(float(sys.argv[1]))
time.sleep(float(sys.argv[1]))
"""
GPU = """\
import os, pathlib, time
here = pathlib.Path("/tmp/gpu-jobs")
here.mkdir(exist_ok=True)
(here / os.environ["SLURM_JOB_ID"]).touch()
def opens(number):
    try:
        open(f"/dev/nvidia{number}").close()
        return True
    except PermissionError:
        return False
own = [str(number) for number in (0, 1) if opens(number)]
# With cgroups a job opens its own alone, and numbers them from 0; without, it is told their numbers.
print(own[0] if len(own) == 1 else os.environ["CUDA_VISIBLE_DEVICES"], flush=True)
while len(list(here.iterdir())) < 2:
    time.sleep(0.1)
"""
PLACE = """\
from shoal.train.env import read_env
env = read_env()
print(env.rank, env.local_rank, env.node_rank, env.world_size, env.local_world_size, env.launcher, env.node)
"""
TRACKED = """\
import os
names = ("SHOAL_TRACKING_URI", "SHOAL_EXPERIMENT", "SHOAL_CODE_HASH", "SHOAL_RUN_ID", "MLFLOW_TRACKING_PASSWORD")
print(*(os.environ.get(name, "-") for name in names), sep="|")
"""
TRAINS = """\
import time
from shoal.train.progress import Progress
progress = Progress(total_steps=1000, samples_per_step=8)
for step in range(1, 1001):
    progress.step(step, loss=1 / step)
    time.sleep(1)
"""
AGAIN = f"""\
import os, sys
turn = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
mine = "left-" + os.environ["RANK"]  # the ranks of a node share the directory
print("turn", turn, os.path.exists(mine))
open(mine, "w")
sys.exit({EXIT_REQUEUE} if turn == 0 else 0)
"""

# What Lightning does: a handler only over the default, and at the signal a checkpoint and `scontrol requeue`.
AS_LIGHTNING = """\
import os, pathlib, signal, subprocess, time
turn, saved = int(os.environ.get("SLURM_RESTART_COUNT", "0")), pathlib.Path("saved")
def save(number, frame):
    saved.write_text("7")
    subprocess.run(["scontrol", "requeue", os.environ["SLURM_JOB_ID"]], check=True)
if signal.getsignal(signal.SIGUSR1) in (None, signal.SIG_DFL):
    signal.signal(signal.SIGUSR1, save)
print("turn", turn, "from", saved.read_text() if saved.exists() else "0", flush=True)
time.sleep(0 if turn else 1500)
"""
PLAIN = """\
import os, sys, time
print("started", flush=True)
while sys.argv[1:] or not os.path.exists("/shared/end-of-plain"):
    time.sleep(0.1)
print("at its end", flush=True)
"""


class Jobs(Cluster):
    """A cluster with a working tree to run scripts of."""

    tree: Path

    def give_tree(self, directory: Path) -> None:
        self.tree = directory / "tree"
        self.tree.mkdir()
        scripts = {
            "hello.py": HELLO,
            "turns.py": TURNS,
            "fail.py": FAIL,
            "slow.py": SLOW,
            "again.py": AGAIN,
            "place.py": PLACE,
            "gpu.py": GPU,
            "tracked.py": TRACKED,
            "trains.py": TRAINS,
            "as_lightning.py": AS_LIGHTNING,
            "plain.py": PLAIN,
        }
        for name, text in scripts.items():
            (self.tree / name).write_text(text)
        (self.tree / "go.sh").write_text("#!/bin/sh\necho from a shell $RANK\n")
        (self.tree / "go.sh").chmod(0o755)
        (self.tree / ".gitignore").write_text("secret.txt\n")
        (self.tree / "secret.txt").write_text("not to be sent")
        subprocess.run(["git", "-C", str(self.tree), "init", "-q"], check=True, timeout=LIMIT)

    def shoal(self, *arguments: str, **more: Any) -> subprocess.CompletedProcess[str]:
        return super().shoal(*arguments, cwd=self.tree, **more)

    def submit(self, *arguments: str) -> str:
        return str(self.json("run", *arguments)["id"])

    def state(self, job: str) -> str:
        """Its state in the queue; empty once it has ended."""
        done = self.ssh("controller", f"squeue -h -j {job} -o %T")
        assert done.returncode == 0 or "nvalid job id" in done.stderr, done
        return done.stdout.strip()

    def has_ended(self, job: str) -> bool:
        """Whether it has ended. A job that is queued again starts soon, not after Slurm's pause of two minutes."""
        self.starts_soon(job)
        return self.state(job) == ""

    def lines(self, job: str, *arguments: str) -> list[str]:
        return [line["text"] for line in self.json("logs", *arguments, job)["lines"] if line["rank"] >= 0]
