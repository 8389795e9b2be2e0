"""Accounting and keys on real hosts: records after a lost database, limits, backups, key rotation."""

import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import ROOT, commands
from tests.e2e.cluster import LIMIT, Cluster, kill, running

COVERS = (
    "roles/accounting slurm/accounting slurm/usage verbs/keys verbs/restore verbs/usage plan/rotation "
    "remote/database.sh remote/keep_records.sh"
)
pytestmark = pytest.mark.sandbox

SPEC = """\
cluster: ac-books
controller: {provider: sandbox, memory: 1G}
nodesets:
  gpu: {provider: sandbox, count: 1, gpus: 2, memory: 512M, price: 3600}
accounting:
  accounts:
    lab: {users: [ann, bob], group_gpus: 2}
    bio: {parent: lab, users: {cat: {max_gpus: 1}}}
  qos:
    fast: {priority: 10, max_time: 60}
"""
ACCOUNTS = "accounting:" + SPEC.split("accounting:")[1]
CONTROLLER, NODE = "controller", "gpu1"
KEY = "/etc/munge/munge.key"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("books"), SPEC) as made:
        yield made


def sbatch(cluster: Cluster, script: str, *options: str) -> str:
    arguments = ("sbatch", "--parsable", "--mem=20M", "--output=/dev/null", *options, "--wrap", script)
    return cluster.on(CONTROLLER, *arguments).strip()


def recorded(cluster: Cluster) -> dict[str, str]:
    """The state of every job that slurmdbd knows; nothing while it does not answer."""
    done = cluster.ssh(CONTROLLER, "timeout 30 sacct -a -X -n -P -o jobid,state")
    return dict(line.split("|")[:2] for line in done.stdout.splitlines() if "|" in line) if not done.returncode else {}


def wait_for_records(cluster: Cluster, jobs: list[str], state: str = "COMPLETED") -> None:
    def there() -> bool:
        states = recorded(cluster)
        return all(states.get(job) == state for job in jobs)

    cluster.wait(f"records of {', '.join(jobs)}", there, seconds=240)


def associations(cluster: Cluster) -> set[str]:
    arguments = ("sacctmgr", "-n", "-P", "show", "assoc", "wopl", "format=account,user,grptres,maxtres")
    return set(cluster.on(CONTROLLER, *arguments).split())


def digests(cluster: Cluster) -> set[str]:
    return {cluster.on(host, "sha256sum", KEY).split()[0] for host in (CONTROLLER, NODE)}


def connects(host: str, port: int) -> bool:
    try:
        socket.create_connection((host, port), timeout=3).close()
    except OSError:
        return False
    return True


# ---- accounts and limits


def test_second_up_has_no_changes(cluster: Cluster) -> None:
    assert cluster.json("up")["unchanged"]


def test_accounts_and_qos_follow_the_spec_after_a_backup(cluster: Cluster) -> None:
    """The partition's QOS is new: slurmctld would not start with a partition whose QOS is missing."""
    made = {"lab||gres/gpu=2|", "lab|ann||", "lab|bob||", "bio|||", "bio|cat||gres/gpu=1"}
    assert made <= associations(cluster)
    cluster.on(CONTROLLER, "sacctmgr", "-i", "add", "account", "theirs")
    backups = len(cluster.json("restore")["backups"])
    options = "Flags: DenyOnLimit, UsageFactor: 0.5, GrpWall: 90, GraceTime: 30, Preempt: fast, MaxTRESPerUser: mem=64G"
    before = cluster.file.read_text()
    night = f"    night: {{options: {{{options}}}}}\n"
    partition = "partitions: {main: {nodesets: ALL, options: {QOS: night, AllowAccounts: 'root,lab'}}}\n"
    shown = ("sacctmgr", "-nP", "show", "qos", "night", "format=flags,usagefactor,grpwall,gracetime,preempt,maxtrespu")
    try:
        fewer = before.replace("[ann, bob], group_gpus: 2", "[ann], group_gpus: 1")
        cluster.file.write_text(fewer + night + partition)
        assert cluster.json("up")["changed"] == [CONTROLLER]
        assert {"lab||gres/gpu=1|", "lab|ann||", "theirs|||"} <= associations(cluster)
        assert not any("bob" in line for line in associations(cluster))
        assert len(cluster.json("restore")["backups"]) == backups + 1
        assert cluster.on(CONTROLLER, *shown) == "DenyOnLimit|0.500000|01:30:00|00:00:30|fast|mem=64G\n"
        assert "QoS=night" in cluster.on(CONTROLLER, "scontrol", "show", "partition", "main")
        assert cluster.json("up")["unchanged"]
        cluster.file.write_text(before + "    night: {}\n")
        assert cluster.json("up")["changed"] == [CONTROLLER]
        assert made <= associations(cluster)
        assert cluster.on(CONTROLLER, *shown) == "|1.000000||00:00:00||\n"
    finally:
        cluster.file.write_text(before)
    assert cluster.json("up")["whole"]


