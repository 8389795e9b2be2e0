"""Real hosts for simulated machines: sandbox hosts on the network of one sandbox cluster.

The cluster's own hosts reach them, but they are not among those; only `shoal down` removes them too. Their first boot
(user, key, the script of the order) comes from their seed, as from cloud-init: see `first_boot_files`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from shoal.cloud.providers.api import System
from shoal.errors import ProviderError, ShoalError
from shoal.hosts.api import Host, Target
from shoal.hosts.ssh import SshConnector
from shoal.hosts.ssh_route import SshOptions
from shoal.local_files import cache_dir, locked
from shoal.roles.rented_images import image_system
from shoal.sandbox import images, lifecycle, network, nspawn, seed
from shoal.sandbox.layout import OPEN_SITE, HostRecord, Layout, Site, site_of
from shoal.sandbox.programs import call
from shoal.sandbox.provider import SandboxProvider
from shoal.spec.member import Shape
from shoal_simulators.backend import HostStatus
from shoal_simulators.first_boot import authorized_keys, break_devices, first_boot_files
from shoal_simulators.instances import MachineType, Profile, SimulatedInstance
from shoal_simulators.reserved_addresses import address_prefix, translate
from shoal_simulators.server import METADATA, listen

log = logging.getLogger("shoal_simulators")

ROUTES = "routes of reserved addresses"
"""The name of that task; other tasks have the ids of machines."""
MAX_BOOTS = 4
"""Hosts that boot at a time: enough to load two cores."""
REMOVE_RETRY_S = 2.0
SHUTDOWN_TIMEOUT_S = 30.0
SHUTDOWN_POLL_S = 0.2
NAME_LENGTH = 38


STAND_INS = {
    System("debian", "11"): "debian11",
    System("debian", "12"): "debian12",
    System("debian", "13"): "debian13",
    System("ubuntu", "20.04"): "debian11",
    System("ubuntu", "22.04"): "debian12",
    System("ubuntu", "24.04"): "debian13",
    System("ubuntu", "26.04"): "sid",
}
"""The sandbox's image for the system of a provider's: Debian with a Slurm and glibc like those of an Ubuntu."""
DEFAULT_IMAGE = "debian12"


def host_image(image: str) -> str:
    """The sandbox's image for an image of a provider; Debian 12 where its name does not tell the system."""
    system = image_system(image)
    stand_in = STAND_INS.get(system, DEFAULT_IMAGE) if system else DEFAULT_IMAGE
    return stand_in if stand_in in images.SUITES else DEFAULT_IMAGE


