"""The sandbox as a provider: makes hosts on this machine, and leaves nothing of them behind."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

from shoal.errors import ProviderError
from shoal.providers.api import Capability, Instance, Progress, Request
from shoal.providers.sandbox import checks, images, machine, network, seed
from shoal.providers.sandbox.cgroups import groups_named, hierarchies
from shoal.providers.sandbox.faults import SandboxFaults
from shoal.providers.sandbox.layout import HostRecord, Layout, Site, cache_dir, site_of
from shoal.spec.finding import Finding

TOLD = 3
"""Of so many failed hosts an error tells the whole story; many tend to have the same."""


class SandboxProvider:
    """Real Debian hosts under systemd-nspawn."""

    capabilities = frozenset({Capability.VM, Capability.SITES, Capability.FAULTS})

    def __init__(self, cache: Path | None = None) -> None:
        self.cache = cache or cache_dir()
        self.faults = SandboxFaults(self.cache)

    def check(self, requests: Sequence[Request]) -> list[Finding]:
        return checks.findings(self.cache, requests, checks.Machine.observe(self.cache))

    async def instances(self, cluster: str) -> list[Instance]:
        layout = Layout(self.cache, cluster)
        try:
            # Machines of a simulated cloud are that cloud's to give and to take; only `destroy` minds them.
            return [machine.instance(layout, host) for host in layout.hosts().values() if not host.renter]
        except PermissionError as error:
            raise ProviderError(f"cannot read {error.filename}: {error.strerror}", hint="run it with sudo") from None

    async def create(self, cluster: str, requests: Sequence[Request], progress: Progress) -> list[Instance]:
        _refuse_errors(self.check(requests))
        layout = Layout(self.cache, cluster)
        wanted = sorted({request.shape.image for request in requests})
        built = {image: await images.ensure(self.cache, image, progress) for image in wanted}
        async with layout.locked():
            sites = await network.ensure_sites(layout, (site_of(request.shape) for request in requests))
            hosts = await self._lay_out(layout, sites, built, requests, progress)
            if any(host.shape.container for host in hosts):
                await network.open_ports(layout, sites)
            await self._start(layout, sites, hosts, progress)
        return [machine.instance(layout, host) for host in hosts]

    async def delete(self, cluster: str, names: Sequence[str], progress: Progress) -> None:
        layout = Layout(self.cache, cluster)
        if not layout.dir.exists():
            return
        async with layout.locked():
            hosts = layout.hosts()
            for count, name in enumerate(names):
                progress(f"removing host {name}", count / len(names))
                await machine.stop(layout, name)
                if name in hosts:
                    await network.unplug(layout, hosts[name])
                await images.remove_tree(layout.host_dir(name))
        progress("hosts removed", 1.0)

    async def destroy(self, cluster: str, progress: Progress) -> None:
        layout = Layout(self.cache, cluster)
        if os.geteuid() != 0:
            raise ProviderError("removing sandbox hosts takes root", hint="run the command with sudo")
        async with layout.locked():
            progress("stopping hosts", 0.0)
            groups = groups_named(layout.prefix, hierarchies())
            await asyncio.gather(*(machine.stop(layout, group.name.removeprefix(layout.prefix)) for group in groups))
            progress("removing the network", 0.4)
            await network.remove_all(layout)
            progress("removing files", 0.7)
            await images.remove_tree(layout.dir)
            with contextlib.suppress(OSError):  # there are other clusters, or one is just being made
                layout.dir.parent.rmdir()
        progress("sandbox removed", 1.0)

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
        known = layout.hosts()
        for count, request in enumerate(requests):
            if request.name in known:
                if request.shape != known[request.name].shape:
                    progress(f"host {request.name} keeps the shape it was made with; remove it to change that", 0.0)
                continue
            progress(f"making host {request.name}", count / len(requests))
            image = built[request.shape.image]
            wanted = network.new_host(request.name, request.shape, image, sites, known.values())
            known[request.name] = await seed.lay_out(layout, wanted, authorized)
        return [known[request.name] for request in requests]

    async def _start(self, layout: Layout, sites: dict[str, Site], hosts: list[HostRecord], progress: Progress) -> None:
        """Start what is stopped, a few at a time, and wait for SSH on whatever has not answered yet."""
        at_once = asyncio.Semaphore(2 * (os.cpu_count() or 1))
        waiting = [host for host in hosts if _needs_start(layout, host) or not machine.is_ready(layout, host.name)]
        done = 0

        async def bring_up(host: HostRecord) -> None:
            nonlocal done
            async with at_once:
                if _needs_start(layout, host):
                    await machine.stop(layout, host.name)
                    await network.plug_in(layout, host, sites[host.site])
                    await machine.start(layout, host)
                await machine.wait_for_ssh(layout, host)
            done += 1
            progress(f"host {host.name} is up", done / len(waiting))

        outcomes = await asyncio.gather(*(bring_up(host) for host in waiting), return_exceptions=True)
        failed: dict[str, str] = {}
        for host, outcome in zip(waiting, outcomes, strict=True):
            if isinstance(outcome, ProviderError):
                failed[host.name] = outcome.message
            elif isinstance(outcome, BaseException):
                raise outcome
        if failed:
            told = list(failed.values())
            rest = [f"and {len(told) - TOLD} more"] if len(told) > TOLD else []
            raise ProviderError(
                f"{len(failed)} of {len(hosts)} sandbox hosts did not come up: " + "\n".join([*told[:TOLD], *rest]),
                hint=f"console logs are {layout.dir}/hosts/*/log; running the command again starts those hosts again",
                hosts=failed,
            )


def _needs_start(layout: Layout, host: HostRecord) -> bool:
    return machine.state(layout, host.name) == "stopped"


def _refuse_errors(findings: list[Finding]) -> None:
    errors = [finding for finding in findings if finding.level == "error"]
    if errors:
        raise ProviderError(
            "the sandbox cannot make these hosts: " + "; ".join(str(finding) for finding in errors),
            hint=errors[0].fix,
        )