def test_user_without_an_account_cannot_submit(cluster: Cluster) -> None:
    cluster.on(CONTROLLER, "useradd", "--create-home", "eve")
    report = cluster.ssh(CONTROLLER, "su eve -c 'cd /tmp && sbatch --wrap true'")
    assert report.returncode != 0 and "Invalid account" in report.stderr


# ---- use


def test_usage_reports_gpu_hours_and_cost(cluster: Cluster) -> None:
    job = sbatch(cluster, "sleep 3", "--gres=gpu:2", "--job-name=a | b")
    wait_for_records(cluster, [job])
    [row] = [row for row in cluster.json("usage", "--by", "job")["rows"] if row["name"] == job]
    assert row["detail"] == "root: a | b"
    # 3600 an hour is one a second, for each of two GPUs.
    assert row["cost"] == pytest.approx(row["gpu_hours"] * 3600)
    assert row["cost"] >= 2 * 2
    for by, name in (("account", "root"), ("nodeset", "gpu")):
        report = cluster.json("usage", "--by", by, "--since", "1d")
        assert [entry["gpu_hours"] >= row["gpu_hours"] for entry in report["rows"] if entry["name"] == name] == [True]
    assert cluster.json("usage", "--until", "1w", "--since", "2w")["rows"] == []


def test_jobs_all_lists_ended_jobs_while_slurmdbd_is_stopped(cluster: Cluster) -> None:
    job = sbatch(cluster, "exit 3")
    wait_for_records(cluster, [job], "FAILED")
    cluster.on(CONTROLLER, "systemctl", "restart", "slurmctld")
    cluster.on(CONTROLLER, "systemctl", "stop", "slurmdbd")
    # It may end of that if it was about to start; it tries again then, and goes by what it has saved.
    cluster.wait("slurmctld answers", lambda: cluster.ssh(CONTROLLER, "scontrol ping").returncode == 0)
    try:
        records = {entry["record"]["id"]: entry["record"] for entry in cluster.json("jobs", "--all")["jobs"]}
    finally:
        cluster.on(CONTROLLER, "systemctl", "start", "slurmdbd")
    assert (records[job]["state"], records[job]["exit_code"]) == ("FAILED", 3)


# ---- the database is lost and found


def test_no_record_is_lost_while_mariadb_is_down(cluster: Cluster) -> None:
    running_before = sbatch(cluster, "sleep 5")
    cluster.ssh(CONTROLLER, "systemctl mask --runtime mariadb; kill -9 $(pidof mariadbd)")
    try:
        jobs = [sbatch(cluster, "true") for _ in range(5)]
        cluster.wait("they end", lambda: not cluster.on(CONTROLLER, "squeue", "-h").strip())
        assert cluster.ssh(CONTROLLER, "pidof mariadbd").returncode != 0
    finally:
        cluster.ssh(CONTROLLER, "systemctl unmask --runtime mariadb; systemctl start mariadb")
    wait_for_records(cluster, [running_before, *jobs])