class SandboxBackend:
    """Implements `shoal_simulators.backend.HostBackend` with the hosts of a sandbox cluster."""

    def __init__(self, kind: str, cluster: str, *, image: str = "", cache: Path | None = None) -> None:
        """`image` is that of all hosts; without it each host has the system of the image it was ordered with."""
        self.kind, self.image = kind, image
        self.layout = Layout(cache or cache_dir(), cluster)
        self._provider = SandboxProvider(self.layout.cache)
        self._status: dict[str, HostStatus] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._restarting: dict[str, SimulatedInstance] = {}
        """The machines that this cloud starts again when they end by themselves."""
        self._room = asyncio.Semaphore(MAX_BOOTS)
        self._lock: int | None = None
        """The lock held until `close`: one process runs a cloud in a cluster."""
        self._metadata_port = 0
        """The port of the metadata service; 0 without one."""
        self._routes: dict[str, str] = {}
        self._translates = False
        self.has_state = False
        """Whether an earlier run left machines or a bill here."""

    @property
    def store(self) -> Path:
        """The file with the cloud's state; it is removed with the cluster."""
        return self.layout.dir / "simulators" / f"{self.kind}.json"

    async def open(self) -> str:
        """Make the network. Returns this computer's address on it, where the cluster reaches the simulator.

        Raises ProviderError while another process runs this cloud.
        """
        images.require(self.image or DEFAULT_IMAGE)
        if os.geteuid() != 0:
            raise ProviderError("sandbox hosts need root", hint="run the command with sudo, or leave --cluster out")
        async with self.layout.locked():
            self._take_lock()
            self.has_state = self.store.exists()
            sites = await network.ensure_sites(self.layout, [OPEN_SITE])
        return network.gateway(sites[OPEN_SITE])

    async def listen_for_metadata(self) -> socket.socket:
        """A listening socket for the metadata service of this cloud. Raises ProviderError."""
        listener = listen(network.gateway(self.layout.sites()[OPEN_SITE]), 0)
        self._metadata_port = listener.getsockname()[1]
        try:
            await self._route_metadata()
        except ProviderError:
            listener.close()
            raise
        return listener

    def begin(self, machine: SimulatedInstance, type: MachineType, profile: Profile) -> None:
        self._status[machine.id] = HostStatus("making")
        if profile.restarts:
            self._restarting[machine.id] = machine
        self._start(machine.id, partial(self._make, machine, type, profile))

    def status(self, id: str) -> HostStatus:
        status = self._status.get(id, HostStatus("gone"))
        if status.state == "up" and lifecycle.state(self.layout, self.host_name(id)) == "stopped":
            if machine := self._restarting.get(id):
                if self._tasks[id].done():
                    self._start(id, partial(self._restart, machine))
                return status  # the API shows no difference
            status = self._status[id] = replace(status, state="dead")
        return status

    def end(self, id: str) -> None:
        self._restarting.pop(id, None)
        self._start(id, partial(self._remove, id))

    def kill(self, id: str) -> None:
        self._restarting.pop(id, None)
        self._start(id, partial(self._power_off, id))

    def stop(self, id: str) -> None:
        self._restarting.pop(id, None)
        self._status[id] = replace(self._status.get(id, HostStatus("gone")), state="dead")  # now: a start may follow
        self._start(id, partial(self._shut_down, id))

    def shut_down(self, id: str) -> None:
        self._start(id, partial(self._press_power_button, id))

    def start(self, id: str) -> None:
        self._status[id] = HostStatus("making")
        self._start(id, partial(self._power_on, id), waits=True)  # it may be shutting down

    def address_prefix(self) -> str:
        return address_prefix(self.layout)

    def route(self, routes: Mapping[str, str]) -> None:
        self._routes = dict(routes)
        self._start(ROUTES, self._translate)

    def adopt(self, ids: Iterable[str]) -> set[str]:
        id_by_host = {self.host_name(id): id for id in ids}
        there = {name: host for name, host in self.layout.hosts().items() if host.renter == self.kind}
        for name, host in there.items():
            if name in id_by_host:
                state = lifecycle.state(self.layout, name)
                self._status[id_by_host[name]] = self._host_status(host, "dead" if state == "stopped" else "up")
            else:
                self._start(name, partial(self._provider.delete, self.layout.cluster, [name], _silent))
        return {id_by_host[name] for name in there if name in id_by_host}

    async def close(self, keep: bool = False) -> None:
        if self._lock is None:
            return  # not opened, or closed already
        try:
            await self._finish(keep)
        finally:
            os.close(self._lock)
            self._lock = None

    async def _finish(self, keep: bool) -> None:
        for task in self._tasks.values():
            if not keep:
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._metadata_port:
            self._metadata_port = 0
            with contextlib.suppress(ProviderError):  # the cluster may be gone
                await call("nft", "delete", "chain", "ip", self.layout.table, chain_of(self.kind))
        if keep:
            return
        hosts = self.layout.hosts()
        mine = [name for name, host in hosts.items() if host.renter == self.kind]
        if set(mine) == set(hosts) and not self._others():
            await self._provider.destroy(self.layout.cluster, _silent)
            return
        await self._provider.delete(self.layout.cluster, mine, _silent)
        self.store.unlink(missing_ok=True)
        self.store.with_suffix(".lock").unlink(missing_ok=True)

    def host_name(self, id: str) -> str:
        """The name of a machine's host in the sandbox."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{id}".lower())[:NAME_LENGTH].strip("-")

    def _others(self) -> bool:
        """Whether another simulated cloud has machines or state here."""
        return any(path.stem != self.kind for path in self.store.parent.glob("*"))

    def _take_lock(self) -> None:
        """Raises ProviderError if another process has it. The kernel drops it when this process ends."""
        self.store.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(self.store.with_suffix(".lock"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            raise ProviderError(
                f"another process simulates {self.kind} for cluster {self.layout.cluster}",
                hint="use that one, or stop it with Ctrl-C",
            ) from None
        self._lock = handle

    def _start(self, id: str, work: Callable[[], Awaitable[None]], waits: bool = False) -> None:
        self._tasks[id] = asyncio.create_task(_after(self._tasks.get(id), work, waits))

    async def _make(self, ordered: SimulatedInstance, type: MachineType, profile: Profile) -> None:
        try:
            async with self._room:
                host = await self._boot(ordered, type, profile)
                if not ordered.reachable:
                    return
                await lifecycle.wait_for_ssh(self.layout, host)
                if host.shape.container and ordered.order.user_data and ordered.runs_user_data:
                    await self._run(host, ordered.order.user_data)
            self._status[ordered.id] = self._host_status(host, "up")
        except (ShoalError, OSError) as error:
            log.error("%s: %s", self.host_name(ordered.id), error)
            self._status[ordered.id] = HostStatus("dead")

    async def _boot(self, ordered: SimulatedInstance, type: MachineType, profile: Profile) -> HostRecord:
        image = self.image or host_image(ordered.order.image)
        shape = Shape(
            image=image,
            cpus=min(type.cpus, os.cpu_count() or 1),
            memory_mb=type.memory_gb * 1024,
            gpus=type.gpus,
            container=profile.container,
        )
        built = await images.ensure(self.layout.cache, image, _silent)
        async with self.layout.locked():
            sites = await network.ensure_sites(self.layout, [OPEN_SITE, site_of(shape)])
            known = self.layout.hosts().values()
            record = network.new_host(self.host_name(ordered.id), shape, built, sites, known, self.kind)
            authorized = seed.ensure_identity(self.layout) + (
                authorized_keys(ordered) if profile.user == "root" else ""
            )
            host = await seed.lay_out(self.layout, record, authorized, first_boot_files(ordered, profile, shape))
            if not ordered.gpu_works:
                break_devices(self.layout.host_dir(host.name) / "devices")
            if shape.container:
                await network.open_ports(self.layout, sites)
            await network.plug_in(self.layout, host, sites[host.site])
            if not ordered.reachable:
                await network.set_cable(self.layout, host, connected=False)
            await self._route_metadata()
            await self._translate()
            await nspawn.start(self.layout, host)
        self._status[ordered.id] = self._host_status(host, "making")
        return host

    async def _restart(self, ordered: SimulatedInstance) -> None:
        """Start a container again whose first process ended. Its files are still there."""
        name = self.host_name(ordered.id)
        try:
            async with self.layout.locked():
                host, sites = self.layout.hosts()[name], self.layout.sites()
                await lifecycle.stop(self.layout, name)
                await network.plug_in(self.layout, host, sites[host.site])
                await nspawn.start(self.layout, host)
            await lifecycle.wait_for_ssh(self.layout, host)
            if ordered.order.user_data and ordered.runs_user_data:
                await self._run(host, ordered.order.user_data)
        except (ShoalError, OSError) as error:
            log.error("%s: cannot start it again: %s", name, error)

    def _host_status(self, host: HostRecord, state: Any) -> HostStatus:
        if host.shape.container:
            return HostStatus(state, network.outer_address(self.layout), host.outer_port)
        return HostStatus(state, host.address, 22, host.address)

    async def _route_metadata(self) -> None:
        """Route the requests of this cloud's machines to METADATA, and no others, to its port."""
        site = self.layout.sites().get(OPEN_SITE)  # None once the cluster is gone
        if site is not None and self._metadata_port:
            own = [host.address for host in self.layout.hosts().values() if host.renter == self.kind]
            await call("nft", "-f", "-", stdin=metadata_rules(self.layout, site, self.kind, own, self._metadata_port))

    async def _run(self, host: HostRecord, script: str) -> None:
        """Start a container's command: it has no init system."""
        start = "cat > /run/args && setsid -f sh /run/args > /run/args.log 2>&1"
        async with self._root(host, host.host_key) as there:
            await there.run(["sh", "-c", start], stdin=script.encode())

    async def _shut_down(self, id: str) -> None:
        """As a cloud does it: the system gets the time to end its services in order."""
        host = self.layout.hosts()[self.host_name(id)]
        await self._press_power_button(id)
        for _ in range(int(SHUTDOWN_TIMEOUT_S / SHUTDOWN_POLL_S)):
            if lifecycle.state(self.layout, host.name) == "stopped":
                break
            await asyncio.sleep(SHUTDOWN_POLL_S)
        await lifecycle.stop(self.layout, host.name)

    async def _press_power_button(self, id: str) -> None:
        host = self.layout.hosts()[self.host_name(id)]
        # The machine may have another host key by now. It is a sandbox host on this computer's own network.
        with contextlib.suppress(OSError, ShoalError, TimeoutError):
            async with asyncio.timeout(SHUTDOWN_TIMEOUT_S), self._root(host, None) as there:
                await there.run(["systemctl", "poweroff"])

    @contextlib.asynccontextmanager
    async def _root(self, host: HostRecord, host_key: str | None) -> AsyncIterator[Host]:
        """A connection to a machine as root, with the sandbox's own key."""
        at = self._host_status(host, "making")
        target = Target(host.name, at.host, at.port, "root", self.layout.identity, host_key)
        options = SshOptions(config=Path(os.devnull), agent=False, keep=False)
        with tempfile.TemporaryDirectory() as directory:
            async with await SshConnector(Path(directory, "known_hosts"), options).connect(target) as there:
                yield there

    async def _remove(self, id: str) -> None:
        while True:
            try:
                await self._provider.delete(self.layout.cluster, [self.host_name(id)], _silent)
                async with locked(self.layout.dir):  # another cloud's machine may get its address next
                    await self._route_metadata()
                break
            except (ProviderError, OSError) as error:
                log.error("cannot remove %s yet: %s", self.host_name(id), error)
                await asyncio.sleep(REMOVE_RETRY_S)
        self._status.pop(id, None)

    async def _power_off(self, id: str) -> None:
        await lifecycle.stop(self.layout, self.host_name(id))
        self._status[id] = replace(self._status.get(id, HostStatus("gone")), state="dead")

    async def _power_on(self, id: str) -> None:
        host = self.layout.hosts()[self.host_name(id)]
        await lifecycle.stop(self.layout, host.name)
        async with self.layout.locked():
            sites = await network.ensure_sites(self.layout, [host.site])
            await network.plug_in(self.layout, host, sites[host.site])
            await nspawn.start(self.layout, host)
        await lifecycle.wait_for_ssh(self.layout, host)
        self._status[id] = self._host_status(host, "up")
        await self._translate()

    async def _translate(self) -> None:
        """Translate the external addresses of machines that have a host by now."""
        site, hosts = self.layout.sites().get(OPEN_SITE), self.layout.hosts()
        names = {address: self.host_name(id) for address, id in self._routes.items()}
        routes = {address: hosts[name].address for address, name in names.items() if name in hosts}
        if site is not None and (routes or self._translates):
            self._translates = True
            await translate(self.layout, site, f"{chain_of(self.kind)}_addresses", routes)


