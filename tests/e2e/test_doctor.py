"""`shoal doctor` on a cluster with real faults: each is found, and what it claims to fix is fixed.

The tests share the cluster and run in the order of this file. Each leaves it healthy.
"""

import base64
import json
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from tests import nvml
from tests.e2e.cluster import Cluster, login_keys, taken_down

COVERS = (
    "health verbs/doctor verbs/doctor_fixes verbs/doctor_job verbs/node verbs/node_files verbs/health "
    "roles/node_health remote/node_health"
)
pytestmark = pytest.mark.sandbox
HEALTH = "/var/lib/shoal/health"

SPEC = """\
cluster: doctor
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 2, memory: 1G, gpus: 1}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
files:
  /etc/slurm/prolog.sh: {source: prolog.sh, mode: "0755"}
  /etc/slurm/epilog.sh: {source: epilog.sh, mode: "0755"}
  /etc/slurm/nhc.sh: {source: nhc.sh, mode: "0755"}
slurm:
  options:
    Prolog: /etc/slurm/prolog.sh
    Epilog: /etc/slurm/epilog.sh
    HealthCheckProgram: /etc/slurm/nhc.sh
    HealthCheckInterval: 3
"""
SCRIPT = "#!/bin/sh\n[ ! -e /run/fail-{0} ] || {{ echo 'the {0} cannot find its license' >&2; exit 3; }}\n"
SUBMIT = "sbatch --parsable --output=/dev/null --chdir=/ --wrap true -w"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    place = tmp_path_factory.mktemp("doctor")
    for name in ("prolog", "epilog"):
        (place / f"{name}.sh").write_text(SCRIPT.format(name))
    (place / "nhc.sh").write_text('#!/bin/sh\necho "$SLURMD_NODENAME" > /run/nhc.log\n')
    with login_keys("alice") as keys:
        made = Cluster(place, SPEC.replace("KEYS", str(keys)))
        with taken_down(made):
            assert made.json("up")["whole"]
            yield made


def examine(cluster: Cluster, *options: str, status: int = 1) -> dict[tuple[str, str], dict[str, Any]]:
    """The findings by id and place."""
    found = cluster.json("doctor", *options, status=status)["findings"]
    return {(one["id"], one["host"] or one["job"]): one for one in found}


def shell(cluster: Cluster, host: str, text: str) -> str:
    return cluster.on(host, "sh", "-c", text)


def as_alice(cluster: Cluster, command: str, status: int = 0) -> str:
    done = cluster.ssh("controller", shlex.join(("runuser", "-l", "alice", "-c", command)))
    assert done.returncode == status, done
    return done.stdout


def drained(cluster: Cluster, *names: str) -> bool:
    states = cluster.states()
    return all("DRAIN" in states[name] for name in names)


def assert_healthy(cluster: Cluster) -> None:
    cluster.wait("both nodes are idle", lambda: cluster.states() == {"fish1": {"IDLE"}, "fish2": {"IDLE"}})
    assert "nothing is wrong; checked 3 hosts" in cluster.shoal("doctor").stdout


def test_healthy_cluster_has_no_findings(cluster: Cluster) -> None:
    assert_healthy(cluster)
    assert cluster.json("doctor", "--history")["history"] == []
    assert "there is no finding 'fan'" in cluster.shoal("doctor", "--fix", "fan", status=2).stderr


