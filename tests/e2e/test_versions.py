"""Hosts with different Slurm releases work together. test_existing_hosts.py has those that cannot.

The last test is for releases on virtual machines, which have cgroup v2 with device confinement; containers have not.
"""

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, running
from tests.e2e.test_cluster import RELEASES
from tests.e2e.test_vm import SLOW, assert_confined

COVERS = "slurm/versions slurm/conf plan/diff roles/compute"
pytestmark = pytest.mark.sandbox

MIXED = """\
cluster: x-mixed
controller: {provider: sandbox, image: sid, memory: 1G}
nodesets:
  old: {provider: sandbox, image: debian13, count: 1, gpus: 1, memory: 512M}
  new: {provider: sandbox, image: sid, count: 1, memory: 512M}
"""


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with running(tmp_path_factory.mktemp("mixed"), MIXED) as made:
        yield made


def test_nodes_of_two_releases_run_a_job_together(mixed: Cluster) -> None:
    versions = {node["name"]: node["version"][:5] for node in mixed.json("status")["nodes"]}
    assert versions == {"old1": "24.11", "new1": "26.05"}
    assert sorted(mixed.on("controller", "srun", "-N2", "hostname").split()) == ["new1", "old1"]
    gpu = ["srun", "-w", "old1", "--gpus=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES"]
    assert mixed.on("controller", *gpu) == "0\n"


def test_both_releases_accept_the_same_slurm_conf(mixed: Cluster) -> None:
    written = mixed.on("controller", "cat", "/etc/slurm/slurm.conf")
    fetched = mixed.json("exec", "--nodeset", "old", "--", "cat", "/run/slurm/conf/slurm.conf")["groups"]
    fetched += mixed.json("exec", "--nodeset", "new", "--", "cat", "/run/slurm/conf/slurm.conf")["groups"]
    assert [group["stdout"] for group in fetched] == [written, written]
    logs = mixed.json("exec", "--", "sh", "-c", "cat /var/log/slurm/slurm*.log")["groups"]
    assert len(logs) == 3
    for group in logs:
        errors = [line for line in group["stdout"].splitlines() if "arsing error" in line or "nrecognized" in line]
        assert not errors, (group["hosts"], errors)


def test_second_up_of_a_mixed_cluster_has_no_changes(mixed: Cluster) -> None:
    assert mixed.json("plan")["changes"] == []
    assert mixed.json("up")["unchanged"]


def test_users_reach_a_host_whose_sshd_systemd_starts(mixed: Cluster, tmp_path: Path) -> None:
    """As on Ubuntu, systemd has the port; sshd of OpenSSH 10 ends when it is told to reload there."""
    mixed.on("old1", "systemctl", "unmask", "ssh.socket")
    mixed.on("old1", "systemctl", "enable", "ssh.socket")
    mixed.on("old1", "systemd-run", "--quiet", "--wait", "sh", "-c", "systemctl stop ssh && systemctl start ssh.socket")
    key = tmp_path / "ann"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", key], check=True)
    mixed.file.write_text(mixed.file.read_text() + f'users: {{ann: {{uid: 2001, keys: ["file:{key}.pub"]}}}}\n')
    mixed.json("up")
    assert mixed.on("old1", "systemctl", "is-active", "ssh.socket") == "active\n"
    options = ["-i", key, "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=no", "-o", "UserKnownHostsFile=/dev/null"]
    login = ["ssh", "-q", *options, f"ann@{mixed.addresses()['old1']}", "id", "-un"]
    assert subprocess.run(login, check=True, capture_output=True, text=True).stdout == "ann\n"
    assert mixed.json("up")["unchanged"]


MACHINE = """\
cluster: vm-{image}
sandbox: vm
controller: {{provider: sandbox, image: {image}, compute: true, gpus: 2, cpus: 2, memory: 1G}}
"""
CGROUP_SETTINGS = ("proctrack/cgroup", "task/affinity", "task/cgroup")
EATS = "eaten = []\nwhile True: eaten.append(bytearray(1 << 20))\n"


@pytest.mark.matrix
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("image", ["debian13", "sid"])
def test_release_confines_jobs_on_cgroup_v2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, image: str) -> None:
    begin = time.monotonic()
    with running(tmp_path, MACHINE.format(image=image), timeout=SLOW) as cluster:
        up_s = time.monotonic() - begin
        status = cluster.json("status", timeout=SLOW)
        assert status["version"].startswith(RELEASES[image]), status["version"]
        in_force = cluster.on("controller", "scontrol", "show", "config")
        assert all(setting in in_force for setting in CGROUP_SETTINGS), in_force
        assert_confined(cluster, "controller")
        monkeypatch.chdir(tmp_path)
        Path("eats.py").write_text(EATS)
        result = cluster.json(
            "run", "--wait", "--gpus-per-node", "0", "--mem", "100M", "eats.py", status=1, timeout=SLOW
        )
        assert result["reason"]["kind"] == "out of memory", result
        again = cluster.json("up", timeout=SLOW)
        assert again["whole"] and not again["changed"], again
        kernel = cluster.on("controller", "uname", "-r").strip()
        took = time.monotonic() - begin
        print(f"\nSlurm {status['version']} on cgroup v2, kernel {kernel}: confined; up {up_s:.0f} s, all {took:.0f} s")
