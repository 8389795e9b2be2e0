"""A container that only a tunnel reaches: it joins, runs jobs, loses and regains its connection, and is removed.

The container is a sandbox host without systemd, TUN and mount rights, behind one mapped port. The spec
names it by that address and port like any host; Shoal detects that it is a container.
"""

import asyncio
import subprocess
from collections.abc import Iterator

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.existing_hosts import Lent, lent_hosts
from tests.sandbox_faults import SandboxFaults

from shoal.local_files import cache_dir
from shoal.spec.member import Shape

COVERS = (
    "network/tunnel remote/tunnel.sh remote/tunnel_end.sh remote/tunnel_removal.sh remote/boot_container.sh "
    "remote/start.py remote/agent/supervise.py"
)
pytestmark = [pytest.mark.sandbox, pytest.mark.timeout(400)]

MADE = "t-reduced"
SPEC = """\
cluster: reduced
controller: {{host: {{name: ctl, address: {ctl}}}, user: root, identity: {identity}}}
nodesets:
  lab: {{hosts: [{{name: n1, address: {n1}}}], user: root, identity: {identity}}}
  pods: {{hosts: [{pod}, {pod2}], user: root, identity: {identity}}}
storage:
  /data: {{host: controller}}
"""
JOB = """\
#!/bin/sh
echo gpus $CUDA_VISIBLE_DEVICES
srun --ntasks=2 sh -c 'echo task $SLURM_PROCID of $SLURM_NTASKS on $(hostname)'
"""