def test_faults_of_hosts_are_found_and_fixed(cluster: Cluster) -> None:
    shell(
        cluster,
        "fish1",
        "systemctl stop slurmd munge; sed -i '/fish2/d' /etc/hosts; userdel alice; "
        "mount -t tmpfs -o size=1m tmpfs /var/tmp && head -c 2m /dev/zero > /var/tmp/core || true",
    )
    shell(
        cluster,
        "fish2",
        "head -c 1024 /dev/urandom > /etc/munge/munge.key; systemctl restart munge; "
        "mount -t tmpfs -o ro tmpfs /var/tmp",
    )
    shell(
        cluster,
        "controller",
        "mount -t tmpfs -o nr_inodes=10 tmpfs /var/tmp; cd /var/tmp; touch $(seq 10) 2> /dev/null; true",
    )
    found = examine(cluster)
    by_hand = {("disk-full", "fish1"), ("inodes-full", "controller"), ("read-only", "fish2")}
    assert by_hand | {
        *(("munge-stopped", "fish1"), ("slurmd-stopped", "fish1"), ("name-unresolved", "fish1")),
        *(("user-missing", "fish1"), ("munge-key", "fish2")),
    } == set(found), found
    assert found["disk-full", "fish1"]["what"] == "/var/tmp is full"
    assert found["read-only", "fish2"]["evidence"] == ["Read-only file system"]
    assert found["name-unresolved", "fish1"]["evidence"] == ["does not resolve: fish2"]
    refused = cluster.shoal("doctor", "--fix", status=2).stderr
    assert "munge-key on fish2: daemon restart" in refused and "use --yes" in refused
    fixed = cluster.json("doctor", "--fix", "--yes", status=1)
    assert all(one["fixed"] for one in fixed["fixes"]) and len(fixed["fixes"]) == 5, fixed["fixes"]
    cluster.wait("what is left is for a person", lambda: set(examine(cluster)) == by_hand)
    for host in ("controller", "fish1", "fish2"):
        cluster.on(host, "umount", "/var/tmp")
    cluster.wait("both nodes are back", lambda: cluster.states() == {"fish1": {"IDLE"}, "fish2": {"IDLE"}})
    assert_healthy(cluster)
    assert cluster.on("controller", "srun", "-N2", "id", "-u", "alice") == "2001\n2001\n"


def test_stopped_slurmctld_is_started(cluster: Cluster) -> None:
    cluster.on("controller", "systemctl", "stop", "slurmctld")
    assert set(examine(cluster)) == {("slurmctld-stopped", "controller")}
    cluster.shoal("doctor", "--fix")
    assert_healthy(cluster)


def test_hung_host_is_a_finding_and_hides_no_other(cluster: Cluster) -> None:
    cluster.on("fish1", "systemctl", "kill", "--signal=STOP", "munge")
    cluster.fault("freeze", "fish2")
    try:
        result = cluster.json("doctor", status=3)
    finally:
        cluster.fault("thaw", "fish2")
    assert result["unchecked"] == ["fish2"] and sorted(result["checked"]) == ["controller", "fish1"]
    found = {(one["id"], one["host"]) for one in result["findings"]}
    assert {("unreachable", "fish2"), ("munge-stopped", "fish1")} <= found
    cluster.wait("it answers again", lambda: cluster.answers("fish2"))
    cluster.shoal("doctor", "--fix", "munge-stopped", status=None)
    cluster.wait("no finding is left", lambda: examine(cluster, status=0) == {})


@pytest.mark.matrix
def test_failing_scripts_drain_nodes_until_they_are_corrected(cluster: Cluster) -> None:
    cluster.on("fish1", "touch", "/run/fail-prolog")
    cluster.on("fish2", "touch", "/run/fail-epilog")
    job = as_alice(cluster, f"{SUBMIT} fish1").strip()
    cluster.on("controller", "srun", "-w", "fish2", "true")
    cluster.wait("both nodes are drained", lambda: drained(cluster, "fish1", "fish2"))
    cluster.wait("the job is held", lambda: ("job-launch-failed", job) in examine(cluster))
    found = examine(cluster)
    assert set(found) == {("prolog-error", "fish1"), ("epilog-error", "fish2"), ("job-launch-failed", job)}
    assert any("prolog" in line for line in found["prolog-error", "fish1"]["evidence"][1:]), found
    assert "fish1: the prolog failed on the node; see `shoal doctor --node fish1`" in cluster.shoal("status").stdout
    assert f"Slurm holds it: `shoal doctor --job {job}`" in cluster.shoal("jobs").stdout
    assert set(examine(cluster, "--node", "fish2")) == {("epilog-error", "fish2")}
    # The user who waits for the node sees the same, without root.
    waiting = as_alice(cluster, f"{SUBMIT} fish2").strip()
    cluster.wait("Slurm says why it waits", lambda: ("job-waits-for-node", waiting) in examine(cluster))
    own = json.loads(as_alice(cluster, "shoal doctor --json", status=1))["findings"]
    assert {("job-launch-failed", job), ("job-waits-for-node", waiting)} <= {(one["id"], one["job"]) for one in own}
    [node] = [one for one in own if one["host"] == "fish2"]
    assert node["id"] == "epilog-error" and node["action"] == "" and "tell the operator" in node["fix"]
    assert "needs the operator's file" in cluster.ssh("controller", "runuser -l alice -c 'shoal doctor --fix'").stderr
    # Nothing that needs a person's correction is changed unasked.
    assert cluster.json("doctor", "--fix", status=1)["fixes"] == [] and drained(cluster, "fish1", "fish2")
    for host in ("fish1", "fish2"):
        shell(cluster, host, "rm -f /run/fail-*")
    cluster.json("doctor", "--fix", "prolog-error", "epilog-error", "job-launch-failed", status=None)
    cluster.wait("the jobs end", lambda: cluster.on("controller", "squeue", "-h") == "")
    assert_healthy(cluster)


