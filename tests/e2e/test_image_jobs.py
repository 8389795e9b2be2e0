"""Jobs in images: two nodes on Slurm 22.05 over WireGuard, ordinary users who log in to the controller.

The tests share one cluster and run in the order of this file.
"""

from __future__ import annotations

import json
import platform
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from tests.e2e.cluster import Cluster, login_keys, running
from tests.e2e.image_files import HERE, HOSTILE, OTHER, debian_layer, file, layer_of, write_archive
from tests.e2e.torch_env import give_torch

from shoal.remote.runner.unpacked_image import IMAGES
from shoal.roles.images import LIMIT

pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]  # hosts install the engine's packages, and unpack images

SPEC = """\
cluster: st-images
network: wireguard
controller: {provider: sandbox, memory: 1G}
nodesets:
  n: {provider: sandbox, count: 2, memory: 2G, cgroups: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"]}
  bob: {uid: 2002, keys: ["file:KEYS/bob.pub"]}
containers: oci
"""
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
import pathlib, signal, subprocess, sys, time
subprocess.Popen(["setsid", "sleep", "4242"])
signal.signal(signal.SIGUSR1, lambda *_: (print("warned", flush=True), sys.exit(0)))
print("ready", flush=True)
time.sleep(600)
"""
FILES = {"train.py": SCRIPT, "gloo.py": GLOO, "wait.py": WAIT, "show.sh": "#!/bin/sh\nid -u; ls -ld /escape /dev-sda\n"}


class User:
    """A user who is logged in to the controller."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self.cluster, self.name = cluster, name
        write = "".join(f"printf %s {shlex.quote(text)} > {name}; " for name, text in FILES.items())
        self.do(f"mkdir -p work && cd work && {write} chmod +x show.sh")

    def do(self, command: str, status: int = 0) -> str:
        done = self.cluster.ssh("controller", shlex.join(("runuser", "-l", self.name, "-c", command)))
        assert done.returncode == status, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def run(self, options: str, script: str = "train.py", status: int = 0) -> str:
        return self.do(f"cd work && shoal run --wait {options} {script}", status)

    def json(self, command: str) -> Any:
        return json.loads(self.do(f"shoal {command} --json"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann", "bob") as keys:
        text = SPEC.replace("KEYS", str(keys))
        with running(tmp_path_factory.mktemp("images"), text) as made:
            shared = made.provider.cache / "sandbox" / made.name / "shared"
            debian, env = debian_layer(), ["GREETING=hello"]
            for mark in ("one", "two"):
                write_archive(shared / f"{mark}.tar", debian, layer_of([file("mark", mark)]), env=env)
            write_archive(shared / "hostile.tar", debian, layer_of([file("mark", "hostile"), *HOSTILE]), env=env)
            write_archive(shared / "other.tar", layer_of([file("mark", "other")]), architecture=OTHER)
            yield made


@pytest.fixture(scope="module")
def ann(cluster: Cluster) -> User:
    user = User(cluster, "ann")
    user.do("shoal image pull /shared/one.tar --name mini")
    return user


def lines(text: str, word: str = "seen") -> list[list[str]]:
    """What ranks printed behind a word, by rank."""
    return sorted(match.split() for match in re.findall(rf"\b{word} (.*)", text))


def test_job_runs_in_an_image_on_two_nodes_as_its_user(ann: User) -> None:
    [pulled] = ann.json("image list")["images"]
    assert (pulled["name"], pulled["architecture"]) == ("mini", HERE) and pulled["digest"].startswith("sha256:")
    seen = lines(ann.run("-N2 --image mini"))
    assert [words[:3] for words in seen] == [["0", "2", "0"], ["1", "2", "0"]]
    assert {tuple(words[4:]) for words in seen} == {("hello", "2001", "one", "0", "tree")}
    assert seen[0][3] == seen[1][3] and seen[0][3].startswith("10.77.")
    stored = ann.cluster.on("n1", "ls", "/var/lib/shoal/images/ann").split()
    assert stored == sorted(["containers", pulled["id"], f"{pulled['id']}.lock"])
    assert ann.cluster.on("n1", "stat", "-c", "%U %a", "/var/lib/shoal/images/ann") == "ann 700\n"


def test_mounts_home_and_working_directory(ann: User) -> None:
    ann.do("mkdir -p /shared/shoal-jobs/ann/data && echo there > /shared/shoal-jobs/ann/data/mark")
    mounted = ann.run("--image mini --mount /shared/shoal-jobs/ann/data/mark:/mark:ro --home on --workdir /opt")
    [words] = lines(mounted)
    assert words[6] == "there" and words[8] == "opt" and int(words[7]) >= 0
    assert "--mount: there is no /nowhere" in ann.run("--image mini --mount /nowhere:/data", status=1)


def test_named_container_keeps_what_jobs_change(ann: User) -> None:
    for number, image in enumerate(("--image mini", "", "--image mini"), 1):
        text = ann.run(f"-w n1 {image} --container-name mine --export NOTE=1")
        assert lines(text, "note") == [["x" * number]]
    assert "Read-only file system" in ann.run("--image mini --export NOTE=1", status=1)


def test_image_that_cannot_run_is_rejected_before_the_job_starts(ann: User) -> None:
    other = ann.run("--image /shared/other.tar", status=2)
    assert f"is for {OTHER}, and the nodes are {HERE}" in other
    assert "you have no image maxi" in ann.run("--image maxi", status=2)
    assert ann.do("squeue -h -u ann") == ""


def test_hostile_image_is_harmless(ann: User) -> None:
    shown = ann.run("-w n1 --image /shared/hostile.tar", "show.sh")
    assert "2001" in shown
    assert lines(ann.run("-w n1 --image /shared/hostile.tar"))[0][6] == "hostile"
    left = "ls /etc/shoal-was-here /tmp/shoal-was-here 2> /dev/null; true"
    assert ann.cluster.on("n1", "sh", "-c", left) == ""
    find = "find /var/lib/shoal/images/ann ! -user ann -o -type b -o -type c"
    assert ann.cluster.on("n1", "sh", "-c", find) == ""


def test_two_users_have_different_images_of_one_name(ann: User, cluster: Cluster) -> None:
    bob = User(cluster, "bob")
    bob.json("image pull /shared/two.tar --name mini")
    assert lines(bob.run("-w n1 --image mini"))[0][6] == "two"
    assert lines(ann.run("-w n1 --image mini"))[0][6] == "one"
    bob.json("image pull /shared/one.tar --name mini")
    assert len(bob.json("image prune")["removed"]) == 1
    bob.json("image remove mini")
    assert bob.json("image list")["images"] == []


def test_warning_reaches_the_script_and_cancel_leaves_nothing(ann: User, cluster: Cluster) -> None:
    job = json.loads(ann.do("cd work && shoal run --json --image mini -w n1 wait.py"))["id"]
    cluster.wait("it is ready", lambda: "ready" in ann.do(f"shoal logs {job}"))
    group = cluster.on("n1", "sh", "-c", "cat /proc/$(pgrep -x -f 'python3 wait.py')/cgroup")
    assert f"/job_{job}/" in group
    ann.do(f"scancel --batch --signal=USR1 {job}")
    cluster.wait("it was warned", lambda: "warned" in ann.do(f"shoal logs {job}"))
    job = json.loads(ann.do("cd work && shoal run --json --image mini -w n1 wait.py"))["id"]
    cluster.wait("it is ready again", lambda: "ready" in ann.do(f"shoal logs {job}"))
    ann.do(f"shoal cancel {job}")
    cluster.wait("nothing is left", lambda: cluster.on("n1", "pgrep", "-u", "ann", status=None) == "")


@pytest.mark.parametrize("launcher", ["srun", "torchrun", "spawn"])
def test_ranks_in_images_train_together(ann: User, cluster: Cluster, launcher: str) -> None:
    place = give_torch(cluster.name, cluster.env)
    library = f"/usr/lib/{platform.machine()}-linux-gnu/libstdc++.so.6"  # the image has none
    mounts = f"--mount {place}:/opt/torch:ro --mount {library}:{library}:ro"
    options = f"-N2 --launcher {launcher} --image mini {mounts} --export PYTHONPATH=/opt/torch"
    assert lines(ann.run(options, "gloo.py"), "sum") == [["3.0", "one"], ["3.0", "one"]]


def test_named_container_survives_a_reboot_of_its_node(ann: User, cluster: Cluster) -> None:
    note = "-w n1 --container-name kept --export NOTE=1"
    assert lines(ann.run(f"--image mini {note}"), "note") == [["x"]]
    cluster.fault("reboot", "n1")
    cluster.wait("n1 is back", lambda: "IDLE" in cluster.states()["n1"] and cluster.answers("n1"))
    assert lines(ann.run(note), "note") == [["xx"]]


@pytest.mark.parametrize(
    ("limit", "words"), [("size=60m", "MB are free"), ("nr_inodes=500", "no space left on device")]
)
def test_full_disk_leaves_no_part_of_the_image(ann: User, cluster: Cluster, limit: str, words: str) -> None:
    cluster.on("n2", "mount", "-t", "tmpfs", "-o", f"mode=1777,{limit}", "tmpfs", IMAGES)
    try:
        assert words in ann.run("-w n2 --image mini", status=1)
        left = cluster.on("n2", "ls", "-A", f"{IMAGES}/ann").split()
        assert [name for name in left if not name.endswith(".lock")] == ["containers"]
    finally:
        cluster.on("n2", "umount", IMAGES)
    assert lines(ann.run("-w n2 --image mini"))[0][6] == "one"


def test_host_without_user_namespaces_gets_no_such_jobs(ann: User, cluster: Cluster) -> None:
    # The kernel's own setting is that of this whole machine.
    cluster.on("n2", "sh", "-c", f"echo 0 > /run/zero && mount --bind /run/zero {LIMIT}")
    try:
        [finding] = [found for found in cluster.json("check", status=None)["findings"] if "images" in found["what"]]
        assert finding["host"] == "n2"
        cluster.json("up")
        assert "images" not in cluster.on("controller", "scontrol", "show", "node", "n2")
        assert "has the features" in ann.run("-w n2 --image mini", status=2)
    finally:
        cluster.on("n2", "umount", LIMIT)


def test_removed_section_removes_everything(ann: User, cluster: Cluster) -> None:
    cluster.edit("containers: oci\n", "")
    cluster.json("up")
    for host in ("n1", "n2", "controller"):
        assert cluster.on(host, "ls", "/etc/slurm/oci.conf", "/var/lib/shoal/images", status=None) == ""
    assert "no node of the cluster runs jobs in images" in ann.run("--image mini", status=2)
    assert cluster.json("up")["changed"] == []
