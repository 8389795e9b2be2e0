"""Machines that are real: sandbox hosts on the network of one sandbox cluster, made and removed as the cloud says.

They are beside the cluster's own hosts and reached by them; the sandbox does not count them among those, and only
`shoal down` takes them with it. What a host does when it first boots (its user, the key, the script of the order) is
in its seed, as cloud-init would have it: see `first_boot`.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import logging
import os
import re
import socket
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import asyncssh

from shoal.errors import ProviderError
from shoal.providers.sandbox import images, machine, network, seed
from shoal.providers.sandbox.layout import OPEN_SITE, HostRecord, Layout, Site, cache_dir, locked, site_of
from shoal.providers.sandbox.programs import call
from shoal.providers.sandbox.provider import SandboxProvider
from shoal.simulators.first_boot import break_devices, seeded
from shoal.simulators.ground import Stand
from shoal.simulators.machines import Machine, MachineType, Profile
from shoal.simulators.server import METADATA, listen
from shoal.spec.member import Shape

log = logging.getLogger("shoal.simulators")

AT_ONCE = 4
"""So many hosts boot at a time; a machine of two cores has enough with that."""
AGAIN_SECONDS = 2.0
NAME_LENGTH = 38


class SandboxGround:
    """Implements `shoal.simulators.ground.Ground` with the hosts of a sandbox cluster."""

    def __init__(self, kind: str, cluster: str, *, image: str = "debian12", cache: Path | None = None) -> None:
        self.kind, self.image = kind, image
        self.layout = Layout(cache or cache_dir(), cluster)
        self._provider = SandboxProvider(self.layout.cache)
        self._stands: dict[str, Stand] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._room = asyncio.Semaphore(AT_ONCE)
        self._locks: dict[str, int] = {}
        """What this process alone may do until it closes: run this cloud here."""
        self._told_at = 0
        """The port where machines of this cloud ask for themselves; 0 where they do not."""
        self.found = False
        """Whether a former run left machines or a bill here."""

    @property
    def store(self) -> Path:
        """Where the cloud's memory is kept: it goes with the cluster."""
        return self.layout.dir / "simulators" / f"{self.kind}.json"

    async def open(self) -> str:
        """Make the network, and return the machine's address on it: there the cluster reaches the simulator.

        Raises ProviderError where another process has this cloud: its machines are not ours to touch.
        """
        images.require(self.image)
        if os.geteuid() != 0:
            raise ProviderError("sandbox hosts take root", hint="run the command with sudo, or leave --cluster out")
        async with self.layout.locked():
            if not self._lock(self.kind):
                raise ProviderError(
                    f"{self.kind} is simulated for cluster {self.layout.cluster} already",
                    hint="use the one that runs, or end it with Ctrl-C first",
                )
            self.found = self.store.exists()
            sites = await network.ensure_sites(self.layout, [OPEN_SITE])
        return network.gateway(sites[OPEN_SITE])

    async def listen_for_metadata(self) -> socket.socket:
        """A socket where this cloud's machines ask for themselves, as in a cloud. Raises ProviderError."""
        listener = listen(network.gateway(self.layout.sites()[OPEN_SITE]), 0)
        self._told_at = listener.getsockname()[1]
        try:
            await self._lead_to_metadata()
        except ProviderError:
            listener.close()
            raise
        return listener

    def begin(self, machine: Machine, type: MachineType, profile: Profile) -> None:
        self._stands[machine.id] = Stand("making")
        self._start(machine.id, partial(self._make, machine, type, profile))

    def stand(self, id: str) -> Stand:
        found = self._stands.get(id, Stand("gone"))
        if found.state == "up" and machine.state(self.layout, self.host_name(id)) == "stopped":
            found = self._stands[id] = Stand("dead", found.host, found.port, found.private_address)
        return found

    def end(self, id: str) -> None:
        self._start(id, partial(self._remove, id))

    def kill(self, id: str) -> None:
        self._start(id, partial(self._pull_the_plug, id))

    def notice(self, id: str, at: float) -> None:
        log.info("%s is told that it will be taken away", self.host_name(id))

    def adopt(self, ids: Iterable[str]) -> set[str]:
        wanted = {self.host_name(id): id for id in ids}
        there = {name: host for name, host in self.layout.hosts().items() if host.renter == self.kind}
        for name, host in there.items():
            if name in wanted:
                state = machine.state(self.layout, name)
                self._stands[wanted[name]] = self._standing(host, "dead" if state == "stopped" else "up")
            else:
                self._start(name, partial(self._provider.delete, self.layout.cluster, [name], _silent))
        return {wanted[name] for name in there if name in wanted}

    async def close(self, keep: bool = False) -> None:
        if not self._locks:
            return  # it was never ours, or is no longer
        try:
            await self._finish(keep)
        finally:
            for handle in self._locks.values():
                os.close(handle)
            self._locks.clear()

    async def _finish(self, keep: bool) -> None:
        for task in self._tasks.values():
            if not keep:
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._told_at:
            self._told_at = 0
            with contextlib.suppress(ProviderError):  # it went with the cluster
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
        self._lock_file(self.kind).unlink(missing_ok=True)

    def host_name(self, id: str) -> str:
        """What the sandbox calls the host of a machine."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{id}".lower())[:NAME_LENGTH].strip("-")

    def _others(self) -> bool:
        """Whether another simulated cloud has machines or a memory here."""
        return any(path.stem != self.kind for path in self.store.parent.glob("*"))

    def _lock_file(self, what: str) -> Path:
        return self.store.with_name(f"{what}.lock")

    def _lock(self, what: str) -> bool:
        """Whether this process has something for itself now. However the process ends, its locks go with it."""
        path = self._lock_file(what)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return False
        self._locks[what] = handle
        return True

    def _start(self, id: str, work: Callable[[], Awaitable[None]]) -> None:
        before = self._tasks.get(id)
        self._tasks[id] = asyncio.create_task(_after(before, work))

    async def _make(self, wanted: Machine, type: MachineType, profile: Profile) -> None:
        try:
            async with self._room:
                host = await self._boot(wanted, type, profile)
                if not wanted.reachable:
                    return
                await machine.wait_for_ssh(self.layout, host)
                if host.shape.container and wanted.wanted.user_data:
                    await self._run(host, wanted.wanted.user_data)
            self._stands[wanted.id] = self._standing(host, "up")
        except (ProviderError, OSError, asyncssh.Error) as error:
            log.error("%s: %s", self.host_name(wanted.id), error)
            self._stands[wanted.id] = Stand("dead")

    async def _boot(self, wanted: Machine, type: MachineType, profile: Profile) -> HostRecord:
        shape = Shape(
            image=self.image,
            cpus=min(type.cpus, os.cpu_count() or 1),
            memory_mb=type.memory_gb * 1024,
            gpus=type.gpus,
            container=profile.container,
        )
        built = await images.ensure(self.layout.cache, self.image, _silent)
        async with self.layout.locked():
            sites = await network.ensure_sites(self.layout, [OPEN_SITE, site_of(shape)])
            known = self.layout.hosts().values()
            record = network.new_host(self.host_name(wanted.id), shape, built, sites, known, self.kind)
            keys = "".join(f"{key.strip()}\n" for key in wanted.wanted.public_keys)
            authorized = seed.ensure_identity(self.layout) + (keys if profile.user == "root" else "")
            host = await seed.lay_out(self.layout, record, authorized, seeded(wanted, profile, shape))
            if not wanted.gpu_works:
                break_devices(self.layout.host_dir(host.name) / "devices")
            if shape.container:
                await network.open_ports(self.layout, sites)
            await network.plug_in(self.layout, host, sites[host.site])
            if not wanted.reachable:
                await network.set_cable(self.layout, host, connected=False)
            await self._lead_to_metadata()
            await machine.start(self.layout, host)
        self._stands[wanted.id] = self._standing(host, "making")
        return host

    def _standing(self, host: HostRecord, state: Any) -> Stand:
        if host.shape.container:
            return Stand(state, network.outer_address(self.layout), host.outer_port)
        return Stand(state, host.address, 22, host.address)

    async def _lead_to_metadata(self) -> None:
        """Have what this cloud's machines ask METADATA, and no others', arrive at its own port."""
        site = self.layout.sites().get(OPEN_SITE)  # it may have gone with the cluster
        if site is not None and self._told_at:
            own = [host.address for host in self.layout.hosts().values() if host.renter == self.kind]
            await call("nft", "-f", "-", stdin=metadata_rules(self.layout, site, self.kind, own, self._told_at))

    async def _run(self, host: HostRecord, script: str) -> None:
        """Start a container's command: there is no init system that would."""
        at = self._standing(host, "making")
        trusted = asyncssh.import_known_hosts(f"[{at.host}]:{at.port} {host.host_key}\n")
        async with asyncssh.connect(
            at.host, at.port, username="root", client_keys=[str(self.layout.identity)], known_hosts=trusted, config=None
        ) as connection:
            await connection.run("cat > /run/args && setsid -f sh /run/args > /run/args.log 2>&1", input=script)

    async def _remove(self, id: str) -> None:
        while True:
            try:
                await self._provider.delete(self.layout.cluster, [self.host_name(id)], _silent)
                async with locked(self.layout.dir):  # another cloud's machine may get its address
                    await self._lead_to_metadata()
                break
            except (ProviderError, OSError) as error:
                log.error("%s could not be removed yet: %s", self.host_name(id), error)
                await asyncio.sleep(AGAIN_SECONDS)
        self._stands.pop(id, None)

    async def _pull_the_plug(self, id: str) -> None:
        await machine.stop(self.layout, self.host_name(id))
        before = self._stands.get(id, Stand("gone"))
        self._stands[id] = Stand("dead", before.host, before.port, before.private_address)


