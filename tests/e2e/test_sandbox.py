"""Real sandbox hosts: their resources, and the faults they survive."""

import asyncio
import contextlib
import os
import shutil
from collections.abc import Iterator

import pytest
from tests.e2e.leftovers import noted
from tests.e2e.test_sandbox_removal import REQUESTS, quiet, settled, ssh, traces
from tests.sandbox_faults import SandboxFaults

from shoal.errors import ProviderError
from shoal.hosts.provider import Instance, Request
from shoal.sandbox.cgroups import hierarchies, is_v2_only
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape

COVERS = "sandbox"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("systemd-nspawn"), reason="needs root and systemd-nspawn"),
]
CLUSTER = "e2e-sandbox"


@pytest.fixture(scope="module", autouse=True)
def names() -> Iterator[None]:
    """The clusters of this file, should the run be killed."""
    with contextlib.ExitStack() as stack:
        for cluster in (CLUSTER, *(f"e2e-{name}" for name in ("cgroups", "debian13", "sid", "second"))):
            stack.enter_context(noted(cluster))
        yield


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Instance]]:
    """One small cluster for the whole module."""
    sandbox = SandboxProvider()
    asyncio.run(sandbox.destroy(CLUSTER, quiet))
    try:
        made = asyncio.run(sandbox.create(CLUSTER, REQUESTS, quiet))
        yield {instance.name: instance for instance in made}
    finally:
        asyncio.run(sandbox.destroy(CLUSTER, quiet))


@pytest.fixture
def sandbox() -> SandboxProvider:
    return SandboxProvider()


async def test_root_logs_in_and_systemd_is_running(hosts: dict[str, Instance]) -> None:
    for name, instance in hosts.items():
        output = await ssh(instance.target, "whoami; hostname; systemctl is-system-running --wait; cat /proc/1/comm")
        assert output.split() == ["root", name, "running", "systemd"]


async def test_ordinary_user_logs_in_and_becomes_root_by_sudo(hosts: dict[str, Instance]) -> None:
    output = await ssh(hosts["n1"].target, "whoami; sudo -n whoami; ls /home", user="shoal")
    assert output.split() == ["shoal", "root"]  # nothing in /home, which may become a share


async def test_cpus_and_memory_match_the_request(hosts: dict[str, Instance]) -> None:
    output = await ssh(hosts["n1"].target, "nproc; free -m | awk '/^Mem/ {print $2}'")
    assert output.split() == ["1", "700"]
    assert await ssh(hosts["n2"].target, "nproc") == str(len(os.sched_getaffinity(0)))


async def test_memory_above_the_request_cannot_be_used(hosts: dict[str, Instance]) -> None:
    take = 'python3 -c "x = bytearray(900 << 20); print(len(x))"'
    assert "Killed" in await ssh(hosts["n1"].target, f"bash -c '{take}; true'", timeout=60)
    assert await ssh(hosts["n2"].target, take) == str(900 << 20)


async def test_gpus_are_visible_as_devices_and_to_nvidia_smi(hosts: dict[str, Instance]) -> None:
    output = await ssh(hosts["n1"].target, "ls /dev/nvidia*; nvidia-smi --query-gpu=index --format=csv,noheader")
    assert output.split() == ["/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl", "0", "1"]
    assert "not found" in await ssh(hosts["n2"].target, "nvidia-smi -L")


async def test_slurm_installs_without_downloading(hosts: dict[str, Instance]) -> None:
    install = "apt-get install --yes --no-install-recommends slurmd slurmctld slurm-client munge nftables"
    output = await ssh(hosts["n1"].target, f"{install} 2>&1; slurmd -V", timeout=120)
    assert "Need to get 0 B/" in output
    assert output.splitlines()[-1].startswith("slurm-wlm 22.05")


async def test_tun_and_fuse_devices_work(hosts: dict[str, Instance]) -> None:
    assert await ssh(hosts["n1"].target, "ip tuntap add dev t0 mode tun && ip tuntap del dev t0 mode tun") == ""
    assert await ssh(hosts["n1"].target, "test -c /dev/fuse && echo yes") == "yes"


