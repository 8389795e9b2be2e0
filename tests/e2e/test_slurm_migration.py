"""From packages to `slurm: {from: shoal}` and back, under running jobs where Slurm allows it."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.e2e.cluster import ON_DEBIAN_12, Cluster, taken_down

from shoal.roles.slurm_tree import find_trees

COVERS = "roles/slurm_source roles/slurm_tree remote/slurm_tree.sh plan/slurm_downtime"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.matrix,  # two minutes
    pytest.mark.timeout(900),
    ON_DEBIAN_12,
    pytest.mark.skipif(not find_trees(), reason="no Slurm in the cache: build it with scripts/build-slurm"),
]

SPEC = """\
cluster: {name}
controller: {{provider: sandbox, memory: 1G, image: {image}}}
nodesets:
  lab: {{provider: sandbox, count: 1, memory: 1G, image: {image}}}
storage:
  /data: {{kind: nfs, path: /shared/data}}
accounting: true
users:
  ann: {{uid: 2001}}
"""
WAIT = "until [ -e /data/{0} ]; do sleep 0.2; done; srun touch /data/{0}-ended"


@contextmanager
def packaged_cluster(directory: Path, name: str, image: str) -> Iterator[Cluster]:
    cluster = Cluster(directory, SPEC.format(name=name, image=image))
    with taken_down(cluster):
        assert cluster.json("up")["whole"]
        yield cluster


def submit(cluster: Cluster, word: str) -> str:
    """A job of an ordinary user that runs until the test says so, and then starts a step."""
    line = f"cd /tmp && sbatch --parsable --mem=20M --output=/dev/null --wrap '{WAIT.format(word)}'"
    job = as_ann(cluster, line).strip()
    cluster.wait("the job runs", lambda: state(cluster, job) == "RUNNING")
    return job


def as_ann(cluster: Cluster, line: str) -> str:
    return cluster.on("controller", "runuser", "-u", "ann", "--", "sh", "-c", line)


def state(cluster: Cluster, job: str) -> str:
    return as_ann(cluster, f"sacct -X -n -P -j {job} -o state").strip()


def finish(cluster: Cluster, word: str, job: str) -> None:
    assert state(cluster, job) == "RUNNING"
    as_ann(cluster, f"touch /data/{word}")
    cluster.wait("the job ends", lambda: state(cluster, job) != "RUNNING")
    assert state(cluster, job) == "COMPLETED"
    assert as_ann(cluster, f"ls /data/{word}-ended")


def programs(cluster: Cluster) -> set[str]:
    """The directories that Slurm's daemons run from."""
    exe = "for pid in $(pgrep -x 'slurmd|slurmctld|slurmdbd'); do readlink /proc/$pid/exe; done"
    paths = {path for host in ("controller", "lab1") for path in cluster.on(host, "sh", "-c", exe).split()}
    return {path.rpartition("/")[0] for path in paths}


def test_cluster_moves_to_the_tree_and_back_under_running_jobs(tmp_path: Path) -> None:
    [tree] = find_trees().values()
    with packaged_cluster(tmp_path, "x-move", "debian13") as cluster:
        first = submit(cluster, "first")
        text = cluster.file.read_text()
        cluster.file.write_text(text + "slurm: {from: shoal}\n")
        assert cluster.json("plan")["loses"] == []
        assert cluster.json("up")["whole"]
        assert programs(cluster) == {f"{tree.prefix}/sbin"}
        assert cluster.json("up")["unchanged"]
        finish(cluster, "first", first)  # its slurmstepd is that of the package, and signs with munge
        cluster.wait("no job is left", lambda: cluster.on("controller", "squeue", "-h") == "")
        assert cluster.json("up")["whole"]
        assert "munge" not in cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
        assert cluster.on("lab1", "systemctl", "is-active", "munge", status=3) == "inactive\n"
        assert cluster.json("up")["unchanged"]

        second = submit(cluster, "second")
        cluster.file.write_text(text)
        assert f"this change would end jobs ({second})" in cluster.shoal("up", status=1).stderr
        cluster.file.write_text(text + "auth: slurm\n")
        assert cluster.json("plan")["loses"] == []
        assert cluster.json("up")["whole"]
        assert programs(cluster) == {"/usr/sbin"}
        assert cluster.on("lab1", "sh", "-c", "ls -d /opt/shoal/slurm-*").split() == [tree.prefix]  # the job's
        assert cluster.on("controller", "sh", "-c", "command -v srun") == "/usr/bin/srun\n"
        finish(cluster, "second", second)
        cluster.wait("no job is left", lambda: cluster.on("controller", "squeue", "-h") == "")
        assert cluster.json("up")["whole"]
        assert cluster.on("lab1", "sh", "-c", "ls /opt/shoal") == ""
        assert cluster.json("up")["unchanged"]
        listed = cluster.on("controller", "sacct", "-X", "-n", "-P", "-o", "jobid,state").split()
        assert {f"{first}|COMPLETED", f"{second}|COMPLETED"} <= {*listed}


def test_records_that_the_tree_cannot_read_stay_beside(tmp_path: Path) -> None:
    [tree] = find_trees().values()
    with packaged_cluster(tmp_path, "x-anew", "debian12") as cluster:
        job = submit(cluster, "only")
        cluster.file.write_text(cluster.file.read_text() + "slurm: {from: shoal}\n")
        output = cluster.shoal("up", status=1).stderr
        assert "cannot read what Slurm 22.05.8 wrote" in output and "--leave-records" in output
        output = cluster.shoal("up", "--leave-records", status=1).stderr
        assert f"this change would end jobs ({job})" in output
        finish(cluster, "only", job)
        cluster.wait("no job is left", lambda: cluster.on("controller", "squeue", "-h") == "")
        assert cluster.json("up", "--leave-records")["whole"]
        assert programs(cluster) == {f"{tree.prefix}/sbin"}
        assert cluster.on("controller", "srun", "--mem=20M", "hostname") == "lab1\n"
        kept = "SELECT COUNT(*) FROM slurm_acct_db_slurm_22_05.\\`x-anew_job_table\\`"
        assert int(cluster.on("controller", "sh", "-c", f'mariadb -N -e "{kept}"')) == 1
        assert cluster.on("controller", "ls", "/var/lib/slurm/slurmctld.slurm-22.05") != ""
        assert cluster.json("up")["unchanged"]
