"""`auth: slurm` on Debian 13: a running cluster switches to it and rotates its keys while jobs run."""

from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster, kill, running

COVERS = "roles/auth plan/rotation_slurm verbs/keys"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

SPEC = """\
cluster: ac-auth
controller: {provider: sandbox, memory: 1G, image: debian13}
login: {provider: sandbox, count: 1, memory: 512M, image: debian13}
nodesets:
  gpu: {provider: sandbox, count: 2, memory: 512M, image: debian13}
accounting: true
"""
AUTH = "auth: slurm\n"
CONTROLLER, LOGIN, NODES = "controller", "login1", ("gpu1", "gpu2")
KEY = "/etc/shoal/slurm.key"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("auth"), SPEC) as made:
        yield made


def state_of(cluster: Cluster, job: str) -> str:
    done = cluster.ssh(CONTROLLER, f"sacct -X -n -P -j {job} -o state")
    return done.stdout.strip()


def start(cluster: Cluster, name: str) -> str:
    """A job on both nodes that waits for a word."""
    wait = f"while [ ! -e /tmp/{name} ]; do sleep 0.2; done"
    arguments = ("sbatch", "--parsable", "-N2", "--mem=20M", "--output=/dev/null", "--wrap", wait)
    job = cluster.on(CONTROLLER, *arguments).strip()
    cluster.wait("it runs", lambda: state_of(cluster, job) == "RUNNING")
    return job


def release(cluster: Cluster, name: str, job: str) -> None:
    for node in NODES:
        cluster.on(node, "touch", f"/tmp/{name}")
    cluster.wait(f"job {job} ends well", lambda: state_of(cluster, job) == "COMPLETED", seconds=240)


def digests(cluster: Cluster) -> set[str]:
    return {cluster.on(host, "sha256sum", KEY).split()[0] for host in (CONTROLLER, LOGIN, *NODES)}


def everybody_is_heard(cluster: Cluster) -> None:
    for host in (CONTROLLER, LOGIN, *NODES):
        assert set(cluster.on(host, "srun", "-N2", "--mem=20M", "hostname").split()) == set(NODES)


def test_running_cluster_changes_to_auth_slurm_without_losing_a_job(cluster: Cluster) -> None:
    job = start(cluster, "first")
    cluster.file.write_text(cluster.file.read_text() + AUTH)
    assert cluster.json("plan")["loses"] == []
    assert cluster.json("up")["whole"]
    assert "auth/slurm" in cluster.on(CONTROLLER, "sh", "-c", "scontrol show config | grep ^AuthType")
    assert cluster.json("up")["unchanged"]
    everybody_is_heard(cluster)
    release(cluster, "first", job)


def test_slurm_key_rotates_while_a_job_runs(cluster: Cluster) -> None:
    job, [before] = start(cluster, "second"), digests(cluster)
    [report] = cluster.json("keys", "rotate", "slurm")["rotated"]
    print(f"auth/slurm rotated: Slurm failed for {report['failed_seconds']} s of {report['asked']} questions")
    assert set(report["hosts"]) == {CONTROLLER, LOGIN, *NODES}
    assert len(digests(cluster)) == 1 and before not in digests(cluster)
    everybody_is_heard(cluster)
    release(cluster, "second", job)
    assert cluster.json("up")["unchanged"]


def test_killed_rotation_keeps_the_cluster_working_and_is_finished_by_the_next(cluster: Cluster) -> None:
    job, [before] = start(cluster, "third"), digests(cluster)
    rotating = cluster.background("keys", "rotate", "slurm")
    cluster.wait("it has begun", lambda: cluster.ssh("gpu1", f"test -e {KEY}.next").returncode == 0)
    kill(rotating)
    everybody_is_heard(cluster)
    cluster.json("up")
    everybody_is_heard(cluster)
    [report] = cluster.json("keys", "rotate", "slurm")["rotated"]
    assert report["finished"]
    assert len(digests(cluster)) == 1 and before not in digests(cluster)
    release(cluster, "third", job)


def test_return_to_munge_is_rejected_while_a_job_runs(cluster: Cluster) -> None:
    job = start(cluster, "fourth")
    cluster.edit(AUTH, "")
    assert "would end jobs" in cluster.shoal("up", status=1).stderr
    cluster.file.write_text(cluster.file.read_text() + AUTH)
    release(cluster, "fourth", job)
    cluster.edit(AUTH, "")
    assert cluster.json("up")["whole"]
    assert cluster.ssh("gpu1", "test -e /etc/slurm/slurm.jwks").returncode != 0
    everybody_is_heard(cluster)
