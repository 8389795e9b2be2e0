"""Sandbox hosts leave nothing behind, after a killed command or a killed test run either. Failures are named."""

import asyncio
import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.documents import ROOT
from tests.e2e.leftovers import TAG, noted, sweep
from tests.sandbox_faults import SandboxFaults
from tests.support.over_ssh import over_ssh

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.hosts.provider import Request
from shoal.sandbox import images
from shoal.sandbox.cgroups import hierarchies
from shoal.sandbox.layout import Layout
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape

COVERS = "sandbox tests/e2e/leftovers.py"
pytestmark = [
    pytest.mark.sandbox,
    pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("systemd-nspawn"), reason="needs root and systemd-nspawn"),
]
REQUESTS = [
    Request("n1", Shape(cpus=1, memory_mb=700, gpus=2)),
    Request("n2", Shape(disk_mb=64)),
    Request("far", Shape(site="b")),
]

IPTABLES = {f"table {family} {name}" for family in ("ip", "ip6") for name in ("filter", "nat", "mangle", "raw")}
"""Podman and Docker in tests of other files make these, and they stay. The sandbox's tables have names of their own."""


def quiet(what: str, done: float) -> None:
    pass


@pytest.fixture
def sandbox() -> SandboxProvider:
    return SandboxProvider()


async def ssh(target: Target, command: str, *, user: str = "root", timeout: float = 120) -> str:
    """What a command prints on the host. The host must show the key that the provider pinned."""
    assert target.host_key
    done = await over_ssh(target, command, user=user, timeout=timeout)
    return f"{done.text}{done.error_text}".strip()


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
    with noted("e2e-left", tmp_path):  # for the run that this test is part of, which may be killed too
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
    with noted(cluster):
        try:
            await sandbox.create(cluster, [Request("n1", Shape()), Request("n2", Shape())], quiet)
            await SandboxFaults(sandbox.cache).kill(cluster, "n1")
            devices = Layout(sandbox.cache, cluster).host_dir("n1") / "devices"
            (devices / "gone").symlink_to("/nowhere/at/all")
            requests = [Request("n1", Shape()), Request("n2", Shape())]
            with pytest.raises(ProviderError, match="1 of 2 sandbox hosts did not come up: host n1 ended during boot"):
                await sandbox.create(cluster, requests, quiet)
            (devices / "gone").unlink()
            made = await sandbox.create(cluster, requests, quiet)
            assert [instance.state for instance in made] == ["running", "running"]
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
        # Without the options: a systemd in a container of another test changes those of the machine's cgroup2.
        "mounts": {" ".join(line.split()[:3]) for line in Path("/proc/self/mounts").read_text().splitlines()},
        "namespaces": {path.name for path in Path("/run").glob("netns/*")},
        "tables": set(subprocess.check_output(["nft", "list", "tables"], text=True).splitlines()) - IPTABLES,
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