async def _after(before: asyncio.Task[None] | None, work: Callable[[], Awaitable[None]]) -> None:
    """One thing after the other for a machine; what is being done is first given up, and if it fails, so be it."""
    if before is not None:
        before.cancel()
        await asyncio.wait([before])
        if not before.cancelled() and (error := before.exception()):
            log.error("what was done to a machine before failed: %s", error)
    await work()


def metadata_rules(layout: Layout, site: Site, kind: str, machines: Iterable[str], port: int) -> str:
    """nftables rules, as text: these machines, if they ask METADATA, are answered at a port of the cloud's own.

    Each cloud of a cluster has a chain of its own, so that all of them can tell their machines. The computer that they
    run on is not concerned: it may be in a cloud that answers there.
    """
    asking = ", ".join(sorted(machines))
    rule = f"ip saddr {{ {asking} }} ip daddr {METADATA} tcp dport 80 dnat to {network.gateway(site)}:{port}"
    chain = chain_of(kind)
    return "\n".join(
        [
            f"table ip {layout.table} {{",
            f"    chain {chain} {{",
            "        type nat hook prerouting priority dstnat; policy accept;",
            "    }",
            "}",
            f"flush chain ip {layout.table} {chain}",
            *([f'add rule ip {layout.table} {chain} iifname "{layout.bridge(site)}" {rule}'] if asking else ()),
            "",
        ]
    )


def chain_of(kind: str) -> str:
    """The chain that has the rules of one cloud."""
    return "cloud_" + re.sub(r"\W", "_", kind)


def _silent(what: str, done: float) -> None:
    """Nobody watches."""
