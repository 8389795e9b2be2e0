"""A spec that changes under a running cluster: options, scripts, edits by hand, and a LAN that becomes WireGuard.

A setting in `slurm.options` that Slurm rejects does not affect the cluster and its jobs. A script is on its hosts
before the option that names it, and an option whose script is missing changes nothing. On a LAN that the members
share with other machines, `check` warns, and one line in the file makes it WireGuard. The attack is a neighbour that
takes over a member's address: an address of a member that is sent from elsewhere.

The tests share one cluster and run in the order of this file.
"""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, running

COVERS = "plan slurm network/wireguard roles/wireguard roles/files verbs/up verbs/check"
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(1200)]

SPEC = """\
cluster: el-lan
network: lan
controller: {provider: sandbox, memory: 1G}
nodesets:
  lab: {provider: sandbox, count: 1, memory: 1G, gpus: 1, shards: 2}
slurm: {options: {KillWait: 31}}
"""
GOOD = "{KillWait: 31}"
SLURMCTLD, SLURMD = 6817, 6818
CONNECT = """\
import socket, sys
try:
    socket.create_connection((sys.argv[1], int(sys.argv[2])), timeout=5).close()
    print("open")
except OSError:
    print("closed")
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("lan"), SPEC) as made:
        yield made


@pytest.fixture
def job(cluster: Cluster) -> Iterator[str]:
    """A job that runs meanwhile."""
    wait = "while [ ! -e /tmp/release ]; do sleep 0.2; done"
    number = cluster.on("controller", "sbatch", "--parsable", "--mem=20M", "--output=/dev/null", "--wrap", wait).strip()
    cluster.wait("it runs", lambda: state_of(cluster, number) == "RUNNING")
    yield number
    cluster.on("lab1", "touch", "/tmp/release")
    cluster.wait("it ends", lambda: state_of(cluster, number) == "COMPLETED")
    cluster.on("lab1", "rm", "/tmp/release")


def state_of(cluster: Cluster, job: str) -> str:
    return cluster.on("controller", "scontrol", "show", "job", job).split("JobState=")[1].split()[0]


@pytest.mark.parametrize(
    ("options", "complaint", "advice"),
    [
        ("{Nope: 1}", "unrecognized key: Nope", "correct or delete slurm.options.Nope"),
        ("{KillWait: soon}", 'KillWait value "soon" is not a valid number', "correct or delete slurm.options.KillWait"),
    ],
)
def test_option_slurm_cannot_read_is_reported_by_check_and_not_applied(
    cluster: Cluster, job: str, options: str, complaint: str, advice: str
) -> None:
    before = cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    started = cluster.on("controller", "systemctl", "show", "-p", "MainPID", "slurmctld")
    cluster.edit(GOOD, options)
    try:
        checked = cluster.shoal("check", status=1)
        applied = cluster.shoal("up", status=1)
    finally:
        cluster.edit(options, GOOD)
    for done in (checked, applied):
        assert complaint in done.stdout + done.stderr
        assert advice in done.stdout + done.stderr
    assert f"fix: {advice} in the cluster's file, then run `shoal up` again" in applied.stderr, applied.stderr
    assert cluster.on("controller", "cat", "/etc/slurm/slurm.conf") == before
    assert cluster.on("controller", "systemctl", "show", "-p", "MainPID", "slurmctld") == started, "not even restarted"
    assert state_of(cluster, job) == "RUNNING"
    assert "no changes" in cluster.shoal("up").stdout


def test_option_that_stops_slurmctld_is_rolled_back(cluster: Cluster, job: str) -> None:
    """A plugin that is not there: the file can be read, and slurmctld ends all the same."""
    before = cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    options = "{PreemptType: preempt/nope}"
    cluster.edit(GOOD, options)
    try:
        done = cluster.shoal("up", status=1)
    finally:
        cluster.edit(options, GOOD)
    assert "slurmctld did not start with the new /etc/slurm/slurm.conf" in done.stderr
    assert "correct or delete slurm.options.PreemptType" in done.stderr
    assert "The old file is back in force, and slurmctld runs" in done.stderr
    assert cluster.on("controller", "cat", "/etc/slurm/slurm.conf") == before
    cluster.wait("slurmctld answers again, and the job still runs", lambda: state_of(cluster, job) == "RUNNING")
    assert cluster.on("controller", "srun", "--mem=20M", "hostname").strip() == "lab1"
    assert "no changes" in cluster.shoal("up").stdout


CONF, STATE = "/etc/slurm/slurm.conf", "/var/lib/slurm/slurmctld"


def test_edit_by_hand_is_named_by_check_and_kept_by_up(cluster: Cluster) -> None:
    cluster.on(
        "controller", "sh", "-c", f"echo '# mine' >> {CONF}; scontrol update nodename=lab1 state=drain reason=fan"
    )
    found = {finding["host"]: finding for finding in cluster.json("check")["findings"]}
    assert f"{CONF} was edited by hand" in found["controller"]["what"], found
    assert "fan" in found["lab1"]["found"] and "shoal node resume lab1" in found["lab1"]["fix"], found
    assert "was edited by hand" in " ".join(cluster.shoal("plan").stdout.split())
    assert cluster.json("up")["whole"]
    assert "# mine" not in cluster.on("controller", "cat", CONF)
    assert "# mine" in cluster.on("controller", "sh", "-c", f"cat /var/lib/shoal/edited{CONF}.*")
    cluster.shoal("node", "resume", "lab1")
    assert [finding for finding in cluster.json("check")["findings"] if finding["level"] == "error"] == []


def test_up_does_not_restart_slurmctld_whose_state_is_read_only(cluster: Cluster, job: str) -> None:
    started = cluster.on("controller", "systemctl", "show", "-p", "MainPID", "slurmctld")
    cluster.on("controller", "sh", "-c", f"mount --bind {STATE} {STATE} && mount -o remount,bind,ro {STATE}")
    cluster.edit(GOOD, "{KillWait: 32}")
    try:
        for verb in ("check", "up"):
            done = cluster.shoal(verb, status=1)
            words = " ".join((done.stdout + done.stderr).split())
            assert f"Slurm cannot write {STATE}" in words and "read-only" in words, words
    finally:
        cluster.edit("{KillWait: 32}", GOOD)
        cluster.on("controller", "umount", STATE)
    assert cluster.on("controller", "systemctl", "show", "-p", "MainPID", "slurmctld") == started
    assert state_of(cluster, job) == "RUNNING"
    assert "no changes" in cluster.shoal("up").stdout


def test_versions_of_images_are_compared_before_hosts_are_made(tmp_path: Path) -> None:
    text = SPEC.replace("el-lan", "el-images").replace("count: 1,", "count: 1, image: debian13,")
    fresh = Cluster(tmp_path, text.replace("sandbox, memory", "sandbox, image: debian12, memory"))
    assert "Slurm newer than the controller's" in " ".join(fresh.shoal("up", status=1).stderr.split())
    assert fresh.instances() == {}


OPTIONS = """\
{KillWait: 31, SchedulerParameters: bf_interval=45, X11Parameters: home_xauthority, TaskPlugin: task/affinity,
  MailProg: /bin/true -s jobs}