@pytest.mark.matrix
def test_full_spool_drains_a_node_until_there_is_space(cluster: Cluster) -> None:
    spool = "/var/lib/slurm/slurmd"
    # A directory takes no space of a tmpfs, but an inode: there slurmstepd gets the error that Slurm drains for.
    fill = "touch $(seq 16) 2> /dev/null; true"
    shell(cluster, "fish1", f"mount -t tmpfs -o nr_inodes=16 tmpfs {spool} && cd {spool} && {fill}")
    job = shell(cluster, "controller", f"{SUBMIT} fish1").strip()
    cluster.wait("the node is drained", lambda: drained(cluster, "fish1"))
    found = examine(cluster, "--node", "fish1")
    assert set(found) == {("inodes-full", "fish1"), ("spool-full", "fish1")}, found
    assert found["spool-full", "fish1"]["blocked"].startswith("first: ")
    kept = cluster.json("doctor", "--fix", "--node", "fish1", status=1)["fixes"]
    assert [one["fixed"] for one in kept] == [False] and drained(cluster, "fish1")
    shell(cluster, "fish1", f"umount -l {spool}")
    shell(cluster, "controller", f"scancel {job}")
    [fixed] = cluster.json("doctor", "--fix")["fixes"]
    assert fixed["id"] == "spool-full" and fixed["fixed"]
    assert_healthy(cluster)


def test_persons_drain_and_note_are_kept(cluster: Cluster) -> None:
    cluster.shoal("node", "drain", "fish1", "--reason", "fan broken")
    found = examine(cluster, status=0)
    assert (
        set(found) == {("person-drain", "fish1")} and "fan broken (root)" in found["person-drain", "fish1"]["evidence"]
    )
    assert cluster.json("doctor", "--fix")["fixes"] == []
    # slurmstepd replaces a reason with the same request.
    cluster.on("controller", "scontrol", "update", "nodename=fish1", "state=drain", "reason=Kill task failed")
    found = examine(cluster)
    assert found["kill-task-failed", "fish1"]["evidence"][-1] == "a person's note before it: fan broken"
    assert cluster.json("doctor", "--fix", "kill-task-failed", status=1)["fixes"] == [] and drained(cluster, "fish1")
    cluster.shoal("node", "resume", "fish1")
    # Without a person's note, and with no process left, it is safe.
    cluster.on("controller", "scontrol", "update", "nodename=fish1", "state=drain", "reason=Kill task failed")
    [fixed] = cluster.json("doctor", "--fix")["fixes"]
    assert fixed["id"] == "kill-task-failed" and fixed["fixed"]
    assert_healthy(cluster)


def test_failed_job_is_explained(cluster: Cluster) -> None:
    words = "OMPI was not built with PMI support and therefore cannot execute"
    wrap = f"echo '*** An error occurred in MPI_Init'; echo '{words}'; exit 1"
    job = as_alice(cluster, f"sbatch --parsable --wait -o mpi.log --wrap {shlex.quote(wrap)}", status=1).strip()
    [found] = examine(cluster, "--job", job).values()
    assert found["id"] == "job-failed" and found["job"] == job
    assert "started by srun without PMIx" in found["what"] and "--launcher pmix" in found["fix"]
    own = json.loads(as_alice(cluster, f"shoal doctor --json --job {job}", status=1))["findings"]
    assert [(one["id"], one["job"]) for one in own] == [("job-failed", job)]


