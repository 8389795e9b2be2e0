"""Virtual machines beside containers in one sandbox cluster: reboot, power cut, and nothing left behind.

A trial guest is part of the daily set. Hosts under emulation take minutes, and have the mark `matrix`.
"""

import asyncio
import contextlib
import os
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.e2e.leftovers import noted
from tests.e2e.test_sandbox import quiet, settled, ssh, traces
from tests.sandbox_faults import SandboxFaults

from shoal.hosts.provider import Instance, Request
from shoal.sandbox import images, vm_disk
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.sandbox.qemu import programs, trial_boots
from shoal.spec.member import Shape

COVERS = "sandbox/vm sandbox/vm_disk sandbox/vm_snapshot sandbox/qemu"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0, reason="needs root"),
    pytest.mark.skipif(
        not all(shutil.which(name) for name in programs(os.uname().machine)), reason="needs QEMU: see docs/sandbox.md"
    ),
]
MATRIX = pytest.mark.matrix
TRIAL_TIMEOUT_S = 300.0
"""Of a trial guest under emulation. It takes nine seconds on an idle machine."""
CLUSTER = "e2e-vm"
MACHINE = Shape(cpus=1, memory_mb=512, disk_mb=1000, gpus=2, vm=True)
WANTED = [Request("machine", MACHINE), Request("twin", MACHINE), Request("box", Shape())]
IDENTITY = (
    "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id /sys/class/net/eth0/address; "
    "cut -d' ' -f2 /etc/ssh/ssh_host_ed25519_key.pub; head -c 16 /dev/urandom | base64; date +%s"
)
SSH_TIMEOUT_S = 600.0
CLOCK_LIMIT_S = 60
"""Of a clock that was read over SSH from an emulated host. The snapshot is older than that, or about to be."""
CREATE = """\
import asyncio, pathlib, sys
from shoal.hosts.provider import Request
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape
wanted = [Request("machine", Shape(cpus=1, memory_mb=512, vm=True))]
asyncio.run(SandboxProvider(pathlib.Path(sys.argv[1])).create("e2e-vm-killed", wanted, print))
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, Instance]]:
    sandbox = SandboxProvider()
    with noted(CLUSTER):
        asyncio.run(sandbox.destroy(CLUSTER, quiet))
        try:
            made = asyncio.run(sandbox.create(CLUSTER, WANTED, quiet))
            yield {instance.name: instance for instance in made}
        finally:
            asyncio.run(sandbox.destroy(CLUSTER, quiet))


async def test_kernel_and_initial_disk_of_a_machine_boot_under_emulation() -> None:
    """The one test of virtual machines that takes seconds: a guest that ends once its kernel runs our first program."""
    sandbox = SandboxProvider()
    boot = await vm_disk.ensure(sandbox.cache, await images.ensure(sandbox.cache, "debian12", quiet), quiet)
    assert await trial_boots("tcg", boot.kernel, boot.initrd, TRIAL_TIMEOUT_S)


async def on_machine(hosts: dict[str, Instance], command: str) -> str:
    return await ssh(hosts["machine"].target, command, timeout=SSH_TIMEOUT_S)


@MATRIX
async def test_machine_has_its_own_kernel_and_what_was_asked_for(hosts: dict[str, Instance]) -> None:
    assert "cloud" in await on_machine(hosts, "uname -r")
    assert await on_machine(hosts, "hostname; nproc") == "machine\n1"
    memory_kb = int((await on_machine(hosts, "grep MemTotal /proc/meminfo")).split()[1])
    assert 400_000 < memory_kb < 512 * 1024
    free_mb = int(await on_machine(hosts, "df --output=avail -m / | tail -n 1"))
    assert 800 < free_mb < 1400
    assert "Simulated GPU" in await on_machine(hosts, "nvidia-smi -L")
    assert await on_machine(hosts, "ls /dev/nvidia0 /dev/nvidia1 > /dev/null && echo yes") == "yes"


@MATRIX
async def test_two_machines_of_one_snapshot_have_nothing_of_each_other(hosts: dict[str, Instance]) -> None:
    seen = []
    for name in ("machine", "twin"):
        *identity, now = (await ssh(hosts[name].target, IDENTITY, timeout=SSH_TIMEOUT_S)).split()
        assert identity[0] == name and abs(int(now) - time.time()) < CLOCK_LIMIT_S
        seen.append(identity)
    assert len(seen[0]) == 6 and not set(seen[0]) & set(seen[1]), seen


@MATRIX
async def test_machine_and_container_reach_each_other_and_share_a_directory(hosts: dict[str, Instance]) -> None:
    box, machine = hosts["box"].target, hosts["machine"].target
    assert "1 received" in await on_machine(hosts, f"ping -c1 -W30 {box.address}")
    assert "1 received" in await ssh(box, f"ping -c1 -W30 {machine.address}")
    await ssh(box, "echo hello > /shared/note")
    assert await on_machine(hosts, "cat /shared/note") == "hello"


@MATRIX
async def test_reboot_and_power_cut_keep_the_disk_and_the_key(hosts: dict[str, Instance]) -> None:
    sandbox = SandboxProvider()
    await on_machine(hosts, "echo kept > /root/kept; sync")
    before = await on_machine(hosts, "cat /proc/sys/kernel/random/boot_id")
    await SandboxFaults(sandbox.cache).reboot(CLUSTER, "machine")
    rebooted = await on_machine(hosts, "cat /root/kept /proc/sys/kernel/random/boot_id")
    assert rebooted.startswith("kept\n") and before not in rebooted
    await SandboxFaults(sandbox.cache).kill(CLUSTER, "machine")
    states = {instance.name: instance.state for instance in await sandbox.instances(CLUSTER)}
    assert states == {"machine": "stopped", "twin": "running", "box": "running"}
    await sandbox.create(CLUSTER, WANTED, quiet)
    assert await on_machine(hosts, "cat /root/kept; ls /dev/nvidia1") == "kept\n/dev/nvidia1"
    await on_machine(hosts, "mount | grep -q virtiofs && cat /shared/note")


@MATRIX
@pytest.mark.parametrize("seconds", [1, 4, 15])
async def test_destroy_leaves_nothing_of_a_killed_create(tmp_path: Path, seconds: float) -> None:
    shared, cache = SandboxProvider().cache, tmp_path / "cache"
    for name in ("images", "vm"):
        (shared / name).mkdir(exist_ok=True, parents=True)
        cache.mkdir(exist_ok=True)
        (cache / name).symlink_to(shared / name)
    layout = Layout(cache, "e2e-vm-killed")
    before = traces(layout)
    with noted("e2e-vm-killed", cache):
        creating = await asyncio.create_subprocess_exec(
            sys.executable, "-c", CREATE, str(cache), stdout=asyncio.subprocess.DEVNULL
        )
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):
            creating.kill()
        await creating.wait()
        await SandboxProvider(cache).destroy("e2e-vm-killed", quiet)
    await settled(layout, before)
    assert sorted(path.name for path in cache.iterdir()) == ["images", "vm"]


@MATRIX
async def test_damaged_snapshot_is_made_anew(hosts: dict[str, Instance]) -> None:
    """Needs the snapshot that the hosts above continued from; without one (KVM) there is nothing to damage."""
    sandbox, name = SandboxProvider(), "e2e-vm-damaged"
    disk = Layout(sandbox.cache, CLUSTER).host_dir("twin") / "booted.qcow2"
    if not disk.exists():
        pytest.skip("no snapshot: virtual machines run with KVM")
    [place] = [path.parent for path in (sandbox.cache / "vm").glob("*/*/booted/*/disk.qcow2") if path.samefile(disk)]
    (place / "state").write_bytes((place / "state").read_bytes()[:100_000])
    messages: list[str] = []
    with noted(name):
        try:
            wanted = [Request("machine", MACHINE)]
            [made] = await sandbox.create(name, wanted, lambda text, part: messages.append(text))
            assert await ssh(made.target, "hostname; ls /shared", timeout=SSH_TIMEOUT_S) == "machine"
        finally:
            await sandbox.destroy(name, quiet)
    assert any("is damaged, and is made anew" in message for message in messages), messages
    assert not any("does not continue from the snapshot" in message for message in messages), messages
    assert await ssh(hosts["twin"].target, "hostname", timeout=SSH_TIMEOUT_S) == "twin"


@MATRIX
async def test_missing_kernel_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vm_disk.KERNELS, os.uname().machine, "linux-image-cloud-none")
    image = next((SandboxProvider().cache / "images/debian12").glob("*/"))
    with pytest.raises(vm_disk.ProviderError, match="linux-image-cloud-none"):
        await vm_disk.ensure(tmp_path, image, quiet)
