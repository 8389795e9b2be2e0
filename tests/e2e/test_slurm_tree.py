"""`slurm: {from: shoal}`: one Slurm on hosts of two Debian releases, beside nothing of their own, used by a user."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, login_keys, running

from shoal.roles.slurm_tree import find_trees

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm"),
]

SPEC = """\
cluster: x-tree
controller: {{provider: sandbox, image: debian12, memory: 1G}}
nodesets:
  twelve: {{provider: sandbox, image: debian12, count: 1, gpus: 1, memory: 512M}}
  thirteen: {{provider: sandbox, image: debian13, count: 1, memory: 512M}}
network: wireguard
accounting: true
users:
  ann: {{keys: ["file:{keys}/ann.pub"]}}
slurm: {{from: shoal}}
"""
HOSTS, NODES = ("controller", "twelve1", "thirteen1"), ["thirteen1", "twelve1"]


@pytest.fixture(scope="module")
def keys() -> Iterator[Path]:
    with login_keys("ann") as place:
        yield place


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, keys: Path) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("tree"), SPEC.format(keys=keys)) as made:
        yield made


def as_ann(cluster: Cluster, command: str) -> subprocess.CompletedProcess[str]:
    return cluster.ssh("controller", shlex.join(["runuser", "-u", "ann", "--", "sh", "-c", f"cd /tmp && {command}"]))


def test_one_release_runs_on_two_debians_without_munge_and_packages(cluster: Cluster) -> None:
    [version] = {tree.version.partition("-")[0] for tree in find_trees().values()}
    assert {node["version"] for node in cluster.json("status")["nodes"]} == {version}
    for host in HOSTS:
        assert cluster.ssh(host, "dpkg -l 2>/dev/null | grep -E '^ii +(munge|slurm|sackd)'").stdout == ""
        assert cluster.ssh(host, "srun --version").stdout.split()[1] == version
    assert cluster.json("plan")["changes"] == []
    assert cluster.json("up")["unchanged"]


def test_ordinary_user_runs_jobs_on_both_and_sees_the_records(cluster: Cluster) -> None:
    done = as_ann(cluster, "srun -N2 --mem=20M sh -c 'echo $(id -un) $(hostname)'")
    assert sorted(done.stdout.splitlines()) == [f"ann {name}" for name in NODES], done
    gpu = as_ann(cluster, "srun -w twelve1 --mem=20M --gpus=1 printenv CUDA_VISIBLE_DEVICES")
    assert gpu.stdout == "0\n", gpu
    batch = as_ann(cluster, "sbatch --parsable --wait -N2 --mem=20M --output=/dev/null --wrap 'srun true'")
    job = batch.stdout.strip()
    assert batch.returncode == 0, batch
    cluster.wait("its record", lambda: "COMPLETED" in as_ann(cluster, f"sacct -X -n -P -j {job} -o state").stdout)
    pmix = as_ann(cluster, "srun -N2 --mem=20M --mpi=pmix sh -c 'echo $PMIX_RANK'")
    assert sorted(pmix.stdout.split()) == ["0", "1"], pmix


def test_restarted_slurmd_keeps_its_job(cluster: Cluster) -> None:
    wait = "while [ ! -e /tmp/word ]; do sleep 0.2; done"
    job = as_ann(cluster, f"sbatch --parsable -w thirteen1 --mem=20M --output=/dev/null --wrap '{wait}'")
    number = job.stdout.strip()
    state = f"sacct -X -n -P -j {number} -o state"
    cluster.wait("it runs", lambda: "RUNNING" in cluster.ssh("controller", state).stdout)
    cluster.on("thirteen1", "systemctl", "restart", "slurmd")
    cluster.on("thirteen1", "touch", "/tmp/word")
    cluster.wait("it ends well", lambda: "COMPLETED" in cluster.ssh("controller", state).stdout)


def test_packages_in_place_of_the_tree_are_rejected_with_the_jobs(cluster: Cluster) -> None:
    text = cluster.file.read_text()
    cluster.edit("slurm: {from: shoal}\n", "")
    try:
        output = cluster.shoal("up", status=1).stderr
        assert "has Slurm from Shoal, not from packages (no job runs there)" in output
        assert "write `slurm: {from: shoal}` again" in output
        assert any("not from packages" in found["what"] for found in cluster.json("check", status=1)["findings"])
    finally:
        cluster.file.write_text(text)


def test_slurm_of_the_distribution_is_rejected_and_its_daemon_named(cluster: Cluster) -> None:
    cluster.on("twelve1", "install", "-m", "755", "/bin/true", "/usr/sbin/slurmd")
    try:
        output = cluster.shoal("plan", status=1).stderr
        assert "twelve1: has another Slurm already (slurmd)" in output and "apt-get remove slurmd" in output
    finally:
        cluster.on("twelve1", "rm", "/usr/sbin/slurmd")