def test_node_unlike_its_nodeset_is_found(cluster: Cluster) -> None:
    shell(cluster, "fish2", "echo '# edited' >> /etc/slurm/prolog.sh; echo '# edited' >> /run/slurm/conf/slurm.conf")
    found = examine(cluster)
    assert set(found) == {("node-differs", "fish2"), ("conf-differs", "fish2")}
    assert found["node-differs", "fish2"]["evidence"] == ["/etc/slurm/prolog.sh: another text than on fish1"]
    [fixed] = cluster.json("doctor", "--fix", status=1)["fixes"]
    assert (fixed["id"], fixed["fixed"]) == ("conf-differs", True)
    cluster.json("up")
    assert_healthy(cluster)


def test_rejected_registration_is_fixed_by_one_command(cluster: Cluster) -> None:
    shell(
        cluster,
        "controller",
        "sed -i 's/RealMemory=[0-9]*/RealMemory=99999999/' /etc/slurm/slurm.conf && systemctl restart slurmctld",
    )
    cluster.wait("Slurm rejects the nodes", lambda: all("DRAIN" in flags for flags in cluster.states().values()))
    found = examine(cluster)
    low = {("low-memory", "fish1"), ("low-memory", "fish2")}
    # The nodes still have the files that slurmctld has no longer.
    assert low <= set(found) <= low | {("conf-differs", "fish1"), ("conf-differs", "fish2")}
    assert "idle+drain+invalid_reg: Low RealMemory (reported:" in found["low-memory", "fish1"]["evidence"][0]
    assert "reject" in cluster.shoal("node", "resume", "fish1", status=1).stderr
    fixed = cluster.json("doctor", "--fix", "low-memory", "--yes", status=None)
    assert [one["fixed"] for one in fixed["fixes"]] == [True, True]
    assert_healthy(cluster)


def test_history_has_every_fix(cluster: Cluster) -> None:
    history = cluster.json("doctor", "--history")["history"]
    fixes = [one["id"] for one in history if one["fixed"]]
    assert fixes[-4:] == ["kill-task-failed", "conf-differs", *["low-memory"] * 2]
    assert "fixed low-memory, fish2 (register)" in cluster.shoal("doctor", "--history").stdout


# ---- the health program of nodes


