"""What one check or apply knows, and which restarts its changes have made due."""

from __future__ import annotations

import os

from shoal.agent.program.disk import read_text, write_atomic
from shoal.agent.program.fast_stdlib import dumps, loads
from shoal.agent.program.systemd import show_units
from shoal.agent.program.wire import Item, Wire

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Callable


class Change:
    """What has to be done about an item."""

    def __init__(self, action: str, diff: str = "") -> None:
        self.action = action
        self.diff = diff


class World:
    """What one check or apply knows: its items, whether it is a dry run, what is due, and who listens."""

    def __init__(self, wire: Wire, state: str, items: list[Item], dry: bool, source: Callable[[str], str]) -> None:
        """`source` gives the text of one of the program's own files, by the name of its module."""
        self.wire = wire
        self.state = state
        self.items = items
        self.dry = dry
        self.source = source
        self.key = ""
        self.due = read_due(state)
        self.noted: set[str] = set()  # what this very run made due
        self.replaced: list[tuple[Item, bytes | None, os.stat_result | None]] = []  # what files were before this run
        self.defer = False
        self.reload_units = False
        self._units: dict[str, dict[str, str]] = {}

    def tell(self, text: str) -> None:
        self.wire.send({"event": "progress", "key": self.key, "text": text})

    def unit(self, name: str) -> dict[str, str]:
        """systemd's view of a service; one call answers for every service of the document."""
        if name not in self._units:
            names = [item["name"] for item in self.items if item["kind"] == "service"]
            self.units([name, *names, *(key[8:] for key in self.due if key.startswith("service "))])
        return self._units[name]

    def units(self, names: list[str]) -> dict[str, dict[str, str]]:
        """The same of several services."""
        self._units.update(show_units([name for name in dict.fromkeys(names) if name not in self._units]))
        return {name: self._units[name] for name in names}

    def units_as_in(self, other: World) -> None:
        """Take systemd's answers from what was asked a moment ago: asking again costs as much as all the rest."""
        self._units = dict(other._units)

    def forget_units(self) -> None:
        self._units = {}


def read_due(state: str) -> dict[str, str]:
    """Restarts and commands that a killed run left undone: `service NAME` or `command NAME`, with the reason."""
    try:
        found: dict[str, str] = loads(read_text(state + "/pending-restarts") or "{}")
    except ValueError:
        return {}
    return found


def note_due(world: World, due: dict[str, str]) -> None:
    world.noted.update(due)
    new = {key: reason for key, reason in due.items() if key not in world.due}
    if new:
        world.due.update(new)
        _write_due(world)


def settle(world: World, key: str) -> None:
    if world.due.pop(key, None) is not None:
        _write_due(world)


def _write_due(world: World) -> None:
    if not world.dry:
        data = dumps(world.due).encode()
        write_atomic(world.state + "/pending-restarts", data, 0o600, os.geteuid(), os.getegid())
