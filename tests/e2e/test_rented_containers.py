"""Rented containers: a simulated RunPod whose pods are behind one port each, and jobs that start one.

A container has no share and no home. The files of `shoal run` reach it through the controller, and the files that
jobs write are copied back to the controller while they run.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
from tests.e2e.cluster import LIMIT, Cluster
from tests.e2e.shoal_server import ROOTS_PROGRAM
from tests.e2e.simulated_clouds import Cloud, apart, asleep, bill, ended, renting
from tests.small_wheels import small_wheel, uv_wheel

from shoal.jobs.record import USER_JOBS_DIRECTORY
from shoal.local_files import cache_dir
from shoal.sandbox.layout import Layout

COVERS = (
    "cloud/service cloud/providers/runpod roles/rented remote/boot_pod.sh remote/boot_container.sh remote/tunnel.sh "
    "remote/job_file_transfer.py"
)
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(900)]

NAME = "x-pods"
KEY = "rp-e2e-0123456789abcdef"
SPEC = f"""\
cluster: {NAME}
controller: {{provider: sandbox, memory: 1G}}
providers:
  runpod: {{url: "URL-OF-runpod", key: "env:RUNPOD_KEY"}}
budget: {{per_hour: 5}}
environments:
  bowl: {{requirements: bowl.txt, place: local}}
users:
  ada: {{uid: 2001, keys: ["file:KEYS/ada.pub"]}}
nodesets:
  pods: {{provider: runpod, type: NVIDIA A40, region: EU-RO-1, max: 2, cpus: 1, memory: 2G, gpus: 1, idle: 10s}}
  large: {{provider: runpod, type: 8x NVIDIA A40, region: EU-RO-1, max: 1, cpus: 72, memory: 2G, gpus: 8, idle: 10s}}
partitions:
  main: {{nodesets: [pods], default: true}}
  large: {{nodesets: [large]}}
files:
  /opt/site/note: {{source: note, hosts: [pods]}}
"""
SCRIPT = """\
import contextlib, json, os, sys, time
from pathlib import Path

job, node, gpu = Path(os.environ["SHOAL_JOB_DIR"]), os.environ["SLURMD_NODENAME"], os.environ["CUDA_VISIBLE_DEVICES"]
with contextlib.suppress(ImportError):
    import herring
    print("uses", herring.VERSION, sys.prefix)
print(f"on {node} with gpu {gpu}")
print(Path("/opt/site/note").read_text().strip())
for step in range(int(sys.argv[1])):
    checkpoint = job / f"checkpoints/step-{step}"
    checkpoint.mkdir(parents=True)
    (checkpoint / "weights").write_text(str(step))
    (job / "progress.new").write_text(json.dumps({"step": step, "updated": time.time()}))
    (job / "progress.new").rename(job / "progress.json")
    print("step", step)
    time.sleep(float(sys.argv[2]))
Path("result.txt").write_text("42")
if "fail" in sys.argv:
    raise ValueError("no such luck")
