"""`slurm: {from: shoal}` on hosts with cgroups: jobs have only what they asked for, and logins need a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, running

from shoal.roles.slurm_tree import find_trees

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.matrix,  # a minute; what it tests is the same with packages, whose tests are daily
    pytest.mark.timeout(600),
    ON_DEBIAN_12,
    pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm"),
]

SPEC = """\
cluster: x-treecg
controller: {provider: sandbox, memory: 512M}
nodesets:
  lab: {provider: sandbox, count: 1, gpus: 2, memory: 512M, cgroups: true}
users:
  ann: {uid: 2001}
slurm: {from: shoal}
"""
OPEN_BOTH = "for n in 0 1; do : < /dev/nvidia$n && echo open $n; done; true"
TAKE = "import sys; sys.stdout.write(str(len(bytearray(150 << 20))))"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("treecg"), SPEC) as made:
        yield made


def as_ann(cluster: Cluster, line: str, status: int | None = 0) -> str:
    return cluster.on("controller", "runuser", "-u", "ann", "--", "sh", "-c", f"cd /tmp; {line} 2>&1", status=status)


def test_job_has_its_memory_and_its_gpu(cluster: Cluster) -> None:
    assert "proctrack/cgroup" in cluster.on("controller", "scontrol", "show", "config")
    output = as_ann(cluster, f"srun --gpus=1 bash -c '{OPEN_BOTH}'")
    assert "open 0" in output and "open 1" not in output and "Operation not permitted" in output, output
    assert as_ann(cluster, f"srun --mem=250M python3 -c '{TAKE}'") == str(150 << 20)
    killed = as_ann(cluster, f"srun --mem=60M python3 -c '{TAKE}'", status=None)
    assert "Out Of Memory" in killed or "oom" in killed.lower(), killed


def test_processes_in_the_background_end_with_their_job(cluster: Cluster) -> None:
    as_ann(cluster, "srun sh -c 'setsid sleep 31415 >/dev/null 2>&1 &'")
    cluster.wait("it ends", lambda: cluster.on("lab1", "pgrep", "-f", "sleep 31415", status=None) == "")


def test_login_needs_a_job_and_becomes_part_of_it(cluster: Cluster) -> None:
    login = "ssh -o BatchMode=yes lab1 cat /proc/self/cgroup"
    denied = as_ann(cluster, login, status=255)
    assert "pam_slurm_adopt" in denied, denied
    job = as_ann(cluster, "sbatch --parsable --output=/dev/null --wrap 'sleep 9999'").strip()
    try:
        cluster.wait("it runs", lambda: "RUNNING" in cluster.on("controller", "squeue", "-h", "-o", "%T"))
        assert f"job_{job}/" in as_ann(cluster, login)
        assert as_ann(cluster, "ssh -o BatchMode=yes lab1 sinfo --version").startswith("slurm 24.11")
    finally:
        as_ann(cluster, f"scancel {job}")
