"""Faults of sandbox hosts, for tests: cut off, frozen, killed, rebooted, with a full disk."""

import asyncio
import contextlib
import os
import signal
from pathlib import Path

from tests import engine_faults
from tests.support.over_ssh import over_ssh

from shoal.errors import ProviderError
from shoal.hosts.provider import Request
from shoal.sandbox import lifecycle, network, vm
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.provider import SandboxProvider

FILLER = "var/tmp/shoal-filler"
SHUTDOWN_TIMEOUT_S = 120.0
FREEZE_TIMEOUT_S = 30.0
REBOOT_POLL_S = 60.0


class SandboxFaults:
    """Breaks sandbox hosts on purpose. Each raises ProviderError when the cluster has no such host."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    async def cut(self, cluster: str, host: str) -> None:
        """Pull the network cable: nothing reaches the host, and nothing leaves it."""
        await self._set_cable(cluster, host, connected=False)

    async def heal(self, cluster: str, host: str) -> None:
        """Plug the cable in again."""
        await self._set_cable(cluster, host, connected=True)

    async def _set_cable(self, cluster: str, host: str, *, connected: bool) -> None:
        layout, record = self._find(cluster, host)
        set_cable = engine_faults.set_cable if record.shape.engine else network.set_cable
        await set_cable(layout, record, connected=connected)

    async def freeze(self, cluster: str, host: str) -> None:
        """Stop every process of the host where it stands. The network still takes packets for it."""
        layout, record = await self._running(cluster, host)
        if record.shape.engine:
            await engine_faults.run(layout, record, "pause")
            return
        path, (_, frozen) = lifecycle.group(layout, record.name).freezer()
        path.write_text(frozen)
        for _ in range(int(FREEZE_TIMEOUT_S / 0.02)):
            if "FREEZING" not in path.read_text():
                return
            await asyncio.sleep(0.02)
        raise ProviderError(f"processes of {host} do not freeze", hint="thaw the host and try again")

    async def thaw(self, cluster: str, host: str) -> None:
        """Let a frozen host go on."""
        layout, record = await self._running(cluster, host)
        if record.shape.engine:
            await engine_faults.run(layout, record, "unpause")
            return
        lifecycle.group(layout, record.name).thaw()

    async def kill(self, cluster: str, host: str) -> None:
        """Pull the power plug. The disk and the address stay; `create` starts the host again."""
        layout, record = self._find(cluster, host)
        if record.shape.engine:
            await engine_faults.run(layout, record, "kill")
            return
        await lifecycle.stop(layout, record.name)

    async def start(self, cluster: str, host: str) -> None:
        """Switch a killed host on again, and wait until SSH answers."""
        _, record = self._find(cluster, host)
        request = Request(record.name, record.shape)
        await SandboxProvider(self._cache).create(cluster, [request], lambda text, part: None)

    async def reboot(self, cluster: str, host: str) -> None:
        """Ask the host to reboot, and wait until SSH answers again."""
        layout, record = await self._running(cluster, host)
        if record.shape.engine:
            await engine_faults.reboot(layout, record)
            return
        if record.shape.container:
            raise ProviderError(f"cannot reboot host {host}: it is a container", hint="kill it and create it")
        if record.shape.vm:
            await _reboot_vm(layout, record, self._cache)
            return
        before = self._leader(layout, record)
        os.kill(before, signal.SIGRTMIN + 5)  # systemd reboots on it
        group = lifecycle.group(layout, record.name)
        try:
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S):
                while group.leader() in (before, None):  # noqa: ASYNC110 - a reboot has no event to wait for
                    await asyncio.sleep(0.05)
        except TimeoutError:
            what = f"host {host} does not reboot within {SHUTDOWN_TIMEOUT_S:.0f} s"
            raise ProviderError(what, hint="kill it and create it again") from None
        await lifecycle.wait_for_ssh(layout, record)

    async def fill_disk(self, cluster: str, host: str) -> None:
        """Write until the host's disk is full. Only for a host with a disk of its own (`disk_mb`)."""
        layout, record = await self._running(cluster, host)
        if record.shape.vm or not record.shape.disk_mb:
            what = f"cannot fill the disk of host {host}: it shares this machine's"
            raise ProviderError(what, hint="ask for one with `disk_mb`")
        await asyncio.to_thread(_fill, self._filler(layout, record))

    async def empty_disk(self, cluster: str, host: str) -> None:
        """Give the space that `fill_disk` took back."""
        layout, record = await self._running(cluster, host)
        self._filler(layout, record).unlink(missing_ok=True)

    def _find(self, cluster: str, host: str) -> tuple[Layout, HostRecord]:
        layout = Layout(self._cache, cluster)
        record = layout.hosts().get(host)
        if record is None:
            known = ", ".join(layout.hosts()) or "none"
            raise ProviderError(f"sandbox cluster {cluster} has no host {host}", hint=f"its hosts are: {known}")
        return layout, record

    async def _running(self, cluster: str, host: str) -> tuple[Layout, HostRecord]:
        layout, record = self._find(cluster, host)
        engine = record.shape.engine
        state = await engine_faults.state(layout, record) if engine else lifecycle.state(layout, host)
        if state == "stopped":
            raise ProviderError(f"host {host} of sandbox cluster {cluster} is stopped", hint="start it with `shoal up`")
        return layout, record

    def _leader(self, layout: Layout, record: HostRecord) -> int:
        leader = lifecycle.group(layout, record.name).leader()
        if leader is None:
            raise ProviderError(f"host {record.name} is still starting", hint="try again in a few seconds")
        return leader

    def _filler(self, layout: Layout, record: HostRecord) -> Path:
        """A file on the host's disk, reached through its PID 1's root."""
        return Path(f"/proc/{self._leader(layout, record)}/root", FILLER)


async def _reboot_vm(layout: Layout, record: HostRecord, cache: Path) -> None:
    """Reboot a virtual machine by a command in it: from outside it is the same process before and after."""
    target = lifecycle.instance(layout, record).target

    async def run(command: str) -> str:
        return (await over_ssh(target, command)).text

    identify = "cat /proc/sys/kernel/random/boot_id"
    before = await run(identify)
    with contextlib.suppress(OSError):  # the connection may end with the host
        await run("systemctl reboot")
    async with asyncio.timeout(vm.boot_timeout(cache, record)):
        while True:
            with contextlib.suppress(OSError):
                async with asyncio.timeout(REBOOT_POLL_S):
                    if await run(identify) not in ("", before):
                        return
            await asyncio.sleep(1)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as sink:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while sink.write(b"\0" * size):
                    pass
            except OSError:
                continue
