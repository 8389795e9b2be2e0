"""Hosts that Shoal did not make, reached by SSH as a user with sudo: first meeting, strangers, full disks, giving back.

They are sandbox hosts all the same, but the spec names them by address, as it would any server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.cluster import Cluster
from tests.e2e.lent import Lent, lent_hosts, spec_text

from shoal.providers.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape

pytestmark = pytest.mark.sandbox

MADE = "t-lent"


@pytest.fixture(scope="module")
def lent() -> Iterator[Lent]:
    shapes = {
        "desk": Shape(gpus=1, memory_mb=1024),
        "gpu1": Shape(gpus=1, memory_mb=1024),
        "small": Shape(memory_mb=1024, disk_mb=1500),
    }
    with lent_hosts(MADE, shapes) as made:
        yield made


@pytest.fixture(scope="module")
def cluster(lent: Lent, tmp_path_factory: pytest.TempPathFactory) -> Cluster:
    text = spec_text("lent", lent, "desk", ("gpu1", "small"), compute=True)
    return Cluster(tmp_path_factory.mktemp("lent"), text)


def test_a_full_disk_on_one_host_does_not_stop_the_others(cluster: Cluster) -> None:
    faults = SandboxProvider().faults
    asyncio.run(faults.fill_disk(MADE, "small"))
    try:
        done = cluster.shoal("up", status=3, timeout=600)
        assert "small: " in done.stdout and "No space left on device" in done.stdout, done.stdout
    finally:
        asyncio.run(faults.empty_disk(MADE, "small"))
    states = cluster.states()
    assert "IDLE" in states["desk"] and "IDLE" in states["gpu1"], states


def test_up_works_through_sudo_and_the_controller_computes(cluster: Cluster) -> None:
    assert cluster.json("up", timeout=600)["whole"]
    names = cluster.on("desk", "srun", "-N3", "hostname").split()
    assert sorted(names) == ["desk", "gpu1", "small"]
    gpu = cluster.on("desk", "srun", "-N2", "--gpus-per-node=1", "sh", "-c", "echo $CUDA_VISIBLE_DEVICES").split()
    assert gpu == ["0", "0"]
    assert cluster.json("up")["unchanged"]


def test_a_changed_host_key_is_refused_until_it_is_forgotten(cluster: Cluster) -> None:
    renew = (
        "rm /etc/ssh/ssh_host_*; ssh-keygen -q -t ed25519 -N '' -f /etc/ssh/ssh_host_ed25519_key; systemctl restart ssh"
    )
    cluster.on("gpu1", "sh", "-c", renew, status=None)
    refused = cluster.shoal("up", status=3)
    assert "gpu1: " in refused.stdout and "key" in refused.stdout and "SHA256:" in refused.stdout, refused.stdout
    assert "--forget-key" in refused.stdout
    cluster.shoal("ssh", "--forget-key", "gpu1")
    assert cluster.json("up")["whole"]


def test_a_user_without_sudo_is_named_with_the_fix(cluster: Cluster) -> None:
    cluster.on("gpu1", "mv", "/etc/sudoers.d/shoal", "/root/shoal.sudoers", status=None)
    done = cluster.shoal("up", status=3)
    assert "gpu1: " in done.stdout and "sudo" in done.stdout and "NOPASSWD" in done.stdout, done.stdout


def test_down_gives_the_hosts_back_without_us(cluster: Cluster, lent: Lent) -> None:
    lent.shell("gpu1", "mv /root/shoal.sudoers /etc/sudoers.d/shoal")
    refused = cluster.shoal("down", status=2)
    assert "--yes" in refused.stderr
    cluster.shoal("down", "--yes")
    traces = (
        "ls -A /etc/munge /etc/shoal; ls /etc/slurm/*.conf; grep shoal /etc/hosts /etc/default/slurmd; nft list tables"
    )
    left = cluster.json("exec", "--", "sh", "-c", f"({traces}) 2>/dev/null", status=None)
    # Debian's own package brings plugstack.conf.
    found = {tuple(group["stdout"].split()) for group in left["groups"]}
    assert found == {("/etc/munge:", "/etc/shoal:", "/etc/slurm/plugstack.conf")}, found
    active = cluster.json("exec", "--", "systemctl", "is-active", "slurmd", "slurmctld", "munge", status=None)
    assert all("active" not in group["stdout"].split() for group in active["groups"])


def test_the_secret_is_in_no_output(cluster: Cluster, tmp_path: Path) -> None:
    """Built again, with everything that the command prints kept and searched for the key."""
    said = cluster.shoal("up", "--json", timeout=600).stdout + cluster.shoal("plan", "--diff").stdout
    key = cluster.on("desk", "base64", "-w0", "/etc/munge/munge.key").strip()
    raw = cluster.on("desk", "od", "-An", "-tx1", "-v", "/etc/munge/munge.key").replace(" ", "").replace("\n", "")
    assert len(key) > 1000
    assert key not in said and raw not in said
    arguments = cluster.json("exec", "--", "sh", "-c", "cat /proc/*/cmdline | tr '\\0' ' '")
    assert all(key[:40] not in group["stdout"] for group in arguments["groups"])
