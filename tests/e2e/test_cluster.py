"""One pass on each Slurm generation: Debian 12 (22.05), Debian 13 (24.11) and sid (26.05).

The tests of a pass share one cluster and run in the order of this file. Every day the pass is on Debian 12, and
tests/e2e/test_versions.py has the others in one cluster; with `-m matrix` each has a pass of its own.
"""

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import (
    ENGINES,
    HOLD_APT,
    KIND,
    LIMIT,
    RELEASE_APT,
    SLOWNESS,
    SLURM,
    Cluster,
    kill,
    read_until,
    taken_down,
)
from tests.e2e.engines import engine_lists, outside_prefix

from shoal.sandbox.layout import Layout

COVERS = (
    "contract errors registry hostlist local_files verbs/context verbs/slurmctld agent hosts plan spec slurm/conf "
    "roles/base roles/controller roles/compute roles/assembly roles/documents remote/agent cli verbs/up verbs/down "
    "verbs/status verbs/check verbs/exec roles/auth roles/gpu_tools sandbox network/addresses"
)
pytestmark = pytest.mark.sandbox

RELEASES = {"debian12": "22.05", "debian13": "24.11", "sid": "26.05"}
TREE_RELEASE = "24.11"
KEY, USER, SERVICE_USERS = "/etc/munge/munge.key", "munge", ("munge", "slurm")
if SLURM == "shoal":
    KEY, USER, SERVICE_USERS = "/etc/shoal/slurm.key", "root", ("slurm",)

READY = ("timeout", str(60 * SLOWNESS), "srun", "-N2", f"--immediate={20 * SLOWNESS}", "hostname")

