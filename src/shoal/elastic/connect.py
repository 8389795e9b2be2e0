"""How the service reaches hosts: the controller is this machine, and rented machines are met by SSH, each by its key.

A machine's host key is trusted when it is first met and kept with the machine's id, not with its address: another
machine may have that tomorrow.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from shoal.errors import Unreachable
from shoal.hosts.api import Connector, Host, Target
from shoal.hosts.local import LocalConnector
from shoal.hosts.ssh import SshConnector
from shoal.plan.fleet import Fleet
from shoal.providers.rental import Rented

MEET_SECONDS = 4.0


class MachineConnector:
    """Connects the controller to itself and to rented machines."""

    def __init__(
        self,
        controller: str,
        identity: Path,
        known_hosts: Path,
        here: Connector | None = None,
        there: Callable[[Path], Connector] | None = None,
    ) -> None:
        """`known_hosts` is a directory with a file a machine. `here` and `there` take the place of both, for tests."""
        self._controller = controller
        self._identity = identity
        self._known_hosts = known_hosts
        self._here = here or LocalConnector()
        self._there = there or _by_ssh

    def fleet(self, machines: Mapping[str, Rented]) -> Fleet:
        """The controller and these machines, not yet connected."""
        targets = {self._controller: Target(self._controller)}
        targets |= {name: self._target(name, machine) for name, machine in machines.items()}
        ways = {name: self._connector(machine) for name, machine in machines.items()}
        return Fleet(targets, _ByName({self._controller: self._here, **ways}))

    def forget_others(self, machines: Iterable[Rented]) -> None:
        """Forget the keys of all machines but these."""
        kept = {_file_name(machine.id) for machine in machines}
        for path in self._known_hosts.glob("*") if self._known_hosts.is_dir() else ():
            if path.name.partition(".")[0] not in kept and path.name not in kept:
                path.unlink(missing_ok=True)

    def _target(self, name: str, machine: Rented) -> Target:
        return Target(name, machine.host, machine.port, machine.user, self._identity)

    def _connector(self, machine: Rented) -> Connector:
        self._known_hosts.mkdir(mode=0o700, parents=True, exist_ok=True)
        return self._there(self._known_hosts / _file_name(machine.id))


async def meet(fleet: Fleet, name: str) -> None:
    """Connect to a machine. Raises HostError, and soon: one that boots is asked again and again."""
    try:
        async with asyncio.timeout(MEET_SECONDS):
            await fleet.host(name)
    except TimeoutError:
        target = fleet.targets[name]
        cause = f"{target.address}:{target.port} does not answer within {MEET_SECONDS:g} s"
        raise Unreachable(name, cause, hint="look at the machine in the provider's console") from None


class _ByName:
    """A connector for each host."""

    def __init__(self, connectors: Mapping[str, Connector]) -> None:
        self._connectors = connectors

    async def connect(self, target: Target) -> Host:
        if target.name not in self._connectors:
            raise Unreachable(target.name, "is not there any more", hint="the next node is another machine")
        return await self._connectors[target.name].connect(target)


def _by_ssh(known_hosts: Path) -> Connector:
    return SshConnector(known_hosts, ssh_config=Path(os.devnull), agent=False, connect_timeout=10.0)


def _file_name(id: str) -> str:
    return "".join(letter if letter.isalnum() or letter in "-_" else "_" for letter in id)[:100]
