"""Docker in jobs with cgroup v2, on one virtual machine that is controller and node:

SHOAL_TEST_KIND=vm .venv/bin/pytest -v -n0 -m matrix tests/e2e/test_job_engines_vm.py
"""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import VM_BY_HAND, Cluster, login_keys, running
from tests.e2e.test_job_engines import MAKE_ROOT, do, job, start

from shoal.roles.job_engines import STORE

COVERS = "roles/job_engines remote/docker_guard"
pytestmark = VM_BY_HAND
SPEC = """\
cluster: st-engines-vm
controller: {provider: sandbox, cpus: 2, memory: 3G, gpus: 2, compute: true}
users:
  ann: {uid: 2001, keys: ["file:KEYS/ann.pub"], docker: true}
containers: {docker: true}
"""
UP_TIMEOUT_S = 5400.0
SCOPE = "/system.slice/controller_slurmstepd.scope"
GROUPS = "/sys/fs/cgroup"
ASK = """\
mkdir -p GROUP && echo $$ > GROUP/cgroup.procs && exec setpriv --reuid ann --regid ann --init-groups docker ps
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with login_keys("ann") as keys:
        text = SPEC.replace("KEYS", str(keys))
        with running(tmp_path_factory.mktemp("engines"), text, timeout=UP_TIMEOUT_S) as made:
            # The sandbox covers this file, and the kernel then lets no user namespace have a /proc of its own.
            made.on("controller", "umount", "/proc/sys/kernel/random/boot_id")
            made.on("controller", "sh", "-c", MAKE_ROOT)
            yield made


def test_container_is_in_the_cgroup_of_the_job(cluster: Cluster) -> None:
    assert cluster.on("controller", "stat", "-fc", "%T", GROUPS) == "cgroup2fs\n"
    job(cluster, "docker import /shared/mini.tar mini")
    begin = "id=$(docker run -d mini sleep 600); cat /proc/$(docker inspect -f '{{.State.Pid}}' $id)/cgroup"
    seen = job(cluster, f"{begin}; echo $SLURM_JOB_ID")
    assert seen.split()[0].startswith(f"0::{SCOPE}/job_{seen.split()[1]}/"), seen
    assert job(cluster, "docker run --rm mini cat /proc/self/cgroup") == "0::/\n"


def test_limits_of_the_job_hold_in_a_container(cluster: Cluster) -> None:
    take = "docker run --rm mini sh -c 'head -c SIZE /dev/zero | tail > /dev/null && echo took SIZE'"
    fits, exceeds = (take.replace("SIZE", size) for size in ("20M", "200M"))
    assert "took 20M" in do(cluster, f'srun -Q --mem=100M sh -c "{fits}"')
    assert "took" not in do(cluster, f'srun -Q --mem=100M sh -c "{exceeds}"', status=None)


def test_ways_out_of_the_job_are_rejected(cluster: Cluster) -> None:
    rejected = {
        "--cgroup-parent /": "--cgroup-parent is not available in jobs",
        "--cgroupns host": "CgroupnsMode is not available in jobs",
        "--privileged": "--privileged is not available in jobs",
        f"-v {GROUPS}:/x": f"cannot mount {GROUPS}: it is not yours",
    }
    seen = job(cluster, "; ".join(f"docker run --rm {option} mini id" for option in rejected) + "; true")
    assert all(message in seen for message in rejected.values()) and "uid=" not in seen


def test_job_of_a_process_is_that_of_slurms_own_group(cluster: Cluster) -> None:
    number = start(cluster, "docker run -d --name mine mini sleep 600")

    def ask(group: str) -> str:
        said = cluster.on("controller", "sh", "-c", f"{{ {ASK.replace('GROUP', GROUPS + group)} }} 2>&1", status=None)
        cluster.on("controller", "rmdir", GROUPS + group)
        return said

    [own] = cluster.on(
        "controller", "sh", "-c", f"cd {GROUPS} && ls -d .{SCOPE}/job_{number}/step_batch/user/task_0"
    ).split()
    assert "mine" in ask(f"{own[1:]}/below")
    outside = "docker works inside a job of Slurm only"
    assert outside in ask(f"/user.slice{SCOPE}/job_{number}")
    assert outside in ask(f"/system.slice/other.scope/job_{number}")
    do(cluster, f"scancel {number}")


def test_devices_of_an_image_do_not_open(cluster: Cluster) -> None:
    """The root is an overlay of the kernel here, and a volume a directory of the node's disk."""
    run = "docker run -d -v $PWD:/x {} mini sleep 888 | xargs docker inspect -f '{{{{.State.Pid}}}}' >> /tmp/pids"
    runs = "; ".join(run.format(volume) for volume in ("", "-v named:/devices"))
    number = start(cluster, f"cd $(mktemp -d); chmod 755 .; {runs}; docker info -f '{{{{.Driver}}}}'")
    assert "overlay2" in cluster.on("controller", "cat", "/shared/ann.out")
    pids = cluster.on("controller", "cat", "/tmp/pids").split()
    assert len(pids) == 2
    for pid in pids:
        path = f"/proc/{pid}/root/devices/zero"
        assert cluster.on("controller", "stat", "-c", "%F %a", path) == "character special file 666\n"
        assert "Permission denied" in do(cluster, f"head -c 1 {path}", status=1)
    do(cluster, f"scancel {number}")


def test_nothing_survives_the_end_of_the_job(cluster: Cluster) -> None:
    number = start(cluster, "docker run -d --name left mini sleep 4711")
    assert "4711" in cluster.on("controller", "pgrep", "-af", "^sleep 4711")
    do(cluster, f"scancel {number}")
    cluster.wait(
        "nothing is left", lambda: cluster.on("controller", "pgrep", "-f", "^sleep 4711", status=None) == "", 120
    )
    cluster.wait("the node is idle", lambda: cluster.states()["controller"] == {"IDLE"}, 120)
    assert cluster.on("controller", "sh", "-c", f"ls -d {GROUPS}{SCOPE}/job_{number}", status=None) == ""
    assert cluster.on("controller", "sh", "-c", f"mount | grep {STORE}/", status=None) == ""
    assert "left" not in job(cluster, "docker ps -a")