SPEC = """\
cluster: t-{image}
controller: {{provider: sandbox, image: {image}, memory: 1G}}
login: {{provider: sandbox, image: {image}, count: 1, memory: 512M}}
nodesets:
  fish: {{provider: sandbox, image: {image}, count: 2, gpus: 2, memory: 1G}}
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=() if name == "debian12" else pytest.mark.matrix) for name in RELEASES],
)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made = Cluster(tmp_path_factory.mktemp(request.param), SPEC.format(image=request.param))
    release = TREE_RELEASE if SLURM == "shoal" else RELEASES[request.param]
    made.release = release  # type: ignore[attr-defined]
    with taken_down(made):
        yield made


def test_plan_shows_hosts_to_create_and_changes_nothing(cluster: Cluster) -> None:
    plan = cluster.json("plan")
    assert [change["host"] for change in plan["changes"]] == ["controller", "login1", "fish1", "fish2"]
    assert all("create on sandbox" in change["action"] for change in plan["changes"])
    assert cluster.json("plan") == plan


def test_next_up_continues_after_a_kill_at_any_phase(cluster: Cluster) -> None:
    # Each: the phase that has just ended, and how far into the next one the kill falls.
    # Agents end what they are at when their `up` is killed, so what is left for the next one is not known beforehand.
    killed = 0
    for phase, seconds in (("", 0.3), ("sandbox hosts", 0.1), ("compare", 1.5), ("packages", 0.0), ("compare", 0.1)):
        process = cluster.background("up")
        read_until(process, phase)
        time.sleep(seconds)
        whole = process.poll() is not None  # on a machine so busy that the blow came late there is nothing left to do
        kill(process)
        if whole:
            assert process.returncode == 0, f"up failed after {phase!r}"
            break
        killed += 1
    assert killed >= 3, "up was killed at too few points to mean something"
    result = cluster.json("up")
    assert result["whole"], result


def test_up_makes_nodes_that_slurm_can_use(cluster: Cluster) -> None:
    status = cluster.json("status")
    assert {node["name"] for node in status["nodes"]} == {"fish1", "fish2"}
    assert all("IDLE" in node["state"] for node in status["nodes"]), status
    assert status["version"].startswith(cluster.release)  # type: ignore[attr-defined]


def test_second_up_has_no_changes(cluster: Cluster) -> None:
    assert "no changes" in cluster.shoal("up").stdout
    assert cluster.json("plan")["changes"] == []
    assert cluster.json("check")["findings"] == []


def test_srun_reaches_every_node_from_controller_and_login_host(cluster: Cluster) -> None:
    for host in ("controller", "login1"):
        assert sorted(cluster.on(host, "srun", "-N2", "hostname").split()) == ["fish1", "fish2"]


def test_tasks_get_their_own_gpu(cluster: Cluster) -> None:
    show = ["srun", "-N2", "--ntasks-per-node=2", "--gpus-per-task=1", "sh", "-c"]
    own = "echo $SLURMD_NODENAME $CUDA_VISIBLE_DEVICES"
    if KIND == "vm":  # cgroups confine devices: to each task its GPU is number 0, and no other can be opened
        own = "for n in 0 1; do (: < /dev/nvidia$n) 2> /dev/null && echo $SLURMD_NODENAME $n; done; true"
    out = cluster.on("controller", *show, own)
    assert sorted(out.split("\n")[:-1]) == ["fish1 0", "fish1 1", "fish2 0", "fish2 1"]


def test_key_is_equal_on_all_hosts_and_readable_only_by_its_user(cluster: Cluster) -> None:
    result = cluster.json("exec", "--", "stat", "-c", "%a %U:%G", KEY)
    assert [group["stdout"] for group in result["groups"]] == [f"400 {USER}:{USER}\n"]
    assert len(cluster.json("exec", "--", "sha256sum", KEY)["groups"]) == 1
    ids = cluster.json("exec", "--", "sh", "-c", "; ".join(f"id {name}" for name in SERVICE_USERS))
    assert len(ids["groups"]) == 1, ids


def test_names_resolve_on_every_host(cluster: Cluster) -> None:
    result = cluster.json("exec", "--", "getent", "hosts", "controller", "login1", "fish1", "fish2")
    assert {group["status"] for group in result["groups"]} == {0}


def test_slurm_and_srun_listen_only_on_the_cluster_address(cluster: Cluster) -> None:
    addresses = cluster.addresses()
    for host, ports in (("controller", {6817}), ("login1", set()), ("fish1", {6818}), ("fish2", {6818})):
        assert listening(cluster, host) == {f"{addresses[host]}:{port}" for port in ports}
    # srun stays until its ports were seen, and takes them along.
    ask = f'srun -N2 sleep 300 & until found=$({LISTENING}) && [ "$found" ]; do sleep 0.2; done; kill $!; echo "$found"'
    of_srun = cluster.on("login1", "sh", "-c", ask).split()
    assert {place.rpartition(":")[0] for place in of_srun} == {addresses["login1"]}, of_srun


LISTENING = "ss -ltnH '( sport = :6817 or sport = :6818 or sport >= :60001 )' | awk '{print $4}'"
"""Where Slurm's daemons listen on a host, and srun. What the kernel chooses for others is below."""


def listening(cluster: Cluster, host: str) -> set[str]:
    return set(cluster.on(host, "sh", "-c", LISTENING).split())


def test_slurm_ports_are_closed_from_outside(cluster: Cluster) -> None:
    [host] = [line.split() for line in cluster.on("fish1", "getent", "hosts", "controller").splitlines()]
    probe = ["python3", "-c", f"import socket; socket.create_connection(('{host[0]}', 6817), 5)"]
    cluster.wait("those inside are let in", lambda: cluster.on("fish1", *probe) == "")
    outside = subprocess.run([*outside_prefix(), *probe], capture_output=True, text=True, timeout=LIMIT)
    assert outside.returncode != 0 and "timed out" in outside.stderr


