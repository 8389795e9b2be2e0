"""Real sandbox hosts: their resources, the faults they survive, and their complete removal."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncssh
import pytest
from tests.documents import ROOT
from tests.e2e.leftovers import TAG, noted, sweep
from tests.sandbox_faults import SandboxFaults

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.hosts.provider import Instance, Request
from shoal.sandbox import images
from shoal.sandbox.cgroups import hierarchies, is_v2_only
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape

pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("systemd-nspawn"), reason="needs root and systemd-nspawn"),
]
CLUSTER = "e2e-sandbox"
REQUESTS = [
    Request("n1", Shape(cpus=1, memory_mb=700, gpus=2)),
    Request("n2", Shape(disk_mb=64)),
    Request("far", Shape(site="b")),
]


def quiet(what: str, done: float) -> None:
    pass


@pytest.fixture(scope="module", autouse=True)
def names() -> Iterator[None]:
    """The clusters of this file, should the run be killed."""
    with contextlib.ExitStack() as stack:
        for cluster in (CLUSTER, *(f"e2e-{name}" for name in ("cgroups", "debian13", "sid", "second", "broken"))):
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


async def ssh(target: Target, command: str, *, user: str = "root", timeout: float = 120) -> str:
    """What a command prints on the host. The host must show the key that the provider pinned."""
    assert target.host_key
    pinned = asyncssh.import_public_key(target.host_key)
    options = asyncssh.SSHClientConnectionOptions(
        username=user, client_keys=[str(target.identity)], known_hosts=([pinned], [], []), agent_path=None, config=None
    )
    async with asyncio.timeout(timeout), asyncssh.connect(str(target.address), options=options) as connection:
        done = await connection.run(command)
    return f"{done.stdout}{done.stderr}".strip()


async def test_root_logs_in_and_systemd_is_running(hosts: dict[str, Instance]) -> None:
    for name, instance in hosts.items():
        output = await ssh(instance.target, "whoami; hostname; systemctl is-system-running --wait; cat /proc/1/comm")
        assert output.split() == ["root", name, "running", "systemd"]


async def test_ordinary_user_logs_in_and_becomes_root_by_sudo(hosts: dict[str, Instance]) -> None:
    assert (await ssh(hosts["n1"].target, "whoami; sudo -n whoami", user="shoal")).split() == ["shoal", "root"]


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
    await ssh(n1, "systemd-run --quiet --on-active=0.1 systemctl reboot")
    async with asyncio.timeout(300):
        while len(boots) < 3:
            with contextlib.suppress(OSError, TimeoutError, asyncssh.Error):
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


async def test_destroy_leaves_nothing(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "images").symlink_to(SandboxProvider().cache / "images")
    sandbox, layout = SandboxProvider(cache), Layout(cache, "e2e-gone")
    before = traces(layout)
    with noted("e2e-gone", cache):
        await sandbox.create("e2e-gone", REQUESTS, quiet)
        made = traces(layout)
        for kind in ("links", "mounts", "namespaces", "tables", "groups", "loops", "processes"):
            assert made[kind] > before[kind], f"no {kind} were seen while the hosts ran"
        await sandbox.destroy("e2e-gone", quiet)
    await settled(layout, before)
    assert [path.name for path in cache.iterdir()] == ["images"]


@pytest.mark.parametrize("seconds", [0.2, 0.4, 0.6, 0.9, 1.3])
async def test_destroy_leaves_nothing_of_a_killed_create(tmp_path: Path, seconds: float) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / "images").symlink_to(SandboxProvider().cache / "images")
    await images.ensure(SandboxProvider().cache, "debian12", quiet)
    layout = Layout(cache, "e2e-killed")
    before = traces(layout)
    program = (
        "import asyncio, sys, pathlib\n"
        "from shoal.hosts.provider import Request\n"
        "from shoal.sandbox.provider import SandboxProvider\n"
        "from shoal.spec.member import Shape\n"
        "wanted = [Request(f'n{i}', Shape(disk_mb=64 if i == 1 else None, gpus=1)) for i in range(4)]\n"
        "asyncio.run(SandboxProvider(pathlib.Path(sys.argv[1])).create('e2e-killed', wanted, print))\n"
    )
    with noted("e2e-killed", cache):
        running = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, str(cache), stdout=asyncio.subprocess.DEVNULL
        )
        await asyncio.sleep(seconds)
        with contextlib.suppress(ProcessLookupError):  # on a fast machine it is through: destroyed all the same
            running.kill()
        await running.wait()
        sandbox = SandboxProvider(cache)
        try:
            if seconds > 0.5:  # the next create finishes what was begun; the others go straight to destroy
                made = await sandbox.create("e2e-killed", [Request("n1", Shape(disk_mb=64, gpus=1))], quiet)
                assert await ssh(made[0].target, "hostname") == "n1"
        finally:
            await sandbox.destroy("e2e-killed", quiet)
    await settled(layout, before)
    assert [path.name for path in cache.iterdir()] == ["images"]


RUN = f"""
import asyncio, os, subprocess, time
from shoal.hosts.provider import Request
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape
from tests.e2e.leftovers import noted
with noted("e2e-left"):
    command = subprocess.Popen(["sleep", "1000"], env={{**os.environ, "{TAG}": "e2e-left"}})
    asyncio.run(SandboxProvider().create("e2e-left", [Request("n1", Shape())], lambda text, part: None))
    print(command.pid, flush=True)
    time.sleep(1000)