@pytest.fixture(scope="module")
def gpus(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> None:
    """fish1 has a simulated NVML, and is past its first day. Its timer stays off: the tests run the program."""
    library = base64.b64encode(nvml.build(tmp_path_factory.mktemp("nvml")).read_bytes()).decode()
    put = f"echo {library} | base64 -d > /usr/lib/$(uname -m)-linux-gnu/libnvidia-ml.so.1; ldconfig"
    shell(cluster, "fish1", f"{put}; systemctl stop shoal-health.timer")
    assert check_node(cluster) == {}
    shell(cluster, "fish1", f'sed -i \'s/"since": [0-9.]*/"since": 1000/\' {HEALTH}/baseline.json')


def check_node(cluster: Cluster, *, runs: int = 1, **gpu: object) -> dict[str, list[str]]:
    """Run the health program on fish1, whose GPU answers so."""
    run = "; ".join(["systemctl start shoal-health"] * runs)
    text = shell(cluster, "fish1", f"echo '{nvml.answers(gpu)}' > /etc/shoal-nvml; {run}; cat {HEALTH}/result.json")
    return {one["id"]: one["evidence"] for one in json.loads(text)["findings"]}


def reason_of(cluster: Cluster) -> str:
    """The state and the reason of fish1."""
    return cluster.on("controller", "sinfo", "-h", "-N", "-n", "fish1", "-o", "%T %E").strip().replace("*", "")


def test_health_program_lifts_its_own_drain_and_no_other(cluster: Cluster, gpus: None) -> None:
    assert check_node(cluster, ecc=2) == {"gpu-ecc": ["GPU 0 (0000:41:00): 2 errors that could not be corrected"]}
    ours = "drained shoal: health: gpu-ecc: GPU 0 (0000:41:00): 2 errors that could not be corrected"
    cluster.wait("its hook drains the node", lambda: reason_of(cluster) == ours)
    assert set(examine(cluster)) == {("gpu-ecc", "fish1"), ("health-drain", "fish1")}
    assert check_node(cluster) == {}
    cluster.wait("the drain is lifted", lambda: reason_of(cluster) == "idle none")
    # A person's drain stays, before and after; the operator's own program still runs.
    cluster.shoal("node", "drain", "fish1", "--reason", "fan broken")
    shell(cluster, "fish1", "rm -f /run/nhc.log")
    for errors in (2, 0):
        check_node(cluster, ecc=errors)
        cluster.on("fish1", "rm", "-f", "/run/nhc.log")
        cluster.wait("the hook has run", lambda: cluster.on("fish1", "cat", "/run/nhc.log", status=None) == "fish1\n")
        assert reason_of(cluster) == "drained fan broken"
    cluster.shoal("node", "resume", "fish1")
    assert_healthy(cluster)


FROZEN = """
import ctypes, os, time
os.makedirs("/mnt/frozen", exist_ok=True)
options = b"fd=%d,rootmode=40000,user_id=0,group_id=0" % os.open("/dev/fuse", os.O_RDWR)
assert ctypes.CDLL(None).mount(b"frozen", b"/mnt/frozen", b"fuse", 0, options) == 0
time.sleep(3600)
"""
LEAVE = "#!/bin/sh\nsetsid nohup sleep 500 > /dev/null 2>&1 < /dev/null &\nsleep 1\n"


@pytest.mark.matrix
def test_share_that_hangs_drains_its_node_until_it_is_gone(cluster: Cluster, gpus: None) -> None:
    start = f"systemd-run -q --unit=frozen python3 -c {shlex.quote(FROZEN)}"
    shell(cluster, "fish1", f"{start}; until grep -q frozen /proc/mounts; do sleep 0.1; done")
    assert check_node(cluster) == {"share-hangs": ["/mnt/frozen (fuse) does not answer within 5 s"]}
    assert check_node(cluster) != {} and examine(cluster)["share-hangs", "fish1"]["level"] == "error"
    cluster.wait("its hook drains the node", lambda: "share-hangs" in reason_of(cluster))
    shell(cluster, "fish1", "umount -l /mnt/frozen; systemctl stop frozen")
    assert check_node(cluster) == {}
    cluster.wait("the drain is lifted", lambda: reason_of(cluster) == "idle none")


@pytest.mark.matrix
def test_leftovers_and_idle_gpus_are_found(cluster: Cluster, gpus: None) -> None:
    as_alice(cluster, f"printf '{LEAVE}' > left.sh; sbatch --wait -w fish1 -o /dev/null left.sh")
    cluster.wait("the job has ended", lambda: cluster.on("controller", "squeue", "-h") == "")
    [text] = check_node(cluster, runs=2)["step-left"]
    assert text.startswith("sleep (pid ") and "user alice) of job " in text
    pid = text.partition("(pid ")[2].partition(",")[0]
    assert check_node(cluster, runs=2, pid=pid)["gpu-process-left"][0].startswith(
        f"GPU 0 (0000:41:00): sleep (pid {pid}"
    )
    # What the file says reaches the program with the next `up`.
    cluster.edit("users:\n", "health: {leftovers: kill, idle_gpus: cancel, idle_after: 10s}\nusers:\n")
    cluster.json("up")
    assert check_node(cluster)["step-left"][0].endswith(", killed")
    assert check_node(cluster, runs=2) == {}
    job = as_alice(cluster, "sbatch --parsable -w fish1 --gres=gpu:1 -o idle.log --wrap 'sleep 300'").strip()
    cluster.wait("it runs", lambda: "R" in cluster.on("controller", "squeue", "-h", "-o", "%t"))
    shell(cluster, "fish1", "sleep 1")
    check_node(cluster)
    cluster.wait("it has been idle long enough", lambda: "gpu-idle" in check_node(cluster))
    cluster.wait("it is cancelled", lambda: cluster.on("controller", "squeue", "-h") == "")
    log = cluster.on("fish1", "cat", "/home/alice/idle.log")
    assert f"the GPUs of job {job} have been idle since " in log and "so it is cancelled" in log