partitions:
  main: {nodesets: ALL, max_time: 60, options: {OverSubscribe: "FORCE:2", AllowGroups: root, MaxCPUsPerNode: 64}}
"""


def test_further_options_of_slurm_and_of_a_partition_take_effect(cluster: Cluster) -> None:
    cluster.edit(f"{{options: {GOOD}}}\n", f"{{options: {OPTIONS}".replace("jobs}\n", "jobs}}\n"))
    wrong = ("AllowGroups: root", "AllowGruops: root")
    cluster.edit(*wrong)
    refused = cluster.shoal("check", status=1).stdout
    assert "AllowGruops" in refused and "correct or delete partitions.main.options.AllowGruops" in refused
    cluster.edit(*reversed(wrong))
    assert cluster.json("up")["whole"]
    assert cluster.json("up")["unchanged"]
    partition = cluster.on("controller", "scontrol", "show", "partition", "main")
    for text in ("OverSubscribe=FORCE:2", "AllowGroups=root", "MaxCPUsPerNode=64", "MaxTime=01:00:00", "Nodes=lab1"):
        assert text in partition
    config = cluster.on("controller", "scontrol", "show", "config")
    values = dict(map(str.strip, line.split("=", 1)) for line in config.splitlines() if " = " in line)
    assert values["SchedulerParameters"] == "batch_sched_delay=0,bf_interval=45"
    assert values["X11Parameters"] == "home_xauthority"
    assert values["MailProg"] == "/bin/true -s jobs"
    assert values["TaskPlugin"] == "task/affinity"
    assert cluster.on("controller", "srun", "--mem=20M", "hostname").strip() == "lab1"


def test_impossible_job_is_rejected_and_an_array_of_ten_thousand_accepted(cluster: Cluster) -> None:
    for impossible in ("--time=2:00:00", "--nodes=5"):
        refused = cluster.ssh("controller", f"sbatch {impossible} --wrap true")
        assert refused.returncode != 0 and "error: Batch job submission failed" in refused.stderr, refused
    cluster.on("controller", "scontrol", "create", "PartitionName=long", "Nodes=lab1")
    either = ("sbatch", "--parsable", "--hold", "--output=/dev/null", "--wrap", "true", "--partition=main,long")
    cluster.on("controller", "scancel", cluster.on("controller", *either, "--time=2:00:00").strip())
    refused = cluster.ssh("controller", "sbatch --partition=main,long --nodes=5 --wrap true")
    assert refused.returncode != 0, "neither can start it"
    cluster.on("controller", "scontrol", "delete", "PartitionName=long")
    array = ("sbatch", "--parsable", "--hold", "--array=1-10000", "--output=/dev/null", "--wrap", "true")
    first = cluster.on("controller", *array).strip()
    second = cluster.on("controller", *array).strip()
    assert cluster.on("controller", "squeue", "-h", "-r", "-j", f"{first},{second}", "-o", "%i").count("\n") == 20_000
    cluster.on("controller", "scancel", first, second)


def test_jobs_share_a_gpu_by_shards(cluster: Cluster) -> None:
    line = ("sbatch", "--parsable", "--mem=20M", "--gres=shard:1", "--output=/dev/null", "--wrap", "sleep 600")
    jobs = [cluster.on("controller", *line).strip() for _ in range(2)]
    cluster.wait("both run on one GPU", lambda: {state_of(cluster, job) for job in jobs} == {"RUNNING"})
    cluster.on("controller", "scancel", *jobs)


PROLOG = "#!/bin/sh\ntouch /run/prolog-$SLURM_JOB_ID\n"
LUA = """\
function slurm_job_submit(job, part, uid)
    if job.name == "forbidden" then
        slurm.log_user("no such jobs here")
        return slurm.ERROR
    end
    return slurm.SUCCESS