"""


def test_hosts_of_a_killed_test_run_are_removed_and_those_of_a_live_run_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "images").symlink_to(SandboxProvider().cache / "images")
    monkeypatch.setenv("SHOAL_CACHE", str(tmp_path))
    layout = Layout(tmp_path, "e2e-left")
    before = traces(layout)
    with subprocess.Popen([sys.executable, "-c", RUN], cwd=ROOT, stdout=subprocess.PIPE, text=True) as run:
        try:
            assert run.stdout
            command = int(run.stdout.readline())
            assert sweep() == []
            with pytest.raises(AssertionError, match=r"another test run has .* e2e-left"), noted("e2e-left"):
                pass
            assert traces(layout)["mounts"] > before["mounts"], "its hosts are there"
        finally:
            run.kill()
    assert sweep() == ["e2e-left"]
    asyncio.run(settled(layout, before))
    with contextlib.suppress(OSError):  # if it is there, then dead, where nobody buries what is orphaned
        assert Path(f"/proc/{command}/cmdline").read_bytes() == b""
    assert sweep() == [] and sorted(path.name for path in tmp_path.iterdir()) == ["images", "tests"]


async def test_host_that_cannot_boot_is_named_with_its_log(tmp_path: Path, sandbox: SandboxProvider) -> None:
    cluster = "e2e-broken"
    try:
        await sandbox.create(cluster, [Request("n1", Shape()), Request("n2", Shape())], quiet)
        await SandboxFaults(sandbox.cache).kill(cluster, "n1")
        devices = Layout(sandbox.cache, cluster).host_dir("n1") / "devices"
        (devices / "gone").symlink_to("/nowhere/at/all")
        requests = [Request("n1", Shape()), Request("n2", Shape())]
        with pytest.raises(ProviderError, match="1 of 2 sandbox hosts did not come up: host n1 ended during boot"):
            await sandbox.create(cluster, requests, quiet)
        (devices / "gone").unlink()
        assert [instance.state for instance in await sandbox.create(cluster, requests, quiet)] == ["running", "running"]
    finally:
        await sandbox.destroy(cluster, quiet)


async def test_failed_image_build_reports_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(images.SUITES, "debian12", "no-such-suite")
    layout = Layout(tmp_path, "none")
    before = traces(layout)
    with pytest.raises(
        ProviderError, match=r"building image debian12 failed, `\w+` ended with status \d+: [^$]*E: "
    ) as error:
        await images.ensure(tmp_path, "debian12", quiet)
    assert f"the whole log is {tmp_path}/images/debian12/build.log" in error.value.hint
    await settled(layout, before)


async def test_unknown_image_name_creates_nothing(sandbox: SandboxProvider) -> None:
    with pytest.raises(ProviderError, match="the sandbox cannot make these hosts: n1: unknown image, found 'arch'"):
        await sandbox.create("e2e-arch", [Request("n1", Shape(image="arch"))], quiet)
    assert await sandbox.instances("e2e-arch") == []


def traces(layout: Layout) -> dict[str, set[str]]:
    """All that a cluster could leave on the machine, and whatever is no sandbox's; other clusters come and go."""
    traces_by_kind = {
        "links": set(os.listdir("/sys/class/net")),
        "mounts": set(Path("/proc/self/mounts").read_text().splitlines()),
        "namespaces": {path.name for path in Path("/run").glob("netns/*")},
        "tables": set(subprocess.check_output(["nft", "list", "tables"], text=True).splitlines()),
        "groups": {str(path) for root in hierarchies().values() for path in root.glob("*/")},
        "loops": set(subprocess.check_output(["losetup", "-a"], text=True).splitlines()),
        "nspawn": {path.name for path in Path("/run/systemd/nspawn").glob("*/*")},
        "processes": set(_command_lines()),
    }
    own = (layout.id, str(layout.dir))
    sandboxes = re.compile(r"shoal|sh[0-9a-f]{6}v")
    traces_by_kind["processes"] = {line for line in traces_by_kind["processes"] if sandboxes.search(line)}
    return {
        kind: {thing for thing in things if not sandboxes.search(thing) or any(text in thing for text in own)}
        for kind, things in traces_by_kind.items()
    }


def _command_lines() -> Iterator[str]:
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield path.read_bytes().replace(b"\0", b" ").decode(errors="replace")


async def settled(layout: Layout, before: dict[str, set[str]]) -> None:
    """Nothing is there that was not there before. The kernel takes a moment to drop a link or a loop device."""
    left: dict[str, set[str]] = {}
    for _ in range(600):
        left = {kind: things - before[kind] for kind, things in traces(layout).items()}
        if not any(left.values()):
            return
        await asyncio.sleep(0.1)
    raise AssertionError(left)