COPYING = """\
#!/bin/sh
set -e
/usr/local/lib/shoal/stage in
cat /data/in
echo back > /data/out
/usr/local/lib/shoal/stage out
"""


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    shapes = {
        "ctl": Shape(memory_mb=512),
        "n1": Shape(memory_mb=512, cgroups=True),
        "pod": Shape(memory_mb=512, gpus=2, container=True),
        "pod2": Shape(memory_mb=512, container=True),
    }
    with lent_hosts(MADE, shapes) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(lent: Lent, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    targets = [instance.target for instance in lent.instances.values()]
    plain = {target.name: target.address for target in targets}
    mapped = {
        target.name: f"{{name: {target.name}, address: {target.address}, port: {target.port}}}" for target in targets
    }
    text = SPEC.format(identity=lent.identity, **plain | {name: mapped[name] for name in ("pod", "pod2")})
    made = Cluster(tmp_path_factory.mktemp("reduced"), text)
    assert made.json("up", timeout=200)["whole"]
    return made


def ran(cluster: Cluster, script: str, *options: str) -> str:
    """Submit a job to the containers' partition and wait for its end; what it wrote is in the container."""
    arguments = [
        "timeout",
        "60",
        "sbatch",
        "--wait",
        "-p",
        "pods",
        "-w",
        "pod",
        "--chdir=/tmp",
        "-o",
        "/tmp/out",
        *options,
    ]
    cluster.on("ctl", "sh", "-c", 'printf "%s" "$1" > /tmp/job; shift; exec "$@" /tmp/job', "sh", script, *arguments)
    return cluster.on("pod", "cat", "/tmp/out")


def test_container_joins_and_job_confinement_of_the_others_stays(cluster: Cluster) -> None:
    states = cluster.states()
    assert "IDLE" in states["pod"] and "IDLE" in states["pod2"]
    conf = cluster.on("ctl", "cat", "/etc/slurm/slurm.conf")
    assert "ProctrackType=proctrack/cgroup" in conf
    [pods] = [line for line in conf.splitlines() if line.startswith("PartitionName=pods")]
    assert "Nodes=pod,pod2 " in pods and " MaxNodes=1 " in pods
    assert "\nPartitionName=main Nodes=n1 " in conf
    assert cluster.on("ctl", "srun", "-w", "n1", "hostname").strip() == "n1"
    assert cluster.json("up", timeout=100)["unchanged"]


def test_container_port_listens_only_on_the_controller_loopback(cluster: Cluster) -> None:
    [line] = [line for line in cluster.on("ctl", "ss", "-ltnH").splitlines() if ":29001" in line]
    assert line.split()[3] == "127.0.0.1:29001"


def test_tunnel_key_permits_nothing_else(cluster: Cluster) -> None:
    ssh = "ssh -F /etc/shoal/tunnels/pod.conf -o ClearAllForwardings=yes tunnel"
    assert cluster.on("ctl", "sh", "-c", f"{ssh} cat /etc/munge/munge.key | wc -c").strip() == "0"
    other = "ssh -F /etc/shoal/tunnels/pod.conf -o ClearAllForwardings=yes -W 127.0.0.1:22 tunnel < /dev/null"
    assert "prohibited" in cluster.on("ctl", "sh", "-c", f"{other} 2>&1", status=None)


def test_batch_job_runs_steps_in_the_container_with_its_gpus(cluster: Cluster) -> None:
    output = ran(cluster, JOB, "--ntasks=2", "--gpus=2").splitlines()
    assert sorted(output) == ["gpus 0,1", "task 0 of 2 on pod", "task 1 of 2 on pod"]


def test_share_is_copied_through_the_tunnel_and_results_return(cluster: Cluster) -> None:
    cluster.on("ctl", "sh", "-c", "echo from the controller > /data/in; chmod 666 /data/in")
    assert ran(cluster, COPYING) == "from the controller\n"
    assert cluster.on("ctl", "cat", "/data/out") == "back\n"


def test_job_that_ends_while_the_tunnel_is_cut_completes_after_reconnection(cluster: Cluster) -> None:
    faults = SandboxFaults(cache_dir())
    wrap = "srun echo begun; sleep 3; echo ended while cut off"
    job = cluster.on("ctl", "sbatch", "--parsable", "-p", "pods", "-w", "pod", "-o", "/tmp/cut", "--wrap", wrap).strip()
    cluster.wait("it runs", lambda: "begun" in cluster.on("pod", "cat", "/tmp/cut"), 60)
    asyncio.run(faults.cut(MADE, "pod"))
    try:
        gone = "ss -ltnH | grep -c 127.0.0.1:29001; true"
        cluster.wait("ssh gives up", lambda: cluster.on("ctl", "sh", "-c", gone).strip() == "0", 60)
    finally:
        asyncio.run(faults.heal(MADE, "pod"))
    look = ("scontrol", "show", "job", job)
    cluster.wait("it is done", lambda: "JobState=COMPLETED" in cluster.on("ctl", *look), 90)
    assert cluster.on("pod", "cat", "/tmp/cut") == "begun\nended while cut off\n"
    assert "task 1 of 2 on pod" in ran(cluster, JOB, "--ntasks=2")


def test_new_tunnel_connection_ends_a_stale_connection(cluster: Cluster) -> None:
    """As the service does before it connects: the old one would keep the ports."""
    holding = "pgrep -P $(systemctl show -p MainPID --value shoal-tunnel@pod) ssh; true"
    before = cluster.on("ctl", "sh", "-c", holding).strip()
    assert before
    cluster.on("ctl", "ssh", "-F", "/etc/shoal/tunnels/pod.conf", "-o", "ClearAllForwardings=yes", "tunnel", "clear")
    cluster.wait("the old one has ended", lambda: cluster.on("ctl", "sh", "-c", holding).strip() != before, 60)
    assert "task 1 of 2 on pod" in ran(cluster, JOB, "--ntasks=2")


def test_node_remove_leaves_nothing_in_the_container(cluster: Cluster, lent: Lent) -> None:
    assert cluster.json("node", "remove", "pod", timeout=150)["removed"] == ["pod"]
    conf = cluster.on("ctl", "cat", "/etc/slurm/slurm.conf")
    assert "NodeName=pod " not in conf and "NodeName=pod2 " in conf
    assert cluster.on("ctl", "sh", "-c", "systemctl is-active shoal-tunnel@pod; true").strip() == "inactive"
    assert "pod." not in cluster.on("ctl", "ls", "/etc/shoal/tunnels")
    assert ":29001 " not in cluster.on("ctl", "ss", "-ltnH")
    target = lent.instances["pod"].target
    left = subprocess.run(
        ["ssh", "-q", "-i", lent.identity, "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null",
         "-p", str(target.port), f"root@{target.address}",
         "pgrep -l 'slurm|munge|supervise'; ls /etc/munge/munge.key /etc/slurm/slurm.conf /etc/shoal/tunnel-end; "
         "grep -c shoal /root/.ssh/authorized_keys /etc/hosts"],
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert left.stdout == "/root/.ssh/authorized_keys:0\n/etc/hosts:0\n", left
