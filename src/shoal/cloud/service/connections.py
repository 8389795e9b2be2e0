"""How the service connects to hosts: the controller is this machine, the others are reached by SSH.

A machine must show the host key that it got at boot, or replaced at the join. Where a provider runs no boot script, the
key is trusted on first use and stored under the machine's id, not its address, which another machine may get later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from shoal.cloud.providers.api import RentedInstance
from shoal.errors import ShoalError, Unreachable
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.local import LocalConnector
from shoal.hosts.ssh import SshConnector
from shoal.hosts.ssh_route import SshOptions
from shoal.plan.connections import Fleet

CONNECT_TIMEOUT_S = 4.0
PERMANENT = "permanent-"
"""Begins the names of files with the keys of permanent hosts."""


class MachineConnector:
    """Connects the controller to itself, to rented machines and to permanent hosts."""

    def __init__(
        self,
        controller: str,
        identity: Path,
        known_hosts: Path,
        here: Connector | None = None,
        there: Callable[[Path], Connector] | None = None,
    ) -> None:
        """`known_hosts` is a directory with one file per machine. Tests replace `here` and `there`."""
        self._controller = controller
        self._identity = identity
        self._known_hosts = known_hosts
        self._here = here or LocalConnector()
        self._there = there or _by_ssh

    def fleet(self, machines: Mapping[str, RentedInstance], permanent: Mapping[str, Target] | None = None) -> Fleet:
        """The controller, these machines and permanent hosts, not yet connected."""
        self._known_hosts.mkdir(mode=0o700, parents=True, exist_ok=True)
        targets = {self._controller: Target(self._controller)}
        connectors = {self._controller: self._here}
        for name, machine in machines.items():
            expected = machine.host_key or None
            targets[name] = Target(name, machine.host, machine.port, machine.user, self._identity, expected)
            connectors[name] = self._there(self._known_hosts / _file_name(machine.id))
        for name, target in (permanent or {}).items():
            targets[name] = replace(target, identity=self._identity)
            connectors[name] = self._there(self._known_hosts / _file_name(f"{PERMANENT}{name}"))
        return Fleet(targets, _ByName(connectors))

    async def run_on(self, machines: Mapping[str, RentedInstance], command: Sequence[str], timeout_s: float) -> None:
        """Run a command as root on machines, within this time. It never fails: some may be unreachable."""

        async def run(name: str) -> None:
            await (await fleet.host(name)).run(command, timeout=timeout_s, root=True)

        with contextlib.suppress(ShoalError, TimeoutError):
            async with asyncio.timeout(timeout_s), self.fleet(machines) as fleet:
                await fleet.each(machines, run)

    def forget_others(self, machines: Iterable[RentedInstance]) -> None:
        """Remove the host keys of all other machines."""
        kept = {_file_name(machine.id) for machine in machines}
        for path in self._known_hosts.glob("*"):
            if path.name.startswith(PERMANENT):
                continue
            if path.name.partition(".")[0] not in kept and path.name not in kept:
                path.unlink(missing_ok=True)


async def connect_to(fleet: Fleet, name: str) -> None:
    """Connect to a machine. Raises HostError quickly, as a booting machine is retried."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            await fleet.host(name)
    except TimeoutError:
        target = fleet.targets[name]
        cause = f"{target.address}:{target.port} does not answer within {CONNECT_TIMEOUT_S:g} s"
        raise Unreachable(name, cause, hint="check the machine in the provider's console") from None


class _ByName:
    """Uses another connector for each host."""

    def __init__(self, connectors: Mapping[str, Connector]) -> None:
        self._connectors = connectors

    async def connect(self, target: Target) -> Host:
        if target.name not in self._connectors:
            raise Unreachable(target.name, "no longer exists", hint="the node gets another machine")
        return await self._connectors[target.name].connect(target)


def _by_ssh(known_hosts: Path) -> Connector:
    return SshConnector(known_hosts, SshOptions(config=Path(os.devnull), agent=False, keep=False))


def _file_name(id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in id)[:100]
