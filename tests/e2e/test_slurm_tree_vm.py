"""Shoal's own Slurm with cgroup v2, on a virtual machine of another release of Debian that is controller and node:

SHOAL_TEST_KIND=vm .venv/bin/pytest -v -n0 -m matrix tests/e2e/test_slurm_tree_vm.py
"""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import VM_BY_HAND, Cluster, login_keys, running
from tests.e2e.image_users import User

COVERS = "roles/slurm_tree roles/compute"
pytestmark = VM_BY_HAND
SPEC = """\
cluster: st-tree-vm
slurm: {from: shoal}
controller: {provider: sandbox, image: IMAGE, cpus: 2, memory: 2G, gpus: 2, compute: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"]}
"""
UP_TIMEOUT_S = 5400.0
OPEN_BOTH = "for n in 0 1; do : < /dev/nvidia$n && echo open $n; done; true"
TAKE = "python3 -c 'bytearray(SIZE << 20); print(\"took SIZE\")'"


@pytest.fixture(scope="module", params=["debian13", "sid"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann") as keys:
        text = SPEC.replace("KEYS", str(keys)).replace("IMAGE", request.param)
        with running(tmp_path_factory.mktemp("tree"), text, timeout=UP_TIMEOUT_S) as made:
            yield made


@pytest.fixture
def ann(cluster: Cluster) -> User:
    return User(cluster, "ann")


def test_jobs_are_confined_by_cgroup_v2(cluster: Cluster, ann: User) -> None:
    assert cluster.on("controller", "stat", "-fc", "%T", "/sys/fs/cgroup") == "cgroup2fs\n"
    assert "/opt/shoal/slurm-" in cluster.on("controller", "sh", "-c", "readlink -f /proc/$(pgrep -x slurmd)/exe")
    assert "slurmstepd.scope/job_" in ann.do("srun cat /proc/self/cgroup")
    seen = ann.do(f"srun --gpus=1 bash -c 'exec 2>&1; id -u; {OPEN_BOTH}'")
    assert seen.split()[0] == "2001" and "open 0" in seen and "open 1" not in seen, seen


def test_memory_of_a_job_is_limited(ann: User) -> None:
    fits, exceeds = (TAKE.replace("SIZE", size) for size in ("20", "300"))
    assert "took 20" in ann.do(f"srun --mem=100M {fits}")
    assert "took" not in ann.do(f"srun --mem=100M {exceeds} 2>&1 || true")


def test_cancelled_job_leaves_no_process(cluster: Cluster, ann: User) -> None:
    job = ann.do("sbatch --parsable --output=/dev/null --wrap 'setsid sleep 9999 & sleep 9999'").strip()
    left = ("pgrep", "-u", "ann", "-x", "sleep")
    cluster.wait("it runs", lambda: len(cluster.on("controller", *left, status=None).split()) == 2)
    ann.do(f"scancel {job}")
    cluster.wait("nothing is left", lambda: cluster.on("controller", *left, status=None) == "")