def test_restore_loads_a_backup_and_can_be_undone(cluster: Cluster) -> None:
    job = sbatch(cluster, "true")
    wait_for_records(cluster, [job])
    oldest = cluster.json("restore")["backups"][-1]["name"]
    refused = cluster.shoal("restore", oldest, status=2)
    assert "use --yes" in refused.stderr
    assert "there is no backup 'none.sql.gz'" in cluster.shoal("restore", "none.sql.gz", "--yes", status=2).stderr
    half = "slurm_acct_db-20200101T000000Z-half.sql.gz"
    cut = f"umask 077 && cd /var/backups/shoal && gzip -dc {oldest} | head -n 40 | gzip > {half}"
    cluster.on(CONTROLLER, "sh", "-c", cut)
    broken = cluster.shoal("restore", half, "--yes", status=1).stderr
    assert "breaks off before its end" in broken and "the records are unchanged" in broken
    assert job in recorded(cluster)
    restored = cluster.json("restore", oldest, "--yes")
    assert job not in recorded(cluster)
    assert cluster.json("restore", restored["before"], "--yes")["restored"] == restored["before"]
    wait_for_records(cluster, [job])
    modes = cluster.on(CONTROLLER, "sh", "-c", "stat -c '%a %U' /var/backups/shoal /var/backups/shoal/*.gz").split("\n")
    assert set(filter(None, modes)) == {"700 root", "600 root"}


BOOTED = "slurmctld slurmdbd mariadb shoal-backup.timer shoal-firewall"


def test_services_start_at_boot(cluster: Cluster) -> None:
    assert set(cluster.on(CONTROLLER, "sh", "-c", f"systemctl is-enabled {BOOTED}").split()) == {"enabled"}


@pytest.mark.matrix  # tests/e2e/test_cluster.py reboots a controller daily
def test_cluster_recovers_after_a_controller_reboot(cluster: Cluster) -> None:
    wait_for_records(cluster, [sbatch(cluster, "true")])
    before = recorded(cluster)
    cluster.fault("reboot", CONTROLLER)
    cluster.wait("records", lambda: before.items() <= recorded(cluster).items(), seconds=240)
    ready = f"systemctl is-active {BOOTED} && sinfo -h -t idle -o %n"
    cluster.wait("the node", lambda: NODE in cluster.ssh(CONTROLLER, ready).stdout, seconds=240)
    wait_for_records(cluster, [sbatch(cluster, "true")])


# ---- keys


def test_munge_key_rotation_does_not_disturb_a_running_job(cluster: Cluster) -> None:
    job = sbatch(cluster, "while [ ! -e /tmp/release ]; do sleep 0.2; done")
    cluster.wait("it runs", lambda: cluster.on(CONTROLLER, "squeue", "-h", "-j", job, "-o", "%T").strip() == "RUNNING")
    before = digests(cluster)
    [report] = cluster.json("keys", "rotate", "munge")["rotated"]
    assert (report["hosts"], report["finished"]) == ([CONTROLLER, NODE], False)
    assert report["asked"] > 0 and set(report["failed_by_host"]) == {CONTROLLER, NODE}
    assert len(digests(cluster)) == 1 and digests(cluster) != before
    cluster.on(NODE, "touch", "/tmp/release")
    wait_for_records(cluster, [job])
    assert cluster.on(CONTROLLER, "srun", "--mem=20M", "hostname").strip() == NODE
    assert cluster.json("up")["unchanged"]


