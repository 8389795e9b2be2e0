"""Accounting on a host that is not the controller: its records, what happens when that host fails, and when the file of
another cluster names it, which needs it for a share and WireGuard as well."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import LIMIT, Cluster, running

COVERS = "roles/accounting slurm/accounting plan/ownership remote/database.sh"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix]

SPEC = """\
cluster: ac-elsewhere
controller: {provider: sandbox, memory: 1G}
login: {provider: sandbox, count: 1, memory: 1G}
nodesets:
  gpu: {provider: sandbox, count: 1, gpus: 2, memory: 512M, price: 3600}
accounting:
  host: login1
  accounts:
    lab: {users: [ann], qos: [normal, fast]}
  qos:
    fast: {priority: 10}
users:
  ann: {uid: 2001}
"""
NEEDED = """\
cluster: ac-needed
network: {kind: wireguard, hub: login1}
controller: {provider: sandbox, memory: 1G}
login: {provider: sandbox, count: 1, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 2, memory: 1G}
storage:
  /data: {kind: sshfs, host: login1}
accounting: {host: login1}
users:
  ann: {uid: 2001}
"""
CONTROLLER, BOOKS, BACKUPS = "controller", "login1", "/var/backups/shoal"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("elsewhere"), SPEC) as made:
        yield made


def sbatch(cluster: Cluster, *options: str) -> str:
    line = ("sbatch", "--parsable", "--chdir=/tmp", "--mem=20M", "--output=/dev/null", *options, "--wrap", "sleep 1")
    return cluster.on(CONTROLLER, "runuser", "-u", "ann", "--", *line).strip()


def state_of(cluster: Cluster, job: str) -> str:
    return cluster.ssh(CONTROLLER, f"timeout 30 sacct -X -n -P -j {job} -o state").stdout.strip()


def test_controller_reports_records_of_the_database_host(cluster: Cluster) -> None:
    job = sbatch(cluster, "--gpus-per-node=1")
    cluster.wait("its record", lambda: state_of(cluster, job) == "COMPLETED")
    # Asked for a period, slurmdbd may tell of a job a second later than when asked for that job.
    cluster.wait("its use", lambda: bool(cluster.json("usage", "--by", "user")["rows"]))
    [row] = cluster.json("usage", "--by", "user")["rows"]
    assert row["name"] == "ann" and row["gpu_hours"] > 0 and row["cost"] > 0
    assert cluster.json("up")["unchanged"]


def test_qos_of_a_pending_job_is_removed_only_after_the_job_ends(cluster: Cluster) -> None:
    job = sbatch(cluster, "--qos=fast", "--begin=now+1hour")
    cluster.edit(
        "    lab: {users: [ann], qos: [normal, fast]}\n  qos:\n    fast: {priority: 10}\n", "    lab: {users: [ann]}\n"
    )
    assert "run accounts, users and limits" in cluster.shoal("plan").stdout
    refused = cluster.shoal("up", status=3).stdout
    assert f"the QOS fast has jobs: {job}. Wait for them, or end them with scancel" in refused
    assert "fast" in cluster.on(BOOKS, "sacctmgr", "-nP", "show", "qos", "format=name").split()
    cluster.on(CONTROLLER, "scancel", job)
    cluster.shoal("up")
    assert cluster.on(BOOKS, "sacctmgr", "-nP", "show", "qos", "format=name").split() == ["normal"]


def test_full_backup_disk_blocks_account_changes_and_is_reported_by_check(cluster: Cluster) -> None:
    fill = f"mount -t tmpfs -o size=4k,mode=0700 none {BACKUPS} && head -c 4096 /dev/zero > {BACKUPS}/full"
    cluster.on(BOOKS, "sh", "-c", fill)
    cluster.edit("lab: {users: [ann]}", "lab: {users: [ann], max_jobs: 3}")
    refused = cluster.shoal("up", status=3).stdout
    assert "cannot make a backup, so nothing was changed" in refused and "No space left on device" in refused
    assert "Traceback" not in refused
    cluster.on(BOOKS, "systemctl", "start", "shoal-backup", status=None)
    assert "the accounting database was not backed up last night" in cluster.shoal("check").stdout
    cluster.on(BOOKS, "umount", BACKUPS)
    cluster.shoal("up")
    cluster.on(BOOKS, "systemctl", "start", "shoal-backup")
    assert "not backed up" not in cluster.shoal("check").stdout


def test_dump_of_another_cluster_is_rejected_and_replaces_no_records(cluster: Cluster) -> None:
    newest = cluster.json("restore")["backups"][0]["name"]
    alien = "slurm_acct_db-20200101T000000Z-alien.sql.gz"
    rename = f"cd {BACKUPS} && gzip -dc {newest} | sed s/ac-elsewhere_/ac-other_/g | gzip > {alien}"
    cluster.on(BOOKS, "sh", "-c", rename)
    refused = cluster.shoal("restore", alien, "--yes", status=1).stderr
    assert "has no records of the cluster ac-elsewhere" in refused and "the records are unchanged" in refused
    assert cluster.json("usage", "--by", "user")["rows"]


def test_jobs_run_and_records_are_kept_while_the_database_host_is_down(cluster: Cluster) -> None:
    cluster.fault("freeze", BOOKS)
    job = sbatch(cluster)
    refused = cluster.shoal("usage", status=None).stderr
    assert "slurmdbd on login1 does not answer" in refused
    assert "login1" in cluster.shoal("status", status=None).stdout
    cluster.fault("thaw", BOOKS)
    cluster.wait("its record", lambda: state_of(cluster, job) == "COMPLETED")
    cluster.fault("reboot", BOOKS)
    other = sbatch(cluster)
    cluster.wait("a record after the reboot", lambda: state_of(cluster, other) == "COMPLETED")


@pytest.fixture
def needed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster that a test takes a host away from."""
    with running(tmp_path_factory.mktemp("needed"), NEEDED) as made:
        yield made