async def test_reboot_from_inside_or_outside_keeps_address_devices_and_memory(
    hosts: dict[str, Instance], sandbox: SandboxProvider
) -> None:
    n1 = hosts["n1"].target
    look = "cat /proc/sys/kernel/random/boot_id; ls /dev/nvidia0; free -m | awk '/^Mem/ {print $2}'"
    boots = {(await ssh(n1, look)).split()[0]}
    await SandboxFaults(sandbox.cache).reboot(CLUSTER, "n1")
    boot, device, memory = (await ssh(n1, look)).split()
    boots.add(boot)
    assert (device, memory) == ("/dev/nvidia0", "700")
    await ssh(n1, "until systemd-run --quiet --on-active=0.1 systemctl reboot; do sleep 0.1; done")
    async with asyncio.timeout(300):
        while len(boots) < 3:
            with contextlib.suppress(OSError):
                # Nothing at all is said by a host that goes down while it is asked.
                boots.update((await ssh(n1, look, timeout=10)).split()[:1])
            await asyncio.sleep(0.1)


async def test_cut_host_is_unreachable_until_healed(hosts: dict[str, Instance], sandbox: SandboxProvider) -> None:
    await SandboxFaults(sandbox.cache).cut(CLUSTER, "n1")
    with pytest.raises((OSError, TimeoutError)):
        await ssh(hosts["n1"].target, "true", timeout=2)
    assert "100% packet loss" in await ssh(hosts["n2"].target, f"ping -c1 -W1 {hosts['n1'].target.address}")
    # It still runs: `create` neither waits for it nor plugs it in again.
    assert [instance.state for instance in await sandbox.create(CLUSTER, REQUESTS, quiet)] == ["running"] * 3
    await SandboxFaults(sandbox.cache).heal(CLUSTER, "n1")
    assert await ssh(hosts["n1"].target, "hostname") == "n1"


async def test_frozen_host_hangs_and_continues_when_thawed(
    hosts: dict[str, Instance], sandbox: SandboxProvider
) -> None:
    await SandboxFaults(sandbox.cache).freeze(CLUSTER, "n1")
    with pytest.raises(TimeoutError):
        await ssh(hosts["n1"].target, "true", timeout=2)
    await SandboxFaults(sandbox.cache).thaw(CLUSTER, "n1")
    assert await ssh(hosts["n1"].target, "hostname") == "n1"


async def test_killed_host_keeps_its_disk_and_its_key(hosts: dict[str, Instance], sandbox: SandboxProvider) -> None:
    for name in ("n1", "n2"):
        await ssh(hosts[name].target, "echo kept > /root/kept")
        await SandboxFaults(sandbox.cache).kill(CLUSTER, name)
    with pytest.raises(ProviderError, match=f"host n1 of sandbox cluster {CLUSTER} is stopped"):
        await SandboxFaults(sandbox.cache).freeze(CLUSTER, "n1")
    again = await sandbox.create(CLUSTER, REQUESTS, quiet)
    assert again == list(hosts.values())
    for name in ("n1", "n2"):
        assert await ssh(hosts[name].target, "cat /root/kept") == "kept"


async def test_frozen_host_can_be_killed(hosts: dict[str, Instance], sandbox: SandboxProvider) -> None:
    await SandboxFaults(sandbox.cache).freeze(CLUSTER, "far")
    await SandboxFaults(sandbox.cache).kill(CLUSTER, "far")
    await sandbox.create(CLUSTER, REQUESTS, quiet)
    assert await ssh(hosts["far"].target, "hostname") == "far"


async def test_host_powered_off_from_inside_is_stopped_and_starts_again(
    hosts: dict[str, Instance], sandbox: SandboxProvider
) -> None:
    await ssh(hosts["far"].target, "systemd-run --quiet --on-active=0.1 systemctl poweroff")
    async with asyncio.timeout(300):
        while (await sandbox.instances(CLUSTER))[2].state != "stopped":  # noqa: ASYNC110 - another process does it
            await asyncio.sleep(0.1)
    await sandbox.create(CLUSTER, REQUESTS, quiet)
    assert await ssh(hosts["far"].target, "hostname") == "far"


async def test_site_behind_nat_opens_connections_and_accepts_none(hosts: dict[str, Instance]) -> None:
    near, far = hosts["n1"].target, hosts["far"].target
    knock = "timeout {} bash -c 'head -c4 < /dev/tcp/{}/22' || echo closed"
    assert await ssh(near, knock.format(3, far.address)) == "closed"
    assert await ssh(far, knock.format(60, near.address)) == "SSH-"
    watch = "python3 -c \"import socket; s = socket.create_server(('', 7777)); print(s.accept()[1][0])\""
    waiting = asyncio.create_task(ssh(near, f"timeout 100 {watch}"))
    await ssh(
        far, f"for i in $(seq 500); do bash -c ': < /dev/tcp/{near.address}/7777' 2>/dev/null && break; sleep 0.1; done"
    )
    peer = await waiting
    assert peer != far.address
    assert peer == str(near.address).rpartition(".")[0] + ".1"