"""
JOBS = f"/var/lib/shoal/jobs/{NAME}"


class Pods:
    """The cluster, the address of its cloud, and a working tree with the script."""

    def __init__(self, cluster: Cluster, url: str, tree: Path, key: Path) -> None:
        self.cluster, self.url, self.tree, self.key = cluster, url, tree, key
        (tree / "train.py").write_text(SCRIPT)

    def run(self, *arguments: str, options: Sequence[str] = ()) -> str:
        """Queue a job of `shoal run` for the first container."""
        with chdir(self.tree):
            return str(self.cluster.json("run", *options, "--nodelist", "pods1", "train.py", *arguments)["id"])

    def shown(self, job: str) -> dict[str, Any]:
        """The job as `shoal jobs` shows it."""
        [match] = [entry for entry in self.cluster.json("jobs")["jobs"] if entry["record"]["id"] == job]
        return dict(match)

    def kept(self, path: str) -> str:
        """A file of a job, where it is kept."""
        return self.cluster.on("controller", "cat", f"{JOBS}/{path}")


@pytest.fixture(scope="module")
def pods(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pods]:
    cloud = Cloud("runpod", KEY, ("--boot-seconds", "1"))
    place = tmp_path_factory.mktemp("pods")
    (place / "bowl.txt").write_text("--no-index\n--find-links /shared/index\nherring\n")
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", place / "ada"], check=True, timeout=LIMIT)
    (place / "note").write_text("from the file\n")
    with renting(place, SPEC.replace("KEYS", str(place)), cloud) as (cluster, urls):
        index = Layout(cache_dir(), NAME).shared / "index"
        small_wheel(index, "herring", "1.0")
        uv_wheel(index)
        yield Pods(cluster, urls["runpod"], tmp_path_factory.mktemp("tree"), place / "ada")


def test_job_starts_a_container_with_its_environment_and_its_files_return(pods: Pods) -> None:
    conf = pods.cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    assert "PartitionName=main Nodes=pods[1-2] " in conf and " MaxNodes=1 " in conf
    [made] = pods.cluster.json("env", "build", "bowl")["made"]
    job = pods.run("3", "0.2", options=("--env", "bowl"))
    shown = pods.cluster.shoal("logs", "-f", job).stdout.splitlines()
    report = [line for line in shown if line.startswith("[0] ")]  # srun may have had to wait, and said so
    assert report[:3] == [f"[0] uses 1.0 {made['path']}", "[0] on pods1 with gpu 0", "[0] from the file"]
    assert report[3:] == [f"[0] step {step}" for step in range(3)]
    assert pods.shown(job)["record"]["state"] == "COMPLETED"
    assert (pods.kept(f"{job}/tree/result.txt"), pods.kept(f"{job}/checkpoints/step-2/weights")) == ("42", "2")
    machine = bill(pods.url)["machines"][0]
    assert (machine["type"], machine["region"], machine["usd_hour"]) == ("NVIDIA A40", "EU-RO-1", 0.44)


def test_job_of_a_user_runs_there_as_the_user_and_its_files_return(pods: Pods, tmp_path: Path) -> None:
    (tmp_path / ".ssh").mkdir()
    address = pods.cluster.instances()["controller"].address
    (tmp_path / ".ssh/config").write_text(f"Host desktop\n    HostName {address}\n    IdentityFile {pods.key}\n")
    env = {**pods.cluster.env, "HOME": str(tmp_path)}

    def shoal(*words: str) -> str:
        done = ROOTS_PROGRAM.run(*words, cwd=pods.tree, env=env, timeout=LIMIT)
        assert done.returncode == 0, f"{words}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    shoal("join", "ada@desktop")
    job = json.loads(shoal("run", "--json", "--nodelist", "pods1", "train.py", "3", "0.2"))["id"]
    report = [line for line in shoal("logs", "-f", job).splitlines() if line.startswith("[0] ")]
    assert report == ["[0] on pods1 with gpu 0", "[0] from the file", *(f"[0] step {step}" for step in range(3))]
    place = f"{USER_JOBS_DIRECTORY}/ada/{job}"
    assert pods.cluster.on("controller", "cat", f"{place}/checkpoints/step-2/weights") == "2"
    assert set(pods.cluster.on("controller", "find", place, "-printf", r"%u\n").split()) == {"ada"}


def test_container_below_its_nodeset_is_explained_on_the_job(pods: Pods) -> None:
    """RunPod promises 72 CPUs, and the container has those of this machine."""
    wake = ("sbatch", "--parsable", "--partition=large", "--output=/dev/null", "--wrap", "true")
    job = pods.cluster.on("controller", *wake).strip()
    said = "CPUs and nodeset large says 72"
    pods.cluster.wait("it says why it waits", lambda: said in pods.shown(job)["record"]["waits_for"], seconds=120)
    pods.cluster.on("controller", "scancel", job)


def test_script_failure_in_a_container_is_reported_with_its_reason(pods: Pods) -> None:
    job = pods.run("1", "0", "fail")
    report = pods.cluster.shoal("logs", "-f", job, status=None)
    assert "[0] ValueError: no such luck" in report.stdout.splitlines()
    reason = pods.shown(job)["reason"]
    assert reason["text"] == "rank 0 on pods1 failed first, with exit status 1: ValueError: no such luck"
    assert pods.kept(f"{job}/tree/result.txt") == "42"


def test_progress_is_visible_while_a_job_runs_and_cancel_keeps_checkpoints(pods: Pods) -> None:
    job = pods.run("100000", "0.5")
    pods.cluster.wait("its progress is here", lambda: pods.shown(job)["progress"].get("step", 0) >= 2)
    assert pods.kept(f"{job}/checkpoints/step-0/weights") == "0"
    pods.cluster.shoal("cancel", job)
    pods.cluster.wait("it has ended", lambda: pods.shown(job)["record"]["state"] == "CANCELLED")
    printed = [line["text"] for line in pods.cluster.json("logs", job)["lines"] if line["rank"] == 0]
    last = printed[-1].removeprefix("step ")
    assert int(last) >= 2 and pods.kept(f"{job}/checkpoints/step-{last}/weights") == last


def test_idle_container_is_released_and_the_ledger_matches_the_bill(pods: Pods) -> None:
    pods.cluster.wait("it goes", lambda: ended(pods.url), 300)
    pods.cluster.wait("Slurm knows", lambda: asleep(pods.cluster, "pods[1-2]"), 200)
    assert pods.cluster.json("cost")["machines"] == 0
    assert apart(pods.cluster, pods.url, "pods") == ""


def test_sbatch_gets_a_new_container_for_the_same_node(pods: Pods) -> None:
    before = {machine["id"] for machine in bill(pods.url)["machines"]}
    wake = "timeout 250 sbatch --wait --gpus=1 -o /dev/null --wrap 'srun hostname'"
    pods.cluster.on("controller", "sh", "-c", wake)
    assert len({machine["id"] for machine in bill(pods.url)["machines"]} - before) == 1
    report = pods.cluster.on("controller", "sh", "-c", "journalctl; cat /proc/[0-9]*/cmdline; true")
    assert "shoal-elastic" in report and KEY not in report
