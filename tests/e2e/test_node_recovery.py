"""What nodes do about themselves where the file says so: a training whose rank stops, and a GPU without its driver.

The training is real: gloo between two nodes, as an ordinary user. The GPU is simulated: a device on a simulated PCI
bus, and small packages with the names of the driver's, whose "driver" works after a boot.
"""

import base64
import hashlib
import json
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests import nvml
from tests.e2e.cluster import LIMIT, ON_DEBIAN_12, Cluster, login_keys, running
from tests.e2e.test_lab import Client, joined_clients
from tests.e2e.torch_env import give_torch

from shoal.remote import nvidia_smi
from shoal.remote.node_health.gpu_driver import DEBIAN_PACKAGES

COVERS = "roles/node_health roles/gpu_driver remote/node_health jobs/hang train/progress.py"
pytestmark = [pytest.mark.sandbox, pytest.mark.matrix, ON_DEBIAN_12]

SPEC = """\
cluster: j-recovery
controller: {provider: sandbox, memory: 1G}
nodesets:
  fish: {provider: sandbox, count: 3, memory: 1G}
accounting: true
health: {mode: warn, hung_jobs: requeue, hung_after: 1m}
slurm: {options: {HealthCheckInterval: 5}}
users:
  alice: {uid: 2001, keys: ["file:KEYS/alice.pub"]}
"""
TRAIN = """\
import os, time
import torch
import torch.distributed as dist
from shoal.train import init
from shoal.train.progress import Progress

def read_shard(step):
    if step == 12 and dist.get_rank() == 1 and not int(os.environ.get("SLURM_RESTART_COUNT") or 0):
        while True:
            time.sleep(60)

init()
progress = Progress(20)
for step in range(1, 21):
    time.sleep(0.5)
    read_shard(step)
    value = torch.ones(1)
    dist.all_reduce(value)
    progress.step(step, loss=value)
progress.close()
print("all steps done", flush=True)
"""
HEALTH = "/var/lib/shoal/health"
Lab = tuple[Cluster, Client]


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    place = tmp_path_factory.mktemp("recovery")
    with login_keys("alice") as keys, running(place, SPEC.replace("KEYS", str(keys))) as made:
        give_torch(made.name)
        yield made, joined_clients(made, keys, "alice")[0]


def shell(cluster: Cluster, host: str, text: str) -> str:
    return cluster.on(host, "sh", "-c", text)


def fields(cluster: Cluster, job: str) -> dict[str, str]:
    words = cluster.on("controller", "scontrol", "show", "job", "-o", job).split()
    return dict(word.partition("=")[::2] for word in words)


def evidence(client: Cluster | Client, job: str) -> list[str]:
    findings = client.json("doctor", "--job", job, status=None)["findings"]
    return [line for finding in findings if finding["id"] == "job-hung" for line in finding["evidence"]]


def test_training_that_hangs_runs_on_without_the_node_of_the_rank_behind(lab: Lab) -> None:
    cluster, alice = lab
    (alice.tree / "train.py").write_text(TRAIN)
    options = ("-N2", "--launcher", "srun", "--export", "PYTHONPATH=/shared/env", "--export", "OMP_NUM_THREADS=1")
    job = alice.run(*options)
    cluster.wait("the training hangs", lambda: any(line.startswith("behind: ") for line in evidence(alice, job)))
    first, second = cluster.on("controller", "scontrol", "show", "hostnames", fields(cluster, job)["NodeList"]).split()
    for client in (alice, cluster):
        silence, behind, waiting = evidence(client, job)
        assert silence.startswith("no step for 1 min") and silence.endswith("the last was 11")
        assert behind.startswith(f"behind: rank 1 on {second} (pid ") and ", step 11): read_shard (train.py:" in behind
        assert waiting.startswith(f"rank 0 on {first} (pid ") and "distributed_c10d.py" in waiting
    assert "PENDING" not in fields(cluster, job)["JobState"], "to ask does not disturb it"
    shell(cluster, first, "systemctl start shoal-health")
    findings = json.loads(shell(cluster, first, f"cat {HEALTH}/result.json"))["findings"]
    [text] = [finding["evidence"][0] for finding in findings if finding["id"] == "training-hung"]
    assert text.startswith(f"job {job}: rank 0 (pid ") and "user alice" in text
    cluster.wait("it is queued again", lambda: fields(cluster, job)["Restarts"] == "1")
    cluster.wait("it ends", lambda: fields(cluster, job)["JobState"] == "COMPLETED")
    after = fields(cluster, job)
    assert after["ExcNodeList"] == second
    nodes = cluster.on("controller", "scontrol", "show", "hostnames", after["NodeList"]).split()
    assert len(nodes) == 2 and second not in nodes
    log = alice.shoal("logs", job).stdout
    assert "all steps done" in log and f"rank 1 on {second} hangs; queued again without {second}" in log, log
    assert cluster.states()[second] == {"IDLE"}, "the node itself is not drained"


BUS = """\
[Unit]
Before=slurmd.service
[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/bin/sh -c 'd=/sys/bus/pci/devices; mount -t tmpfs bus $d && mkdir $d/0000:41:00.0 && \
echo 0x10de > $d/0000:41:00.0/vendor && echo 0x030200 > $d/0000:41:00.0/class'
[Install]
WantedBy=multi-user.target
"""
LOAD = """\
[Unit]
Before=slurmd.service
[Service]
Type=oneshot
ExecStart=/bin/sh -c 'cd /usr/share/simulated-nvidia; cp -a lib*.so.1 /usr/lib/; cp shoal-* /etc/; ldconfig'
"""


