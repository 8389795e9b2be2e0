"""The hosts behind a simulated cloud: real ones, or none."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal_simulators.instances import MachineType, Profile, SimulatedInstance


@dataclass(frozen=True)
class HostStatus:
    """The state of a machine's host, and its addresses."""

    state: Literal["making", "up", "dead", "gone"]
    host: str = ""
    """Where SSH answers once it is up."""
    port: int = 22
    private_address: str = ""


class HostBackend(Protocol):
    """Makes and removes the hosts of machines. All but `close` return at once; `status` reports progress."""

    def begin(self, machine: SimulatedInstance, type: MachineType, profile: Profile) -> None:
        """Make a machine."""

    def status(self, id: str) -> HostStatus:
        """The status of a machine's host; `gone` where it never had one."""

    def end(self, id: str) -> None:
        """Remove a machine and its files."""

    def kill(self, id: str) -> None:
        """Power it off at once."""

    def stop(self, id: str) -> None:
        """Have its system shut down, and power it off then."""

    def shut_down(self, id: str) -> None:
        """Press its power button: its system shuts down, in its own time."""

    def start(self, id: str) -> None:
        """Boot a machine that was powered off, with all that is on its disk."""

    def address_prefix(self) -> str:
        """The first three numbers of the external addresses that the cloud may reserve."""

    def route(self, routes: Mapping[str, str]) -> None:
        """Route reserved external addresses, and no others, to machines: address -> id."""

    def adopt(self, ids: Iterable[str]) -> set[str]:
        """Which of these still exist from an earlier run. Any other host is removed."""

    async def close(self, keep: bool = False) -> None:
        """Finish running operations; remove every machine unless `keep`."""


class NoHosts:
    """No hosts: addresses that never answer. For contract tests and benches."""

    def __init__(self) -> None:
        self._hosts: dict[str, HostStatus] = {}
        self._starts = 100
        """A machine without a reserved address gets another one at each start."""

    def begin(self, machine: SimulatedInstance, type: MachineType, profile: Profile) -> None:
        count = len(self._hosts)
        public, private = f"192.0.2.{1 + count % 254}", f"10.{count >> 16 & 255}.{count >> 8 & 255}.{count & 255}"
        self._hosts[machine.id] = HostStatus("up", public, 22, private)

    def status(self, id: str) -> HostStatus:
        return self._hosts.get(id, HostStatus("gone"))

    def end(self, id: str) -> None:
        self._hosts[id] = HostStatus("gone")

    def kill(self, id: str) -> None:
        self._hosts[id] = HostStatus("dead")

    def stop(self, id: str) -> None:
        self.kill(id)

    def shut_down(self, id: str) -> None:
        """Its system takes all the time there is."""

    def start(self, id: str) -> None:
        address = f"192.0.2.{1 + (len(self._hosts) + self._starts) % 254}"
        self._starts += 1
        self._hosts[id] = HostStatus("up", address, 22, self._hosts[id].private_address)

    def address_prefix(self) -> str:
        return "203.0.113"

    def route(self, routes: Mapping[str, str]) -> None:
        pass

    def adopt(self, ids: Iterable[str]) -> set[str]:
        for id in ids:
            self._hosts[id] = HostStatus("up", f"192.0.2.{1 + len(self._hosts) % 254}")
        return set(self._hosts)

    async def close(self, keep: bool = False) -> None:
        pass
