"""Jobs in images with cgroup v2, on one virtual machine that is controller and node:

    SHOAL_TEST_KIND=vm .venv/bin/pytest -v -n0 tests/e2e/test_image_vm.py

The image is a directory: under emulation, unpacking one takes minutes.
"""

import re
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import VM_BY_HAND, Cluster, login_keys, running
from tests.e2e.image_files import write_root
from tests.e2e.image_users import User, lines, shared

COVERS = "containers roles/containers remote/runner"
pytestmark = VM_BY_HAND
SPEC = """\
cluster: st-image-vm
controller: {provider: sandbox, cpus: 2, memory: 2G, gpus: 2, compute: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"]}
containers: oci
"""
UP_TIMEOUT_S = 5400.0


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann") as keys:
        text = SPEC.replace("KEYS", str(keys))
        with running(tmp_path_factory.mktemp("images"), text, timeout=UP_TIMEOUT_S) as made:
            write_root(shared(made) / "root")
            yield made


@pytest.fixture(scope="module")
def ann(cluster: Cluster) -> User:
    return User(cluster, "ann")


def test_job_runs_in_an_image_as_its_user(ann: User, cluster: Cluster) -> None:
    assert cluster.on("controller", "stat", "-fc", "%T", "/sys/fs/cgroup") == "cgroup2fs\n"
    [words] = lines(ann.run("--image /shared/root --export GREETING=hello"))
    assert words[:3] == ["0", "1", "0"] and words[4:7] == ["hello", "2001", "root"]


def test_limits_of_the_job_hold_in_an_image(ann: User) -> None:
    seen = ann.run("--gpus-per-node 1 --mem 250M --image /shared/root", "limits.py 100")
    assert re.findall(r"(?:opened|denied) \d", seen) == ["opened 0", "denied 1"]
    assert f"took {100 << 20}" in seen
    seen = ann.run("--mem 60M --image /shared/root", "limits.py 150", status=1)
    assert re.findall(r"(?:opened|denied) \d", seen) == ["denied 0", "denied 1"]
    assert "took" not in seen and "the memory was used up" in seen


def test_running_container_is_entered_and_cancel_leaves_nothing(ann: User, cluster: Cluster) -> None:
    job = ann.start("--image /shared/root", "wait.py")
    group = cluster.on("controller", "sh", "-c", "cat /proc/$(pgrep -x -f 'python3 wait.py')/cgroup")
    assert f"/job_{job}/" in group
    assert ann.do(f"shoal exec --job {job} -- sh -c 'cat /mark; id -u'").split()[-2:] == ["root", "2001"]
    ann.do(f"shoal cancel {job}")
    left = ("pgrep", "-u", "ann", "python3|sleep")
    cluster.wait("nothing is left", lambda: cluster.on("controller", *left, status=None) == "")