def packages(place: Path, library: Path) -> str:
    """A repository with small packages that have the names of the driver's; as a tar archive in base64."""
    repository = place / "debs"
    repository.mkdir()
    index = []
    for name in (*DEBIAN_PACKAGES, "linux-headers-amd64", "linux-headers-arm64"):
        root = place / name
        (root / "DEBIAN").mkdir(parents=True)
        control = f"Package: {name}\nVersion: 999\nArchitecture: all\nMaintainer: test\nDescription: simulated\n"
        (root / "DEBIAN/control").write_text(control)
        if name == "nvidia-smi":
            for folder in ("usr/bin", "usr/share/simulated-nvidia", "etc/systemd/system/multi-user.target.wants"):
                (root / folder).mkdir(parents=True)
            (root / "usr/bin/nvidia-smi").write_bytes(Path(nvidia_smi.__file__).read_bytes())
            (root / "usr/bin/nvidia-smi").chmod(0o755)
            data = root / "usr/share/simulated-nvidia"
            (data / "libnvidia-ml.so.1").write_bytes(library.read_bytes())
            (data / "shoal-nvml").write_text(nvml.answers({}) + "\n")
            (data / "shoal-gpus").write_text("0, GPU-1, NVIDIA L4, 23034\n")
            (root / "etc/systemd/system/simulated-nvidia.service").write_text(LOAD)
            wants = root / "etc/systemd/system/multi-user.target.wants/simulated-nvidia.service"
            wants.symlink_to("../simulated-nvidia.service")
        deb = repository / f"{name}.deb"
        line = ["dpkg-deb", "--root-owner-group", "--build", str(root), str(deb)]
        subprocess.run(line, check=True, capture_output=True, timeout=LIMIT)
        digest = hashlib.sha256(deb.read_bytes()).hexdigest()
        index.append(f"{control}Filename: ./{name}.deb\nSize: {deb.stat().st_size}\nSHA256: {digest}\n")
    (repository / "Packages").write_text("\n".join(index))
    archive = subprocess.run(["tar", "-C", str(repository), "-cz", "."], check=True, capture_output=True, timeout=LIMIT)
    return base64.b64encode(archive.stdout).decode()


def reason_of(cluster: Cluster) -> str:
    return cluster.on("controller", "sinfo", "-h", "-N", "-n", "fish3", "-o", "%T %E").strip().replace("*", "")


def boot_id(cluster: Cluster) -> str:
    return cluster.on("fish3", "cat", "/proc/sys/kernel/random/boot_id")


def test_driver_is_installed_and_its_node_reboots_when_its_job_has_ended(lab: Lab, tmp_path: Path) -> None:
    cluster, alice = lab
    shell(cluster, "fish3", f"printf %s {shlex.quote(BUS)} > /etc/systemd/system/simulated-bus.service; "
          "systemctl enable --now simulated-bus; systemctl start shoal-health")  # fmt: skip
    found = {one["id"]: one for one in cluster.json("doctor", status=1)["findings"] if one["host"] == "fish3"}
    [text] = found["gpu-driver"]["evidence"]
    assert text.startswith("0000:41:00.0: driver none; `driver: nvidia` in the file installs linux-headers-")
    archive = packages(tmp_path, nvml.build(tmp_path))
    source = "deb [trusted=yes] file:/srv/debs ./"
    put = f"mkdir /srv/debs && echo {archive} | base64 -d | tar -C /srv/debs -xz"
    shell(cluster, "fish3", f"{put}; echo '{source}' > /etc/apt/sources.list.d/simulated.list; apt-get -q update")
    (alice.tree / "train.py").write_text("import time\ntime.sleep(900)\n")
    job = alice.run("-w", "fish3", "--launcher", "python")
    cluster.wait("the job runs", lambda: alice.state(job) == "RUNNING")
    before = boot_id(cluster)
    cluster.edit("count: 3, ", "count: 3, driver: nvidia, ")
    planned = cluster.shoal("plan", status=None).stdout
    assert "nvidia-driver" in planned and "node drained" in planned, planned
    cluster.shoal("up", "--yes")
    assert cluster.on("fish3", "nvidia-smi", "-L", status=None) == "No devices were found\n"
    shell(cluster, "fish3", "systemctl start shoal-health")
    drain = "draining shoal: health: driver-reboot: the NVIDIA driver is installed"
    cluster.wait("its hook drains the node", lambda: reason_of(cluster).startswith(drain))
    assert boot_id(cluster) == before and alice.state(job) == "RUNNING", "not under a job"
    alice.shoal("cancel", job)
    cluster.wait("the job ends", lambda: reason_of(cluster).startswith("drained "))
    # The timer would do it within five minutes.
    shell(cluster, "fish3", "systemctl start shoal-health")
    cluster.wait("it reboots", lambda: boot_id(cluster) != before)
    assert "GPU 0: NVIDIA L4" in cluster.on("fish3", "nvidia-smi", "-L")
    cluster.wait("the node is resumed", lambda: reason_of(cluster) == "idle none")
    assert not [one for one in cluster.json("doctor", status=None)["findings"] if one["id"].startswith("gpu-driver")]
