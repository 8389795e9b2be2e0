"""Where the machines of a simulated cloud really are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

from shoal.simulators.machines import Machine, MachineType, Profile


@dataclass(frozen=True)
class Stand:
    """How it is with one machine."""

    state: Literal["making", "up", "dead", "gone"]
    host: str = ""
    """Where SSH answers once it is up."""
    port: int = 22
    private_address: str = ""


class Ground(Protocol):
    """Makes machines and takes them away. Everything but `close` returns at once; `stand` says how far it is."""

    def begin(self, machine: Machine, type: MachineType, profile: Profile) -> None:
        """Make a machine."""

    def stand(self, id: str) -> Stand:
        """How it is with a machine; `gone` for one that never was."""

    def end(self, id: str) -> None:
        """Remove a machine and all it left."""

    def kill(self, id: str) -> None:
        """Pull its power plug."""

    def notice(self, id: str, at: float) -> None:
        """Tell the machine itself that it will be taken away, where the cloud does so."""

    def adopt(self, ids: Iterable[str]) -> set[str]:
        """Which of these are there from a former run. What is there beside them is removed."""

    async def close(self, keep: bool = False) -> None:
        """Finish what is under way; remove every machine unless they are kept."""


class Nowhere:
    """No machines at all: an address that nothing answers at. For contract tests and for benches."""

    def __init__(self) -> None:
        self._there: dict[str, Stand] = {}

    def begin(self, machine: Machine, type: MachineType, profile: Profile) -> None:
        count = len(self._there)
        public, private = f"192.0.2.{1 + count % 254}", f"10.{count >> 16 & 255}.{count >> 8 & 255}.{count & 255}"
        self._there[machine.id] = Stand("up", public, 22, private)

    def stand(self, id: str) -> Stand:
        return self._there.get(id, Stand("gone"))

    def end(self, id: str) -> None:
        self._there[id] = Stand("gone")

    def kill(self, id: str) -> None:
        self._there[id] = Stand("dead")

    def notice(self, id: str, at: float) -> None:
        pass

    def adopt(self, ids: Iterable[str]) -> set[str]:
        for id in ids:
            self._there[id] = Stand("up", f"192.0.2.{1 + len(self._there) % 254}")
        return set(self._there)

    async def close(self, keep: bool = False) -> None:
        pass
