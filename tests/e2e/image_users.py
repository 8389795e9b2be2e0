"""Users of a cluster who run jobs in images: their scripts, and a cluster with an image on its share."""

import json
import re
import shlex
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.e2e.cluster import Cluster, login_keys, running
from tests.e2e.image_files import debian_layer, file, layer_of, write_archive

SCRIPT = """\
import os, pathlib, shoal.contract
home, mark = os.path.expanduser("~"), pathlib.Path("/mark").read_text().strip()
words = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "GREETING")]
print("seen", *words, os.getuid(), mark, len(os.listdir(home)), os.getcwd().rpartition("/")[2], flush=True)
if os.environ.get("NOTE"):
    path = pathlib.Path("/opt/note")
    path.write_text(path.read_text() + "x" if path.exists() else "x")
    print("note", path.read_text())
"""
GLOO = """\
import os, torch, torch.distributed as dist
import shoal.train
run = shoal.train.init()
value = torch.ones(1) * (run.env.rank + 1)
dist.all_reduce(value)
print("sum", value.item(), open("/mark").read().strip(), flush=True)
"""
WAIT = """\
import signal, subprocess, time
subprocess.Popen(["setsid", "sleep", "4242"])
signal.signal(signal.SIGUSR1, lambda *_: print("warned", flush=True))
print("ready", flush=True)
time.sleep(600)
"""
RESUME = """\
import os, sys, time, torch
from shoal.train import Run, TrainState, init
init()
model = torch.nn.Linear(1, 1)
for step in Run(TrainState(model)).steps(10000):
    if os.environ.get("SLURM_RESTART_COUNT", "0") != "0":
        print("resumed", step > 0 and model.weight.item() == step, open("/mark").read().strip(), flush=True)
        sys.exit(0)
    torch.nn.init.constant_(model.weight, step + 1)
    print("ready", flush=True) if step == 0 else time.sleep(0.1)
"""
UNTIL = """\
import os, pathlib, time
print("ready", flush=True)
while not pathlib.Path(os.environ["SHOAL_JOB_DIR"], "end").exists():
    time.sleep(0.2)
print("ended", pathlib.Path("/mark").read_text(), flush=True)
"""
LIMITS = """\
import sys
for number in (0, 1):
    try:
        open(f"/dev/nvidia{number}").close()
        print("opened", number, flush=True)
    except PermissionError:
        print("denied", number, flush=True)
print("took", len(bytearray(int(sys.argv[1]) << 20)), flush=True)
"""
PLAIN = """\
#!/usr/bin/env python3
import os
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GREETING", "SHOAL_CONTAINER")
print("plain", *(os.environ[name] for name in names), os.getuid(), open("/mark").read(), os.getcwd(), flush=True)
print("meet", os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ.get("GLOO_SOCKET_IFNAME"), flush=True)
"""
SHOW = """\
#!/bin/sh
echo shown $(id -u) $(cat /mark) $(/become-root -u) $(/opt/setuid/become-root -u) $(grep NoNewPrivs /proc/self/status)
ls -ld /escape /dev-sda
"""
FILES = {
    "train.py": SCRIPT,
    "gloo.py": GLOO,
    "wait.py": WAIT,
    "resume.py": RESUME,
    "until.py": UNTIL,
    "limits.py": LIMITS,
    "plain.py": PLAIN,
    "show.sh": SHOW,
    "saved.sh": "#!/bin/sh\necho $(cat /opt/live) $GREETING\n",
}


@contextmanager
def image_cluster(directory: Path, spec: str) -> Iterator[Cluster]:
    """A cluster with users ann and bob, whose hosts see the archive of a small Debian as /shared/one.tar."""
    with login_keys("ann", "bob") as keys, running(directory, spec.replace("KEYS", str(keys))) as made:
        write_image(made, "one")
        yield made


def write_image(cluster: Cluster, name: str, *files: tuple[tarfile.TarInfo, bytes]) -> None:
    """The archive of a small Debian on the cluster's share, with its name in /mark, and more files."""
    layers = (debian_layer(), layer_of([file("mark", name), *files]))
    write_archive(shared(cluster) / f"{name}.tar", *layers, env=["GREETING=hello"])


def shared(cluster: Cluster) -> Path:
    """What hosts see as /shared, on this machine."""
    return Path(cluster.provider.cache / "sandbox" / cluster.name / "shared")


class User:
    """A user who is logged in to the controller."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        write = "".join(f"printf %s {shlex.quote(text)} > {name}; " for name, text in FILES.items())
        self.do(f"mkdir -p work && cd work && {write} chmod +x *.sh")

    def do(self, command: str, status: int = 0) -> str:
        done = self.cluster.ssh("controller", shlex.join(("runuser", "-l", self.name, "-c", command)))
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def run(self, options: str, script: str = "train.py", status: int = 0) -> str:
        return self.do(f"cd work && shoal run --wait {without_gpus(options)} {script}", status)

    def start(self, options: str, script: str) -> str:
        """The number of a job that prints that it is ready."""
        job: str = json.loads(self.do(f"cd work && shoal run --json {without_gpus(options)} {script}"))["id"]
        self.cluster.wait("it is ready", lambda: "ready" in self.do(f"shoal logs {job}"))
        return job

    def json(self, command: str) -> Any:
        return json.loads(self.do(f"shoal {command} --json"))


def user_with_image(cluster: Cluster, name: str) -> User:
    """A user who has the small Debian of the cluster's share as `mini`."""
    user = User(cluster, name)
    user.do("shoal image pull /shared/one.tar --name mini")
    return user


def without_gpus(options: str) -> str:
    """Options of a job that has no GPUs, where they ask for none: it would have all of its nodes."""
    return options if "--gpus-per-node" in options else f"--gpus-per-node 0 {options}"


def lines(text: str, word: str = "seen") -> list[list[str]]:
    """What ranks printed behind a word, by rank."""
    return sorted(match.split() for match in re.findall(rf"\b{word} (.*)", text))
