"""Hosts with different Slurm releases: inside the window they work together, outside it no host changes.

The last test is for releases on virtual machines, which have cgroup v2 with device confinement; containers have not.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster, running
from tests.e2e.existing_hosts import Lent, lent_hosts, spec_text
from tests.e2e.test_cluster import RELEASES
from tests.e2e.test_vm import SLOW, assert_confined

from shoal.spec.member import Shape

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


@pytest.fixture(scope="module")
def two() -> Iterator[Lent]:
    shapes = {"twelve": Shape(image="debian12", memory_mb=512), "thirteen": Shape(image="debian13", memory_mb=512)}
    with lent_hosts("x-window-made", shapes, "x-window") as lent:
        for name in shapes:
            # Not before all of it has started: what boots writes files too, and so does what runs once a day.
            lent.shell(name, "systemctl is-system-running --wait; systemctl stop '*.timer'; touch /root/before")
        yield lent


OUTSIDE = {
    "too old": (
        "thirteen",
        "twelve",
        [
            "twelve: Slurm too old for the controller's",
            "Slurm 22.05.8; the controller thirteen has 24.11.5 and talks to 23.02 to 24.11",
            "install Slurm 23.02 to 24.11 on twelve; or take twelve out of the spec",
        ],
    ),
    "newer": (
        "twelve",
        "thirteen",
        [
            "thirteen: Slurm newer than the controller's",
            "Slurm 24.11.5; the controller twelve has 22.05.8 and talks to 22.05",
            "install Slurm 22.05 on thirteen; or take thirteen out of the spec",
        ],
    ),
}


@pytest.mark.parametrize("case", list(OUTSIDE))
def test_releases_outside_the_window_are_rejected_and_no_host_changes(two: Lent, tmp_path: Path, case: str) -> None:
    controller, node, texts = OUTSIDE[case]
    cluster = Cluster(tmp_path, spec_text("x-window", two, controller, (node,)))
    output = cluster.shoal("up", status=1).stderr
    assert "cannot talk to each other; nothing was changed" in output
    for text in texts:
        assert text in output, output
    assert cluster.shoal("plan", status=1).stderr.endswith(output.partition("error:")[2])
    findings = cluster.json("check", status=1)["findings"]
    assert f"{node}: " + findings[0]["what"] == texts[0] and findings[0]["host"] == node, findings
    assert cluster.json("up", status=1)["error"] == "VersionWindow"
    for name in (controller, node):
        assert_untouched(two, name)


def assert_untouched(lent: Lent, name: str) -> None:
    """Nothing was installed, no account made, no file written but the agent's own cache and the system's logs."""
    skipped = ("/var/lib/shoal", "/var/log", "/proc", "/sys", "/run", "/dev", "/tmp")
    own = " -o ".join(f"-path {path}" for path in skipped)
    written = lent.shell(name, f"find / \\( {own} \\) -prune -o -newer /root/before -type f -print").split()
    # sshd and sudo remember whom they let in.
    assert [path for path in written if not path.startswith(("/var/lib/sudo/", "/var/lib/systemd/"))] == []
    assert lent.shell(name, "dpkg -l munge slurmd slurmctld slurm-client 2>/dev/null | grep ^ii; true") == ""
    assert lent.shell(name, "ls /etc/munge /etc/slurm /etc/shoal 2>/dev/null; getent passwd munge slurm; true") == ""
    assert lent.shell(name, "nft list tables 2>/dev/null; grep shoal /etc/hosts; true") == ""


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
