"""Machines that are real: sandbox hosts on the network of one sandbox cluster, made and removed as the cloud says.

They are beside the cluster's own hosts and reached by them; the sandbox does not count them among those, and only
`shoal down` takes them with it. What a host does when it first boots (its user, the key, the script of the order) is
in its seed, as cloud-init would have it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import socket
import stat
from collections.abc import Coroutine, Iterable
from pathlib import Path
from typing import Any

import asyncssh

from shoal.errors import ProviderError
from shoal.providers.sandbox import images, machine, network, seed
from shoal.providers.sandbox.layout import OPEN_SITE, HostRecord, Layout, cache_dir, site_of
from shoal.providers.sandbox.programs import call
from shoal.providers.sandbox.provider import SandboxProvider
from shoal.simulators.ground import Stand
from shoal.simulators.machines import Machine, MachineType, Profile
from shoal.simulators.server import METADATA, listen
from shoal.spec.member import Shape

log = logging.getLogger("shoal.simulators")

AT_ONCE = 4
"""So many hosts boot at a time; a machine of two cores has enough with that."""
AGAIN_SECONDS = 2.0
FIRST_BOOT = """\
[Unit]
Description=The login user of this machine, and its key
Before=ssh.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/local/lib/shoal-first-boot
"""
FIRST_BOOT_PROGRAM = """\
#!/bin/sh
set -eu
user=$(cat /etc/shoal-cloud/user)
id "$user" >/dev/null 2>&1 || useradd --create-home --shell /bin/bash "$user"
home=$(getent passwd "$user" | cut -d: -f6)
install -d -m 0700 -o "$user" -g "$user" "$home/.ssh"
install -m 0600 -o "$user" -g "$user" /etc/shoal-cloud/authorized_keys "$home/.ssh/authorized_keys"
if [ "$user" != root ]; then
    echo "$user ALL=(ALL) NOPASSWD: ALL" > /etc/sudoers.d/90-cloud
    chmod 0440 /etc/sudoers.d/90-cloud
fi
"""
USER_DATA = """\
[Unit]
Description=The script that this machine was ordered with
After=network.target ssh.service
ConditionPathExists=!/var/lib/shoal-user-data-ran

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStartPre=/usr/bin/touch /var/lib/shoal-user-data-ran
ExecStart=/etc/shoal-cloud/user-data
"""
BROKEN_SMI = b"""\
#!/bin/sh
echo "Unable to determine the device handle for GPU0000:00:05.0: Unknown Error" >&2
exit 15
"""
NO_DEVICE = os.makedev(240, 0)
"""A number that no driver has: to open it is ENXIO, as with a GPU that fell off its bus."""
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
        self._told_by = ""
        """The bridge that has METADATA because of us."""

    @property
    def store(self) -> Path:
        """Where the cloud's memory is kept: it goes with the cluster."""
        return self.layout.dir / "simulators" / f"{self.kind}.json"

    async def open(self) -> str:
        """Make the network, and return the machine's address on it: there the cluster reaches the simulator."""
        if os.geteuid() != 0:
            raise ProviderError("sandbox hosts take root", hint="run the command with sudo, or leave --cluster out")
        async with self.layout.locked():
            sites = await network.ensure_sites(self.layout, [OPEN_SITE])
        return network.gateway(sites[OPEN_SITE])

    async def listen_for_metadata(self) -> socket.socket:
        """A socket where machines on this network ask for themselves, as in a cloud. Raises ProviderError."""
        bridge = self.layout.bridge(self.layout.sites()[OPEN_SITE])
        await call("ip", "addr", "replace", f"{METADATA}/32", "dev", bridge)
        listener = listen(METADATA, 80, bridge)
        self._told_by = bridge
        return listener

    def begin(self, machine: Machine, type: MachineType, profile: Profile) -> None:
        self._stands[machine.id] = Stand("making")
        self._start(machine.id, self._make(machine, type, profile))

    def stand(self, id: str) -> Stand:
        found = self._stands.get(id, Stand("gone"))
        if found.state == "up" and machine.state(self.layout, self.host_name(id)) == "stopped":
            found = self._stands[id] = Stand("dead", found.host, found.port, found.private_address)
        return found

    def end(self, id: str) -> None:
        self._start(id, self._remove(id))

    def kill(self, id: str) -> None:
        self._start(id, self._pull_the_plug(id))

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
                self._start(name, self._provider.delete(self.layout.cluster, [name], _silent))
        return {wanted[name] for name in there if name in wanted}

    async def close(self, keep: bool = False) -> None:
        for task in self._tasks.values():
            if not keep:
                task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        if self._told_by:
            with contextlib.suppress(ProviderError):  # it went with its bridge
                await call("ip", "addr", "del", f"{METADATA}/32", "dev", self._told_by)
        if keep:
            return
        hosts = self.layout.hosts()
        mine = [name for name, host in hosts.items() if host.renter == self.kind]
        if set(mine) == set(hosts) and not self._others():
            await self._provider.destroy(self.layout.cluster, _silent)
            return
        await self._provider.delete(self.layout.cluster, mine, _silent)
        self.store.unlink(missing_ok=True)

    def host_name(self, id: str) -> str:
        """What the sandbox calls the host of a machine."""
        return re.sub(r"[^a-z0-9]+", "-", f"{self.kind}-{id}".lower())[:NAME_LENGTH].strip("-")

    def _others(self) -> bool:
        """Whether another simulated cloud has machines or a memory here."""
        return any(path != self.store for path in self.store.parent.glob("*.json"))

    def _start(self, id: str, work: Coroutine[Any, Any, None]) -> None:
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
            known = self.layout.hosts()
            taken = {host.index for host in known.values()}
            record = HostRecord(
                name=self.host_name(wanted.id),
                index=next(n for n in range(len(known) + 1) if n not in taken),
                address=network.free_address(sites[site_of(shape)], (host.address for host in known.values())),
                image=str(built),
                host_key="",
                shape=shape,
                renter=self.kind,
            )
            keys = "".join(f"{key.strip()}\n" for key in wanted.wanted.public_keys)
            authorized = seed.ensure_identity(self.layout) + (keys if profile.user == "root" else "")
            host = await seed.lay_out(self.layout, record, authorized, _seeded(wanted, profile, shape))
            if not wanted.gpu_works:
                _break_devices(self.layout.host_dir(host.name) / "devices")
            if shape.container:
                await network.open_ports(self.layout, sites)
            await network.plug_in(self.layout, host, sites[host.site])
            if not wanted.reachable:
                await network.set_cable(self.layout, host, connected=False)
            await machine.start(self.layout, host)
        self._stands[wanted.id] = self._standing(host, "making")
        return host

    def _standing(self, host: HostRecord, state: Any) -> Stand:
        if host.shape.container:
            return Stand(state, network.outer_address(self.layout), host.outer_port)
        return Stand(state, host.address, 22, host.address)

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
                break
            except (ProviderError, OSError) as error:
                log.error("%s could not be removed yet: %s", self.host_name(id), error)
                await asyncio.sleep(AGAIN_SECONDS)
        self._stands.pop(id, None)

    async def _pull_the_plug(self, id: str) -> None:
        await machine.stop(self.layout, self.host_name(id))
        before = self._stands.get(id, Stand("gone"))
        self._stands[id] = Stand("dead", before.host, before.port, before.private_address)