def test_node_joins_and_leaves_while_a_job_runs(cluster: Cluster) -> None:
    submit = ["sbatch", "--parsable", "--output=/tmp/long.out", "--nodelist=fish1"]
    job = cluster.on("controller", *submit, "--wrap", "for i in $(seq 6000); do sleep 0.5; done").strip()
    cluster.wait("the job runs", lambda: "RUNNING" in cluster.on("controller", "squeue", "-h", "-j", job, "-o", "%T"))

    cluster.edit("count: 2", "count: 3")
    assert cluster.json("up")["created"] == ["fish3"]
    assert cluster.on("controller", "srun", "--nodelist=fish3", "hostname").strip() == "fish3"
    assert "RUNNING" in cluster.on("controller", "squeue", "-h", "-j", job, "-o", "%T")

    until_told = "while [ ! -e /tmp/go ]; do sleep 0.2; done"
    short = cluster.on("controller", "sbatch", "--parsable", "--nodelist=fish3", "--wrap", until_told).strip()
    cluster.wait("it runs", lambda: "RUNNING" in cluster.on("controller", "squeue", "-h", "-j", short, "-o", "%T"))
    cluster.edit("count: 3", "count: 2")
    plan = cluster.json("plan")
    assert plan["cost"] == "drain", plan
    waiting = cluster.json("up", "--drain-timeout", "0", status=3)
    assert waiting["staying"] == ["fish3"] and waiting["removed"] == []
    assert "DRAIN" in cluster.states()["fish3"]
    again = cluster.background("up", "--json")
    cluster.on("fish3", "touch", "/tmp/go")
    result = json.loads(again.communicate(timeout=LIMIT)[0])
    assert result["removed"] == ["fish3"], result
    cluster.wait("Slurm has forgotten it", lambda: set(cluster.states()) == {"fish1", "fish2"})
    assert "JobState=COMPLETED" in cluster.on("controller", "scontrol", "show", "job", short)
    assert "RUNNING" in cluster.on("controller", "squeue", "-h", "-j", job, "-o", "%T")
    cluster.on("controller", "scancel", job)
    assert cluster.json("up")["unchanged"]


def test_partition_changes_while_a_job_runs(cluster: Cluster) -> None:
    submit = ["sbatch", "--parsable", "--output=/dev/null", "--nodelist=fish1", "--wrap", "sleep 3000"]
    job = cluster.on("controller", *submit).strip()
    cluster.wait("the job runs", lambda: "RUNNING" in cluster.on("controller", "squeue", "-h", "-j", job, "-o", "%T"))
    text = cluster.file.read_text()
    more = "partitions:\n  main: {nodesets: [fish], default: true}\n  short: {nodesets: [fish], max_time: '00:10:00'}\n"
    cluster.file.write_text(text + more)
    plan = cluster.json("plan")
    assert plan["cost"] == "nothing", plan
    cluster.json("up")
    assert "00:10:00" in cluster.on("controller", "scontrol", "show", "partition", "short")
    assert "RUNNING" in cluster.on("controller", "squeue", "-h", "-j", job, "-o", "%T")
    assert cluster.on("login1", "srun", "-p", "short", "hostname").startswith("fish")
    cluster.on("controller", "scancel", job)
    cluster.file.write_text(text)
    cluster.json("up")


def test_wrong_key_on_a_host_is_reported_and_replaced(cluster: Cluster) -> None:
    new_key = f"head -c 1024 /dev/urandom > {KEY}"
    break_it = f"{new_key}; systemctl restart munge; systemctl restart --no-block slurmd"
    cluster.on("fish2", "sh", "-c", break_it, status=None)
    plan = cluster.json("plan")
    assert {(change["host"], change["what"]) for change in plan["changes"]} >= {("fish2", f"file {KEY}")}
    shown = cluster.shoal("plan", "--diff").stdout
    assert "(secret)" in shown
    assert cluster.json("up")["changed"] == ["fish2"]
    assert sorted(cluster.on("controller", "srun", "-N2", "hostname").split()) == ["fish1", "fish2"]


def test_hosts_recover_after_a_reboot(cluster: Cluster) -> None:
    for host in ("fish1", "controller"):
        cluster.fault("reboot", host)
        cluster.wait(f"{host} is back", lambda host=host: cluster.answers(host))  # type: ignore[misc]
        cluster.wait("both nodes take jobs", lambda: len(cluster.on("controller", *READY, status=None).split()) == 2)
    result = cluster.json("up")
    assert result["whole"], result