async def _after(before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]], waits: bool) -> None:
    """Cancel the running operation on a machine, or wait for its end, then start the next."""
    if before is not None:
        if not waits:
            before.cancel()
        try:
            await asyncio.wait([before])
        except asyncio.CancelledError:
            before.cancel()
            raise
        if not before.cancelled() and (error := before.exception()):
            log.error("the previous operation on a machine failed: %s", error)
    await work()


def metadata_rules(layout: Layout, site: Site, kind: str, machines: Iterable[str], port: int) -> str:
    """nftables rules, as text: requests of these machines to METADATA go to the cloud's port.

    Each cloud of a cluster has its own chain. Requests of this computer itself are left alone: it may be in a cloud.
    """
    asking = ", ".join(sorted(machines))
    rule = f"ip saddr {{ {asking} }} ip daddr {METADATA} tcp dport 80 dnat to {network.gateway(site)}:{port}"
    chain = chain_of(kind)
    added = f'add rule ip {layout.table} {chain} iifname "{layout.bridge(site)}" {rule}\n' if asking else ""
    return f"""\
table ip {layout.table} {{
    chain {chain} {{
        type nat hook prerouting priority dstnat; policy accept;
    }}
}}
flush chain ip {layout.table} {chain}
{added}"""


def chain_of(kind: str) -> str:
    """The nftables chain of one cloud."""
    return "cloud_" + re.sub(r"\W", "_", kind)


def _silent(what: str, done: float) -> None:
    """Progress is not shown."""