async def _after(before: asyncio.Task[None] | None, work: Coroutine[Any, Any, None]) -> None:
    """One thing after the other for a machine; what is being made is first given up."""
    if before is not None:
        before.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await before
    await work


def _seeded(wanted: Machine, profile: Profile, shape: Shape) -> dict[str, tuple[bytes, int]]:
    """What makes a host the machine that was ordered."""
    keys = "".join(f"{key.strip()}\n" for key in wanted.wanted.public_keys)
    files: dict[str, tuple[bytes, int]] = {}
    if not wanted.gpu_works and shape.gpus:
        files["usr/bin/nvidia-smi"] = (BROKEN_SMI, 0o755)
    if shape.container:
        return files
    files |= {
        "etc/shoal-cloud/user": (f"{profile.user}\n".encode(), 0o644),
        "etc/shoal-cloud/authorized_keys": (keys.encode(), 0o644),
        "usr/local/lib/shoal-first-boot": (FIRST_BOOT_PROGRAM.encode(), 0o755),
        "etc/systemd/system/shoal-first-boot.service": (FIRST_BOOT.encode(), 0o644),
        "etc/systemd/system/ssh.service.d/cloud.conf": (
            b"[Unit]\nWants=shoal-first-boot.service\nAfter=shoal-first-boot.service\n",
            0o644,
        ),
    }
    if wanted.wanted.user_data:
        files["etc/shoal-cloud/user-data"] = (wanted.wanted.user_data.encode(), 0o700)
        files["etc/systemd/system/shoal-user-data.service"] = (USER_DATA.encode(), 0o644)
        files["etc/systemd/system/multi-user.target.d/cloud.conf"] = (
            b"[Unit]\nWants=shoal-user-data.service\n",
            0o644,
        )
    return files


def _break_devices(where: Path) -> None:
    for path in where.glob("nvidia*"):
        path.unlink()
        os.mknod(path, 0o666 | stat.S_IFCHR, NO_DEVICE)
        path.chmod(0o666)


def _silent(what: str, done: float) -> None:
    """Nobody watches."""
