"""Faults of sandbox hosts under podman or docker, for tests."""

# What is waited for has no event to wait on.
# ruff: noqa: ASYNC110
import asyncio
import contextlib
import os
import signal
from pathlib import Path

from shoal.sandbox import engine_hosts
from shoal.sandbox.engine import LOOPBACK, find_engine
from shoal.sandbox.layout import HostRecord, Layout
from shoal.sandbox.lifecycle import ssh_answers
from shoal.sandbox.programs import call

REBOOT_TIMEOUT_S = 300.0


async def run(layout: Layout, host: HostRecord, command: str) -> None:
    """A command of the engine for the host's container: pause, unpause, kill."""
    await find_engine(host.shape.engine).run(command, layout.namespace(host.name))


async def state(layout: Layout, host: HostRecord) -> str:
    states = await engine_hosts.list_states(find_engine(host.shape.engine), layout)
    return states.get(host.name, "stopped")


async def set_cable(layout: Layout, host: HostRecord, *, connected: bool) -> None:
    """Set the machine's end of the host's link up or down. Rootless podman has it in a network namespace.

    The way from the machine to the host's SSH server does not use that link there, and is stopped by itself.
    """
    engine = find_engine(host.shape.engine)
    rootless = engine.name == "podman" and os.geteuid() != 0
    outside = (*engine.prefix, "unshare", "--rootless-netns") if rootless else ()
    number = await engine.run("exec", layout.namespace(host.name), "cat", "/sys/class/net/eth0/iflink")
    links = (await call(*outside, "ip", "-o", "link")).splitlines()
    [link] = [line.split()[1] for line in links if line.startswith(f"{number.split()[-1]}: ")]
    await call(*outside, "ip", "link", "set", link.partition("@")[0], "up" if connected else "down")
    if rootless:
        look = ("inspect", "--format", "{{.State.Pid}}", layout.namespace(host.name))
        leader = int((await engine.run(*look)).split()[-1])
        for process in port_forwarders(leader):
            os.kill(process, signal.SIGCONT if connected else signal.SIGSTOP)


def port_forwarders(leader: int) -> list[int]:
    """What leads from a port of this machine to a host of rootless podman. It is in the host's network namespace."""
    found = []
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended, or is another user's
            same = (place / "ns/net").readlink() == Path(f"/proc/{leader}/ns/net").readlink()
            if same and (place / "cmdline").read_bytes().startswith(b"rootlessport"):
                found.append(int(place.name))
    return found


async def reboot(layout: Layout, host: HostRecord) -> None:
    """Reboot the host from inside, and wait until SSH answers again."""
    engine, name = find_engine(host.shape.engine), layout.namespace(host.name)
    look = ("inspect", "--format", "{{.State.StartedAt}}", name)
    before = (await engine.run(*look)).splitlines()[-1]
    await engine.run("exec", name, "systemctl", "reboot", check=False)
    async with asyncio.timeout(REBOOT_TIMEOUT_S):
        while (await engine.run(*look)).splitlines()[-1] == before:
            await asyncio.sleep(0.2)
        while not await ssh_answers(LOOPBACK, port=host.port):
            await asyncio.sleep(0.2)