def test_next_rotation_finishes_a_killed_rotation_after_an_up_in_between(cluster: Cluster) -> None:
    [before] = digests(cluster)
    rotating = cluster.background("keys", "rotate", "munge")
    begun = f"test -e {KEY}.next || test $(sha256sum < {KEY} | cut -c1-64) != {before}"
    cluster.wait("it has begun", lambda: cluster.ssh(CONTROLLER, begun).returncode == 0)
    kill(rotating)
    cluster.json("up")
    assert len(digests(cluster)) == 1
    assert cluster.on(CONTROLLER, "srun", "--mem=20M", "hostname").strip() == NODE
    assert cluster.json("keys", "rotate", "munge")["rotated"][0]["hosts"] == [CONTROLLER, NODE]
    assert len(digests(cluster)) == 1 and digests(cluster) != {before}
    assert cluster.ssh(CONTROLLER, f"test -e {KEY}.next").returncode != 0
    assert "partition_down" not in cluster.on(CONTROLLER, "sinfo", "-h", "-o", "%a").lower()
    assert cluster.on(CONTROLLER, "sinfo", "-h", "-o", "%a").strip() == "up"


@pytest.mark.parametrize("page", ["accounting.md", "keys.md"])
def test_documented_commands_run(cluster: Cluster, page: str) -> None:
    path = f"{Path(sys.executable).parent}:{cluster.env['PATH']}"
    for line in (line for block in commands(ROOT / "docs" / page) for line in block):
        done = subprocess.run(
            line.split(),
            cwd=cluster.file.parent,
            env={**cluster.env, "PATH": path},
            capture_output=True,
            text=True,
            timeout=LIMIT,
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"


# ---- what nobody may see


def test_mariadb_and_slurmdbd_are_closed_from_outside(cluster: Cluster) -> None:
    address = str(cluster.instances()[CONTROLLER].address)
    assert connects(address, 22)
    for port in (3306, 6819):
        assert not connects(address, port), port
    inside = f"bash -c 'exec 3<>/dev/tcp/{address}/6819'"
    assert cluster.ssh(NODE, inside).returncode == 0
    assert cluster.on(CONTROLLER, "ss", "-ltnH", "sport = :6819").split()[3] == f"{address}:6819", "and at no other"
    # 3306 as the kernel writes it: MariaDB has no port at all.
    assert ":0CEA " not in cluster.on(CONTROLLER, "cat", "/proc/net/tcp", "/proc/net/tcp6")


def test_database_password_is_readable_only_by_slurm_and_appears_in_no_output(cluster: Cluster) -> None:
    password = cluster.on(CONTROLLER, "cat", "/etc/shoal/slurmdbd.password").strip()
    assert len(password) == 48
    assert password not in cluster.shoal("plan", "--diff").stdout
    assert password not in cluster.on(CONTROLLER, "ps", "axww")
    assert password not in cluster.on(CONTROLLER, "journalctl", "--no-pager")
    places = "/etc /var/log /var/lib/shoal /var/backups /usr/local /run /tmp"
    readable = f"find {places} -type f -perm -004 -exec grep -l {shlex.quote(password)} {{}} + 2>/dev/null"
    assert cluster.ssh(CONTROLLER, readable).stdout == ""
    mode = cluster.on(CONTROLLER, "stat", "-c", "%a %U", "/etc/slurm/slurmdbd.conf").strip()
    assert mode == "600 slurm"


# ---- and without it again


def test_removed_accounting_stops_the_database_and_keeps_its_records(cluster: Cluster) -> None:
    before = recorded(cluster)
    cluster.edit(ACCOUNTS, "")
    try:
        assert cluster.json("up")["whole"]
        assert cluster.ssh(CONTROLLER, "systemctl is-active slurmdbd mariadb").stdout.split() == [
            "inactive",
            "inactive",
        ]
        assert cluster.json("up")["unchanged"]
        job = sbatch(cluster, "true")
        cluster.wait("it ends", lambda: not cluster.on(CONTROLLER, "squeue", "-h").strip())
        job_ids = {entry["record"]["id"] for entry in cluster.json("jobs", "--all")["jobs"]}
        assert {job, *before} <= job_ids
        assert "has no accounting" in cluster.shoal("usage", status=2).stderr
    finally:
        cluster.file.write_text(cluster.file.read_text() + ACCOUNTS)
    assert cluster.json("up")["whole"]
    cluster.wait("records", lambda: before.items() <= recorded(cluster).items(), seconds=240)