end
function slurm_job_modify(job, record, part, uid)
    return slurm.SUCCESS
end
"""
SCRIPTS = "{KillWait: 31, Prolog: /etc/slurm/prolog.sh, JobSubmitPlugins: lua,"
FILES = """\
files:
  /etc/slurm/prolog.sh: prolog.sh
  /etc/slurm/job_submit.lua: {source: scripts/submit.lua, hosts: [controller]}
  /opt/site/data.bin: {source: data.bin, mode: 0600, hosts: [lab]}
  /opt/site/spank.so: spank.so
  /etc/slurm/plugstack.conf: {source: plugstack.conf, hosts: [controller]}
"""
SPANK = """\
#include <fcntl.h>
const char plugin_name[] = "site", plugin_type[] = "spank";
const unsigned int plugin_version = (MAJOR << 16) | (MINOR << 8) | PATCH;
int slurm_spank_task_init(void *spank, int count, char **words) { return creat("/tmp/spank", 0644) < 0; }
"""


def compile_spank(cluster: Cluster, target: Path) -> None:
    """A SPANK plugin for the release that the hosts have. One for another release is not loaded."""
    version = cluster.on("controller", "scontrol", "--version").split()[1].split(".")
    defines = [f"-D{name}={int(number)}" for name, number in zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)]
    compiler = ["gcc", "-shared", "-fPIC", *defines, "-x", "c", "-", "-o", str(target)]
    subprocess.run(compiler, input=SPANK, text=True, check=True, timeout=60)


def test_option_whose_script_is_missing_changes_nothing(cluster: Cluster) -> None:
    before = cluster.on("controller", "cat", "/etc/slurm/slurm.conf")
    cluster.edit("{KillWait: 31,", SCRIPTS)
    findings = cluster.json("check", status=1)["findings"]
    missing = {(one["host"], one["what"].split()[0]) for one in findings if "there is no such" in one["what"]}
    assert missing == {("lab1", "Prolog"), ("controller", "JobSubmitPlugins")}
    refused = cluster.shoal("up", status=1).stderr
    assert "lab1: Prolog names /etc/slurm/prolog.sh, and there is no such program" in refused
    assert "nothing was changed" in refused and "add it to `files`" in refused
    assert cluster.on("controller", "cat", "/etc/slurm/slurm.conf") == before


def test_scripts_come_before_their_option_change_and_leave(cluster: Cluster) -> None:
    place = cluster.file.parent
    (place / "scripts").mkdir()
    for name, content in {"prolog.sh": PROLOG, "scripts/submit.lua": LUA}.items():
        (place / name).write_text(content)
    (place / "data.bin").write_bytes(bytes(range(256)))
    (place / "plugstack.conf").write_text("required /opt/site/spank.so\n")
    compile_spank(cluster, place / "spank.so")
    plugstack = cluster.on("controller", "cat", "/etc/slurm/plugstack.conf")
    text = cluster.file.read_text()
    cluster.file.write_text(text + FILES)
    assert "Prolog executes it, and it is not executable" in cluster.shoal("check", status=2).stderr
    (place / "prolog.sh").chmod(0o755)
    assert cluster.json("up")["whole"]
    job = cluster.on("controller", "sbatch", "--parsable", "--wait", "--mem=20M", "-o", "/dev/null", "--wrap", "true")
    cluster.on("lab1", "test", "-e", f"/run/prolog-{job.strip()}")
    cluster.on("lab1", "test", "-e", "/tmp/spank")
    forbidden = cluster.ssh("controller", "sbatch -J forbidden --wrap true")
    assert forbidden.returncode != 0 and "no such jobs here" in forbidden.stderr
    assert cluster.on("lab1", "stat", "-c", "%a %U %s", "/opt/site/data.bin") == "600 root 256\n"
    assert cluster.on("controller", "ls", "/opt/site") == "spank.so\n", "the data is not for the controller"
    assert cluster.json("up")["unchanged"]

    (place / "prolog.sh").write_text(PROLOG.replace("prolog-", "second-"))
    changes = cluster.json("plan")["changes"]
    assert {(one["host"], one["what"]) for one in changes} == {
        ("controller", "file /etc/slurm/prolog.sh"),
        ("lab1", "file /etc/slurm/prolog.sh"),
    }
    assert cluster.json("up")["whole"]
    cluster.on("controller", "srun", "--mem=20M", "true")
    assert cluster.ssh("lab1", "ls /run/second-*").returncode == 0

    cluster.file.write_text(text.replace(SCRIPTS, "{KillWait: 31,"))
    assert cluster.json("up")["whole"]
    for host in ("controller", "lab1"):
        paths = "/etc/slurm/prolog.sh /etc/slurm/job_submit.lua /opt/site/* /etc/shoal/files"
        assert cluster.ssh(host, f"ls {paths}").stdout == ""
    assert cluster.on("controller", "cat", "/etc/slurm/plugstack.conf") == plugstack, "the package's own is back"
    assert cluster.on("controller", "srun", "--mem=20M", "hostname").strip() == "lab1"
    assert cluster.states()["lab1"] <= {"IDLE", "MIXED", "ALLOCATED", "COMPLETING"}
    assert cluster.json("up")["unchanged"]


def warnings(cluster: Cluster) -> list[str]:
    """What `check` warns of, about the network."""
    findings = cluster.json("check")["findings"]
    return [one["found"] for one in findings if one["level"] == "warning" and "network segment" in one["what"]]


def connect(cluster: Cluster, target: str, port: int) -> str:
    """Whether a port of a host answers the controller."""
    return cluster.on("controller", "python3", "-c", CONNECT, target, str(port)).strip()


def test_check_warns_of_a_stranger_in_the_lan(cluster: Cluster) -> None:
    assert warnings(cluster) == [], "members and the router are no strangers"
    address = str(cluster.instances()["lab1"].address)
    stranger = f"{address.rpartition('.')[0]}.250"
    route = cluster.on("controller", "ip", "-o", "route", "get", address).split()
    device = route[route.index("dev") + 1]
    cluster.on("controller", "ip", "neigh", "replace", stranger, "lladdr", "02:00:00:00:00:fa", "dev", device)
    assert warnings(cluster) == [f"{stranger} beside controller"]
    assert connect(cluster, address, SLURMD) == "open"


def test_wireguard_on_the_same_lan_closes_the_members_addresses(cluster: Cluster) -> None:
    cluster.edit("network: lan", "network: wireguard")
    assert cluster.json("up")["whole"]
    assert warnings(cluster) == []
    assert cluster.on("controller", "timeout", "60", "srun", "--immediate=30", "-w", "lab1", "hostname") == "lab1\n"
    peers = cluster.on("controller", "wg", "show", "shoal0", "endpoints")
    address = str(cluster.instances()["lab1"].address)
    assert f"{address}:51820" in peers, "directly, over the LAN"
    assert connect(cluster, address, SLURMD) == "closed"
    assert connect(cluster, "lab1", SLURMD) == "open", "its name leads to its address on the network"
