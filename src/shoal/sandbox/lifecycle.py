"""One sandbox host, container or virtual machine: its state, its SSH server, its end.

All its processes are in cgroups of its own: on this machine it runs while one of them does.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

from shoal.errors import ProviderError
from shoal.hosts.api import Target
from shoal.hosts.provider import Instance
from shoal.sandbox.cgroups import HostCgroups, hierarchies
from shoal.sandbox.images import remove_tree
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.network import outer_address
from shoal.sandbox.programs import last_lines
from shoal.sandbox.qemu import recorded_accelerator
from shoal.sandbox.seed import write_file

BOOT_TIMEOUT_S = 120.0
MAX_SHOWN_FAILURES = 3
"""An error shows the causes of this many hosts; others usually fail for the same cause."""
BANNER_TIMEOUT_S = 2.0
VM_BANNER_TIMEOUT_S = 30.0
"""An emulated host on a busy machine takes seconds to answer a connection. Each that is given up costs it as many."""
EMULATED_SLOWNESS = 6
"""Such a host took more than the 10 seconds that others have for a login: at load 20, on two cores."""
ENTER = """\
set -eu
while read -r group; do echo 0 > "$group/cgroup.procs"; done < "$1"
shift
exec "$@"
"""
"""Enters the host's cgroups before anything else, so that all that follows can be found and ended there."""


async def each_host(
    hosts: Sequence[HostRecord],
    bring_up: Callable[[HostRecord], Awaitable[None]],
    total: int,
    hint: Callable[[str], str],
) -> None:
    """Bring up hosts at the same time. Those that fail are one error, with the hint for the first of them."""
    outcomes = await asyncio.gather(*(bring_up(host) for host in hosts), return_exceptions=True)
    failed: dict[str, str] = {}
    for host, outcome in zip(hosts, outcomes, strict=True):
        if isinstance(outcome, ProviderError):
            failed[host.name] = outcome.message
        elif isinstance(outcome, BaseException):
            raise outcome
    if failed:
        causes = list(failed.values())
        more = len(causes) - MAX_SHOWN_FAILURES
        shown = [*causes[:MAX_SHOWN_FAILURES], *([f"and {more} more"] if more > 0 else [])]
        what = f"{len(failed)} of {total} sandbox hosts did not come up: " + "\n".join(shown)
        raise ProviderError(what, hint=hint(next(iter(failed))), hosts=failed)


def group(layout: Layout, name: str) -> HostCgroups:
    """The cgroups that hold the host's processes."""
    return HostCgroups(layout.namespace(name), hierarchies())


def instance(layout: Layout, host: HostRecord) -> Instance:
    """The host as the rest of Shoal sees it."""
    address, port = (outer_address(layout), host.outer_port) if host.shape.container else (host.address, 22)
    target = Target(
        name=host.name,
        address=address,
        port=port,
        user="root",
        identity=layout.identity,
        host_key=host.host_key,
        slowness=EMULATED_SLOWNESS if is_emulated(layout.cache, host) else 1,
    )
    return Instance(name=host.name, state=state(layout, host.name), target=target, shape=host.shape)


def is_emulated(cache: Path, host: HostRecord) -> bool:
    """Whether the host is a virtual machine without KVM."""
    return host.shape.vm and recorded_accelerator(cache) != "kvm"


def state(layout: Layout, name: str) -> str:
    """`running`, `starting`, `stopped` or `frozen`."""
    cgroups = group(layout, name)
    if not cgroups.alive:
        return "stopped"
    if cgroups.frozen:
        return "frozen"
    return "running" if is_ready(layout, name) else "starting"


def is_ready(layout: Layout, name: str) -> bool:
    """Whether SSH has answered since the host was last started from outside."""
    return (layout.host_dir(name) / "ready").exists()


def cpus_of(host: HostRecord) -> list[int]:
    """The machine's CPUs that the host may use: as many as its shape says, spread over the hosts."""
    available = sorted(os.sched_getaffinity(0))
    count = min(host.shape.cpus or len(available), len(available))
    return sorted(available[(host.index * count + step) % len(available)] for step in range(count))


async def wait_for_ssh(layout: Layout, host: HostRecord, timeout_s: float = BOOT_TIMEOUT_S) -> None:
    """Wait until the host's SSH server answers. Raises ProviderError when the host ends, and on timeout."""
    log, cgroups = layout.host_dir(host.name) / "log", group(layout, host.name)
    clock = asyncio.get_running_loop().time
    end = clock() + timeout_s
    while clock() < end:
        if await ssh_answers(host.address, VM_BANNER_TIMEOUT_S if host.shape.vm else BANNER_TIMEOUT_S):
            write_file(layout.host_dir(host.name) / "ready", b"", 0o644)
            return
        if not cgroups.alive:
            output = last_lines(log.read_text(errors="replace"))
            raise ProviderError(f"host {host.name} ended during boot: {output}", hint=f"its console log is {log}")
        await asyncio.sleep(0.1)
    what = f"SSH does not answer on host {host.name} ({host.address}) {timeout_s:.0f} s after its start"
    raise ProviderError(what, hint=f"its console log is {log}")


async def ssh_answers(address: str, timeout_s: float = BANNER_TIMEOUT_S, port: int = 22) -> bool:
    """Whether an SSH server answers there."""
    try:
        async with asyncio.timeout(timeout_s):
            reader, writer = await asyncio.open_connection(address, port)
            try:
                return (await reader.read(4)) == b"SSH-"
            finally:
                writer.close()
    except (OSError, TimeoutError):
        return False


async def stop(layout: Layout, name: str) -> None:
    """Kill the host's processes: a sandbox host needs no orderly shutdown."""
    cgroups = group(layout, name)
    while not cgroups.remove():  # a process of a killed `create` may still be on its way in
        await cgroups.kill()
    # Where /run is on a disk, systemd-nspawn does not remove this directory itself.
    await remove_tree(Path("/run/systemd/nspawn/propagate", layout.namespace(name)))