def test_host_that_the_cluster_needs_is_taken_over_only_from_a_dead_controller(needed: Cluster, tmp_path: Path) -> None:
    cluster = needed
    target = cluster.instances()[BOOKS]
    entry = f"{{name: {BOOKS}, address: {target.address}}}, user: root, identity: {target.identity}"
    reach = "storage:\n  /data: {kind: sshfs}\naccounting: true\nnetwork: wireguard\n"
    other = Cluster(tmp_path, f"cluster: ac-other\ncontroller: {{host: {entry}, compute: true}}\n{reach}")
    job = sbatch(cluster, "--begin=now")
    cluster.wait("its record", lambda: state_of(cluster, job) == "COMPLETED")
    needs = f"{BOOKS}: has the hub of its network, the share /data, the accounting database of cluster"
    for words in (("check",), ("plan", "--take-over"), ("up", "--take-over")):
        done = other.shoal(*words, status=1)
        assert needs in " ".join((done.stdout + done.stderr).split()), done
    assert cluster.json("up")["unchanged"]
    cluster.on(CONTROLLER, "systemctl", "stop", "slurmctld")
    planned = " ".join(other.shoal("plan", "--take-over").stdout.split())
    assert "its controller does not answer: jobs may run there, and it loses the hub of its network" in planned
    assert other.json("up", "--take-over", timeout=LIMIT)["whole"]
    try:
        assert other.on(BOOKS, "srun", "hostname").strip() == BOOKS
        assert "-last.sql.gz" in other.on(BOOKS, "ls", BACKUPS), "the records of the other cluster are kept"
        assert other.json("up")["unchanged"]
        assert f"{BOOKS}: is the controller of cluster ac-other" in cluster.shoal("up", status=1).stderr
    finally:
        other.shoal("down", "--yes")
