"""The sandbox as a provider: it makes, removes and breaks hosts on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.provider import Instance, Progress, Request
from shoal.local_files import cache_dir
from shoal.sandbox import checks, engine_checks, engine_hosts, images, lifecycle, network, nspawn, seed, vm, vm_disk
from shoal.sandbox.cgroups import groups_named, hierarchies
from shoal.sandbox.layout import HostRecord, Layout, Site, site_of
from shoal.spec.finding import Finding

BOOT_REPORT_S = 10


class SandboxProvider:
    """Real Debian hosts: containers under systemd-nspawn, virtual machines under QEMU, or containers of an engine."""

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or cache_dir()

    def check(self, requests: Sequence[Request]) -> list[Finding]:
        engine = next((request.shape.engine for request in requests if request.shape.engine), "")
        if engine:
            return engine_checks.find_problems(engine, requests, engine_checks.EngineFacts.observe(engine))
        return checks.find_problems(self.cache, requests, checks.MachineFacts.observe(self.cache))

    async def instances(self, cluster: str) -> list[Instance]:
        layout = Layout(self.cache, cluster)
        try:
            # A simulated cloud owns its machines; only `destroy` removes them.
            hosts = [host for host in layout.hosts().values() if not host.renter]
            if any(host.shape.engine for host in hosts):
                return await engine_hosts.instances(layout, hosts)
            return [lifecycle.instance(layout, host) for host in hosts]
        except PermissionError as error:
            raise ProviderError(f"cannot read {error.filename}: {error.strerror}", hint="run it with sudo") from None

    async def create(self, cluster: str, requests: Sequence[Request], progress: Progress) -> list[Instance]:
        _raise_errors(self.check(requests))
        layout = Layout(self.cache, cluster)
        _reject_other_kind(layout, requests)
        if any(request.shape.engine for request in requests):
            return await engine_hosts.create(layout, requests, progress)
        needed = sorted({request.shape.image for request in requests})
        built = {image: await images.ensure(self.cache, image, progress) for image in needed}
        for image in sorted({request.shape.image for request in requests if request.shape.vm}):
            await vm_disk.ensure(self.cache, built[image], progress)
        async with layout.locked():
            sites = await network.ensure_sites(layout, (site_of(request.shape) for request in requests))
            hosts = await self._lay_out(layout, sites, built, requests, progress)
            if any(host.shape.container for host in hosts):
                await network.open_ports(layout, sites)
            await self._start(layout, sites, hosts, progress)
        return [lifecycle.instance(layout, host) for host in hosts]

    async def delete(self, cluster: str, names: Sequence[str], progress: Progress) -> None:
        layout = Layout(self.cache, cluster)
        if not layout.dir.exists():
            return
        async with layout.locked():
            hosts = layout.hosts()
            for count, name in enumerate(names):
                progress(f"removing host {name}", count / len(names))
                if name in hosts and hosts[name].shape.engine:
                    await engine_hosts.delete(layout, hosts[name])
                    continue
                await lifecycle.stop(layout, name)
                if name in hosts:
                    await network.unplug(layout, hosts[name])
                await images.remove_tree(layout.host_dir(name))
        progress("hosts removed", 1.0)

    async def destroy(self, cluster: str, progress: Progress) -> None:
        layout = Layout(self.cache, cluster)
        engine = engine_hosts.engine_of(layout)
        if os.geteuid() != 0 and not engine and layout.dir.exists():
            raise ProviderError("removing sandbox hosts needs root", hint="run the command with sudo")
        async with layout.locked():
            progress("stopping hosts", 0.0)
            if engine:
                await engine_hosts.destroy(layout)
            elif os.geteuid() == 0:
                await self._destroy_machines(layout, progress)
            progress("removing files", 0.7)
            await images.remove_tree(layout.dir)
            with contextlib.suppress(OSError):  # other clusters exist, or one is being made
                layout.dir.parent.rmdir()
        progress("sandbox removed", 1.0)

    async def _destroy_machines(self, layout: Layout, progress: Progress) -> None:
        """Remove hosts that Shoal runs itself, and their network."""
        groups = groups_named(layout.prefix, hierarchies())
        await asyncio.gather(*(lifecycle.stop(layout, group.name.removeprefix(layout.prefix)) for group in groups))
        progress("removing the network", 0.4)
        await network.remove_all(layout)

    async def _lay_out(
        self,
        layout: Layout,
        sites: dict[str, Site],
        built: dict[str, Path],
        requests: Sequence[Request],
        progress: Progress,
    ) -> list[HostRecord]:
        """The record of every host that is asked for; those that have none yet are made."""
        authorized = seed.ensure_identity(layout)
        records = layout.hosts()
        for count, request in enumerate(requests):
            if request.name in records:
                if request.shape != records[request.name].shape:
                    progress(f"host {request.name} keeps the shape it was made with; remove it to change that", 0.0)
                continue
            progress(f"making host {request.name}", count / len(requests))
            image = built[request.shape.image]
            record = network.new_host(request.name, request.shape, image, sites, records.values())
            records[request.name] = await seed.lay_out(layout, record, authorized)
        return [records[request.name] for request in requests]

    async def _start(self, layout: Layout, sites: dict[str, Site], hosts: list[HostRecord], progress: Progress) -> None:
        """Start what is stopped, a few at a time, and wait for SSH on whatever has not answered yet."""
        cpus = os.cpu_count() or 1
        containers, machines = asyncio.Semaphore(2 * cpus), asyncio.Semaphore(cpus)
        waiting = [host for host in hosts if _needs_start(layout, host) or not lifecycle.is_ready(layout, host.name)]
        done = 0

        async def bring_up(host: HostRecord) -> None:
            nonlocal done
            async with machines if host.shape.vm else containers:
                if _needs_start(layout, host):
                    await lifecycle.stop(layout, host.name)
                    await network.plug_in(layout, host, sites[host.site])
                    if host.shape.vm:
                        await vm.start(layout, host, progress)
                    else:
                        await nspawn.start(layout, host)
                timeout = vm.boot_timeout(layout.cache, host)
                async with _reported(host, progress, lambda: done / len(waiting)):
                    await lifecycle.wait_for_ssh(layout, host, timeout)
            done += 1
            progress(f"host {host.name} is up", done / len(waiting))

        hint = f"console logs are {layout.dir}/hosts/*/log; running the command again starts those hosts again"
        await lifecycle.each_host(waiting, bring_up, total=len(hosts), hint=lambda _: hint)


@contextlib.asynccontextmanager
async def _reported(host: HostRecord, progress: Progress, part: Callable[[], float]) -> AsyncIterator[None]:
    """Say now and then that a virtual machine is still booting."""

    async def report() -> None:
        for seconds in itertools.count(BOOT_REPORT_S, BOOT_REPORT_S):
            await asyncio.sleep(BOOT_REPORT_S)
            progress(f"virtual machine {host.name} boots, {seconds} s so far", part())

    task = asyncio.create_task(report()) if host.shape.vm else None
    try:
        yield
    finally:
        if task is not None:
            task.cancel()


def _needs_start(layout: Layout, host: HostRecord) -> bool:
    return lifecycle.state(layout, host.name) == "stopped" or vm.is_resuming(layout, host.name)


def _reject_other_kind(layout: Layout, requests: Sequence[Request]) -> None:
    """Hosts of an engine have a network of the engine's own, which no other host is on."""
    wanted = {request.shape.engine for request in requests}
    other = [host for host in layout.hosts().values() if host.shape.engine not in wanted]
    if len(wanted) == 1 and other and (wanted != {""} or other[0].shape.engine):
        kind = other[0].shape.engine or "container or vm"
        raise ProviderError(
            f"cluster {layout.cluster} has hosts of another kind: {other[0].name} is of kind {kind}",
            hint="take it down with `shoal down` first",
        )


def _raise_errors(findings: list[Finding]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        what = "the sandbox cannot make these hosts: " + "; ".join(map(str, errors))
        raise ProviderError(what, hint=errors[0].fix)
