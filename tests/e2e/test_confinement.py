"""Confinement with cgroups: a job has only its GPUs and its memory, and all its processes end with it."""

from pathlib import Path

import pytest
from tests.e2e.cluster import WITH_CGROUPS, Cluster
from tests.e2e.standing import Standing

COVERS = "roles/compute slurm/conf jobs/failure"
GROUP = "reef"
pytestmark = [pytest.mark.sandbox, WITH_CGROUPS]

EATS = """\
import os, time
if os.environ["RANK"] == "1":
    eaten = []
    while True:
        eaten.append(bytearray(1 << 20))
time.sleep(600)
"""

OPEN_BOTH = "for n in 0 1; do : < /dev/nvidia$n && echo open $n; done; true"


@pytest.fixture(scope="module")
def cluster(standing: Standing) -> Cluster:
    return standing.cluster


def settings(cluster: Cluster, file: str) -> dict[str, str]:
    lines = cluster.on("controller", "cat", f"/etc/slurm/{file}").splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))


def nodes(cluster: Cluster) -> list[str]:
    """The nodes that take jobs; a cluster of virtual machines may have one."""
    return cluster.on("controller", "sinfo", "-h", "-N", "-o", "%n").split()


def test_jobs_are_tracked_and_confined_by_cgroups(cluster: Cluster) -> None:
    conf = settings(cluster, "slurm.conf")
    assert conf["ProctrackType"] == "proctrack/cgroup"
    assert conf["TaskPlugin"] == "task/affinity,task/cgroup"
    assert settings(cluster, "cgroup.conf")["ConstrainDevices"] == "yes"
    in_force = cluster.on("controller", "scontrol", "show", "config")
    assert "proctrack/cgroup" in in_force


def test_job_opens_only_its_own_gpus(cluster: Cluster) -> None:
    say = "echo own $CUDA_VISIBLE_DEVICES; " + OPEN_BOTH
    for node in nodes(cluster):
        output = cluster.on("controller", "srun", "-w", node, "--gpus=1", "bash", "-c", f"exec 2>&1; {say}")
        assert "open 0" in output and "open 1" not in output, output
        assert "/dev/nvidia1: Operation not permitted" in output
        both = cluster.on("controller", "srun", "-w", node, "--gpus=2", "bash", "-c", f"exec 2>&1; {say}")
        assert "open 0" in both and "open 1" in both, both
        none = cluster.on("controller", "srun", "-w", node, "bash", "-c", f"exec 2>&1; {OPEN_BOTH}")
        assert "open" not in none, none


def test_two_jobs_on_a_node_hold_different_gpus(cluster: Cluster) -> None:
    """The second job is sent while the first one runs; what each may open is what the other may not."""
    hold = "exec 2>&1; " + OPEN_BOTH + "; while [ ! -e /tmp/release ]; do sleep 0.2; done"
    common = ["-w", "fish1", "--gpus=1", "--ntasks=1", "--cpus-per-task=1", "--mem=50M"]
    submit = ["sbatch", "--parsable", *common, "--output=/tmp/first.out", "--wrap", f"bash -c '{hold}'"]
    job = cluster.on("controller", *submit).strip()
    cluster.wait("it runs", lambda: "open" in cluster.on("fish1", "cat", "/tmp/first.out", status=None))
    try:
        second = cluster.on("controller", "srun", *common, "bash", "-c", f"exec 2>&1; {OPEN_BOTH}")
        first = cluster.on("fish1", "cat", "/tmp/first.out")
    finally:
        cluster.on("fish1", "touch", "/tmp/release")
    opened = [[line for line in output.splitlines() if line.startswith("open")] for output in (first, second)]
    assert sorted(opened) == [["open 0"], ["open 1"]], (first, second)
    ended = ["scontrol", "show", "job", job]
    cluster.wait("it ends", lambda: "JobState=COMPLETED" in cluster.on("controller", *ended))
    cluster.on("fish1", "rm", "/tmp/release", "/tmp/first.out")


def test_background_processes_end_with_their_job(cluster: Cluster) -> None:
    """A daemon of its own session, orphaned: only a cgroup still knows whose it is."""
    leave = (
        "setsid --fork sleep 77777 < /dev/null > /dev/null 2>&1; until pgrep -x -f 'sleep 77777'; do sleep 0.1; done"
    )
    node = nodes(cluster)[-1]
    assert cluster.on("controller", "srun", "-w", node, "bash", "-c", leave).strip().isdecimal()
    gone = ["sh", "-c", "pgrep -x -f 'sleep 77777' || true"]
    cluster.wait("it is gone", lambda: cluster.on(node, *gone) == "")


def test_job_memory_is_limited_to_its_request(cluster: Cluster) -> None:
    assert settings(cluster, "cgroup.conf")["ConstrainRAMSpace"] == "yes"
    take = "import sys; sys.stdout.write(str(len(bytearray(150 << 20))))"
    assert cluster.on("controller", "srun", "--mem=250M", "python3", "-c", take) == str(150 << 20)
    killed = cluster.on("controller", "bash", "-c", f"srun --mem=60M python3 -c '{take}' 2>&1", status=None)
    assert "oom" in killed.lower() or "Out Of Memory" in killed, killed


def test_rank_killed_for_its_memory_is_named(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eats.py").write_text(EATS)
    monkeypatch.chdir(tmp_path)
    arguments = ("--wait", "-N2", "--ntasks-per-node", "1", "--gpus-per-node", "0", "--mem", "100M")
    result = cluster.json("run", *arguments, "eats.py", status=1)
    reason = result["reason"]
    assert (reason["kind"], reason["rank"], reason["node"]) == ("out of memory", 1, "fish2"), result
    assert reason["text"] == "rank 1 on fish2 was killed: the memory was used up"
    assert reason["fix"].startswith("give it more with --mem")