async def test_filled_disk_affects_only_its_host(hosts: dict[str, Instance], sandbox: SandboxProvider) -> None:
    await SandboxFaults(sandbox.cache).fill_disk(CLUSTER, "n2")
    assert "No space left on device" in await ssh(hosts["n2"].target, "echo text > /root/new")
    assert await ssh(hosts["n1"].target, "echo text > /root/new") == ""
    await SandboxFaults(sandbox.cache).empty_disk(CLUSTER, "n2")
    assert await ssh(hosts["n2"].target, "echo text > /root/new; cat /root/new") == "text"
    with pytest.raises(ProviderError, match="cannot fill the disk of host n1: it shares this machine's\n  fix: ask"):
        await SandboxFaults(sandbox.cache).fill_disk(CLUSTER, "n1")


async def test_slurm_can_write_cgroups(sandbox: SandboxProvider) -> None:
    cluster = "e2e-cgroups"
    try:
        [instance] = await sandbox.create(cluster, [Request("n1", Shape(cgroups=True, gpus=2))], quiet)
        groups = " ".join(f"/sys/fs/cgroup/{name}/x" for name in ("freezer", "devices", "cpuset", "pids"))
        if is_v2_only(hierarchies()):
            groups = "/sys/fs/cgroup/x"
        else:
            # Forbidding the second GPU's device number must spare the first one's.
            major, minor = (await ssh(instance.target, "stat -c '%t %T' /dev/nvidia1")).split()
            group = "/sys/fs/cgroup/devices/x"
            deny = (
                f"echo $$ > {group}/cgroup.procs; echo c {int(major, 16)}:{int(minor, 16)} rwm > {group}/devices.deny"
            )
            look = ": < /dev/null && : < /dev/nvidia0 && echo first; : < /dev/nvidia1"
            output = await ssh(instance.target, f"mkdir {groups}; bash -c '{deny}; {look}'; rmdir {groups}")
            assert output.startswith("first")
            assert "/dev/nvidia1: Operation not permitted" in output
        assert await ssh(instance.target, f"mkdir {groups} && rmdir {groups} && echo made") == "made"
        assert await ssh(instance.target, "systemctl is-system-running --wait") == "running"
    finally:
        await sandbox.destroy(cluster, quiet)


@pytest.mark.parametrize(("image", "slurm"), [("debian13", "24.11"), ("sid", "26.05")])
async def test_newer_images_boot_and_reboot_and_have_slurm(sandbox: SandboxProvider, image: str, slurm: str) -> None:
    cluster = f"e2e-{image}"
    try:
        [instance] = await sandbox.create(cluster, [Request("n1", Shape(image=image, memory_mb=500, gpus=1))], quiet)
        await SandboxFaults(sandbox.cache).reboot(cluster, "n1")
        look = "systemctl is-system-running --wait; free -m | awk '/^Mem/ {print $2}'; nvidia-smi -L | wc -l"
        assert (await ssh(instance.target, look)).split() == ["running", "500", "1"]
        assert f"Version: {slurm}." in await ssh(instance.target, "apt-cache show slurmd")
        output = await ssh(instance.target, "apt-get install --yes --simulate --print-uris slurmd slurmctld | head -1")
        assert output
    finally:
        await sandbox.destroy(cluster, quiet)


async def test_second_cluster_and_concurrent_creates_work(hosts: dict[str, Instance], sandbox: SandboxProvider) -> None:
    cluster = "e2e-second"
    layout = Layout(sandbox.cache, cluster)
    before = traces(layout)
    try:
        requests = [Request("n1", Shape())]
        first, second = await asyncio.gather(*(sandbox.create(cluster, requests, quiet) for _ in range(2)))
        assert first == second
        assert first[0].target.address != hosts["n1"].target.address
        assert await ssh(first[0].target, "hostname") == "n1"
        # Two clusters do not reach each other.
        ping = await ssh(first[0].target, f"ping -c1 -W1 {hosts['n1'].target.address}")
        assert "100% packet loss" in ping
    finally:
        await sandbox.destroy(cluster, quiet)
    await settled(layout, before)
    assert await ssh(hosts["n1"].target, "hostname") == "n1"
