"""Breaking sandbox hosts on purpose: the network cable, the power plug, a full disk, a host that hangs."""

# What is waited for has no event to wait on: a lock of another process, a reboot.
# ruff: noqa: ASYNC110
from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

from shoal.errors import ProviderError
from shoal.providers.sandbox import machine, network
from shoal.providers.sandbox.layout import HostRecord, Layout

FILLER = "var/tmp/shoal-filler"
SECONDS_TO_GO_DOWN = 120.0


class SandboxFaults:
    """Implements `shoal.providers.api.Faults` for the sandbox."""

    def __init__(self, cache: Path) -> None:
        self._cache = cache

    async def cut(self, cluster: str, host: str) -> None:
        layout, record = self._find(cluster, host)
        await network.set_cable(layout, record, connected=False)

    async def heal(self, cluster: str, host: str) -> None:
        layout, record = self._find(cluster, host)
        await network.set_cable(layout, record, connected=True)

    async def freeze(self, cluster: str, host: str) -> None:
        layout, record = self._running(cluster, host)
        await machine.group(layout, record.name).freeze()

    async def thaw(self, cluster: str, host: str) -> None:
        layout, record = self._running(cluster, host)
        machine.group(layout, record.name).thaw()

    async def kill(self, cluster: str, host: str) -> None:
        layout, record = self._find(cluster, host)
        await machine.stop(layout, record.name)

    async def reboot(self, cluster: str, host: str) -> None:
        layout, record = self._running(cluster, host)
        if record.shape.container:
            raise ProviderError(f"host {host} is a container and has nothing that boots", hint="kill it and create it")
        before = self._leader(layout, record)
        os.kill(before, signal.SIGRTMIN + 5)  # systemd's own signal for "reboot"
        group = machine.group(layout, record.name)
        try:
            async with asyncio.timeout(SECONDS_TO_GO_DOWN):
                while group.leader() in (before, None):
                    await asyncio.sleep(0.05)
        except TimeoutError:
            raise ProviderError(f"host {host} does not go down to reboot", hint="kill it and create it again") from None
        await machine.wait_for_ssh(layout, record)

    async def fill_disk(self, cluster: str, host: str) -> None:
        layout, record = self._running(cluster, host)
        if not record.shape.disk_mb:
            raise ProviderError(
                f"host {host} has no disk of its own to fill; it shares this machine's",
                hint="ask for one with `disk_mb`",
            )
        await asyncio.to_thread(_fill, self._filler(layout, record))

    async def empty_disk(self, cluster: str, host: str) -> None:
        layout, record = self._running(cluster, host)
        self._filler(layout, record).unlink(missing_ok=True)

    def _find(self, cluster: str, host: str) -> tuple[Layout, HostRecord]:
        layout = Layout(self._cache, cluster)
        record = layout.hosts().get(host)
        if record is None:
            known = ", ".join(layout.hosts()) or "none"
            raise ProviderError(f"sandbox cluster {cluster} has no host {host}", hint=f"its hosts are: {known}")
        return layout, record

    def _running(self, cluster: str, host: str) -> tuple[Layout, HostRecord]:
        layout, record = self._find(cluster, host)
        if machine.state(layout, host) == "stopped":
            raise ProviderError(f"host {host} of sandbox cluster {cluster} is stopped", hint="start it with `shoal up`")
        return layout, record

    def _leader(self, layout: Layout, record: HostRecord) -> int:
        leader = machine.group(layout, record.name).leader()
        if leader is None:
            raise ProviderError(f"host {record.name} is still starting", hint="try again in a few seconds")
        return leader

    def _filler(self, layout: Layout, record: HostRecord) -> Path:
        """A file on the host's disk, reached through its PID 1's root."""
        return Path(f"/proc/{self._leader(layout, record)}/root", FILLER)


def _fill(path: Path) -> None:
    with path.open("wb", buffering=0) as sink:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while sink.write(b"\0" * size):
                    pass
            except OSError:
                continue