def test_unreachable_host_does_not_stop_the_others(cluster: Cluster) -> None:
    for host in ("fish1", "fish2"):
        cluster.on(host, "sh", "-c", "echo broken > /etc/default/slurmd; apt-get -qq remove -y slurmd")
    cluster.on("fish2", "sh", "-c", HOLD_APT)  # so that it cannot be done before it is cut off
    process = cluster.background("up")
    read_until(process, "compare")
    cluster.fault("cut", "fish2")
    try:
        output, _ = process.communicate(timeout=LIMIT)
        assert process.returncode == 3, output
        assert "fish2: " in output and "fix:" in output, output
        assert "--conf-server" in cluster.on("fish1", "cat", "/etc/default/slurmd")
        assert "fish2" in cluster.states(), "a host that does not answer keeps its place in Slurm"
    finally:
        cluster.fault("heal", "fish2")
    cluster.wait("fish2 is back", lambda: cluster.answers("fish2"))
    cluster.on("fish2", "sh", "-c", RELEASE_APT)
    assert cluster.json("up")["whole"]


def test_exec_groups_equal_outputs(cluster: Cluster) -> None:
    done = cluster.shoal("exec", "--", "sh", "-c", "test -e /etc/default/slurmd && echo node || echo none")
    assert "fish[1-2] (2)\nnode" in done.stdout
    assert "controller,login1 (2)\nnone" in done.stdout


def test_node_can_be_drained_and_resumed(cluster: Cluster) -> None:
    cluster.shoal("node", "drain", "fish1", "fish2", "--reason", "a new fan")
    assert all("DRAIN" in flags for flags in cluster.states().values())
    assert "a new fan" in cluster.shoal("status").stdout
    assert cluster.json("up")["unchanged"], "a node that a person drained stays drained"
    assert all("DRAIN" in flags for flags in cluster.states().values())
    cluster.shoal("node", "resume", "fish1", "fish2")
    assert not any("DRAIN" in flags for flags in cluster.states().values())


def test_ssh_runs_a_command(cluster: Cluster) -> None:
    assert cluster.shoal("ssh", "fish1", "--", "hostname").stdout == "fish1\n"


def test_down_is_rejected_while_jobs_run_and_removes_everything(cluster: Cluster) -> None:
    cluster.on("controller", "sbatch", "--output=/dev/null", "--wrap", "sleep 3000")
    cluster.wait("it runs", lambda: "RUNNING" in cluster.on("controller", "squeue", "-h", "-o", "%T"))
    refused = cluster.shoal("down", status=1)
    assert "running job" in refused.stderr and "--force" in refused.stderr
    cluster.shoal("down", "--force")
    layout = Layout(cluster.provider.cache, cluster.name)
    # The kernel takes a moment to drop a link or a loop device.
    cluster.wait("nothing is left", lambda: nothing_is_left_of(layout), 60)
    assert not layout.dir.exists()
    assert cluster.shoal("status", status=1).stderr.count("run `shoal up`") == 1


def nothing_is_left_of(layout: Layout) -> bool:
    """Whether this machine has no link, namespace, rule, mount, loop device or process of a cluster any more."""
    seen: list[str] = []
    looks = [["ip", "-o", "link"], ["ip", "netns"], ["mount"]]
    looks += [["losetup", "-l"], ["nft", "list", "tables"]] if os.geteuid() == 0 else []
    looks += engine_lists(KIND) if KIND in ENGINES else []
    for look in looks:
        seen += subprocess.run(look, capture_output=True, text=True, check=True, timeout=LIMIT).stdout.splitlines()
    left = [line for line in seen if any(name in line for name in (layout.id, layout.table, str(layout.dir)))]
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            left += [line] if str(layout.dir) in (line := path.read_bytes().decode(errors="replace")) else []
    assert not left, left
    return True
