"""The connection to the operator, what one check or apply knows, and which restarts its changes have made due."""

from __future__ import annotations

import os
import select

from shoal.remote.agent.fast_stdlib import dumps, loads
from shoal.remote.agent.file_io import read_text, write_atomic
from shoal.remote.agent.running import run

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, Callable, TypeAlias

Item: TypeAlias = "dict[str, Any]"
"""A request, an item of a document or an event: what one line of JSON holds."""
WRITTEN = "/written-files"
"""Below the state directory: digests of the files that agents wrote."""
OPERATOR_LEFT = "the operator disconnected"


class OperatorConnection:
    """The connection to the operator: requests in, events out, and whether it is still open."""

    def __init__(self) -> None:
        self.buffer = bytearray()
        self.received: dict[str, bytes] = {}  # large values of the next document, by name
        self.closed = False

    def request(self) -> Item | None:
        """The next request; None when the operator disconnected."""
        scanned = 0
        while True:
            end = self.buffer.find(b"\n", scanned)
            if end >= 0:
                request: Item = loads(self._take(end + 1).decode())
                return request
            scanned = len(self.buffer)
            if self.closed or not self._read():
                return None

    def receive(self, name: str, size: int) -> None:
        """Read a large value as it is: as text in JSON it would cost a second of CPU on both ends."""
        while len(self.buffer) <= size and not self.closed and self._read():
            pass
        self.received[name] = self._take(size + 1)[:-1]  # a newline ends it

    def _take(self, size: int) -> bytes:
        data = bytes(self.buffer[:size])
        del self.buffer[:size]
        return data

    def send(self, event: Item) -> None:
        data = dumps(event).encode() + b"\n"
        while data and not self.closed:
            try:
                data = data[os.write(1, data) :]
            except OSError:
                self.closed = True

    def is_open(self) -> bool:
        """Looks, without waiting, whether the operator has hung up."""
        if not self.closed and select.select([0], [], [], 0)[0]:
            self._read()
        return not self.closed

    def close(self, *_: object) -> None:
        self.closed = True

    def _read(self) -> bool:
        try:
            data = os.read(0, 1 << 20)
        except OSError:
            data = b""
        self.buffer += data
        self.closed = self.closed or not data
        return bool(data)


class ItemChange:
    """What has to be done about an item."""

    def __init__(self, action: str, diff: str = "", edited: bool = False) -> None:
        self.action = action
        self.diff = diff
        self.edited = edited


class ConvergeContext:
    """What one check or apply knows: its items, whether it is a dry run, what is due, and who listens."""

    def __init__(
        self, connection: OperatorConnection, state: str, items: list[Item], dry: bool, source: Callable[[str], str]
    ) -> None:
        """`source` gives the text of one of the program's own files, by the name of its module."""
        self.connection = connection
        self.state = state
        self.items = items
        self.dry = dry
        self.source = source
        self.key = ""
        self.due = read_due(state)
        self.written: dict[str, list[str]] = read_json(state + WRITTEN)  # digests of files, by path
        self.noted: set[str] = set()  # what this very run made due
        self.replaced: list[tuple[Item, bytes | None, os.stat_result | None]] = []  # what files were before this run
        self.defer = False
        self.changed_units: set[str] = set()  # files that changed since systemd was last asked to read them
        self.known_units: dict[str, dict[str, str]] = {}  # what systemd answered; {} asks it again

    def report(self, text: str) -> None:
        self.connection.send({"event": "progress", "key": self.key, "text": text})

    def unit(self, name: str) -> dict[str, str]:
        """systemd's view of a service; one call answers for every service of the document and every changed file."""
        if name not in self.known_units:
            names = [item["name"] for item in self.items if item["kind"] == "service"]
            names += (key[8:] for key in self.due if key.startswith("service "))
            self.units([name, *names, *map(os.path.basename, self.changed_units)])
        return self.known_units[name]

    def units(self, names: list[str]) -> dict[str, dict[str, str]]:
        """The same of several services."""
        self.known_units.update(show_units([name for name in dict.fromkeys(names) if name not in self.known_units]))
        return {name: self.known_units[name] for name in names}


def read_due(state: str) -> dict[str, str]:
    """Restarts and commands that a killed run left undone: `service NAME` or `command NAME`, with the reason."""
    return read_json(state + "/pending-restarts")


def read_json(path: str) -> Item:
    try:
        data: Item = loads(read_text(path) or "{}")
    except ValueError:
        return {}
    return data


def record_due(context: ConvergeContext, due: dict[str, str]) -> None:
    context.noted.update(due)
    new = {key: reason for key, reason in due.items() if key not in context.due}
    if new:
        context.due.update(new)
        _write_due(context)


def clear_due(context: ConvergeContext, key: str) -> None:
    if context.due.pop(key, None) is not None:
        _write_due(context)


def _write_due(context: ConvergeContext) -> None:
    if not context.dry:
        data = dumps(context.due).encode()
        write_atomic(context.state + "/pending-restarts", data, 0o600, os.geteuid(), os.getegid())


def has_systemd() -> bool:
    return os.path.isdir("/run/systemd/system")


UNIT_DIRECTORIES = (
    *("/etc/systemd/system", "/run/systemd/system", "/usr/local/lib/systemd/system", "/usr/lib/systemd/system"),
    *("/lib/systemd/system", "/run/systemd/transient", "/run/systemd/generator.early", "/run/systemd/generator"),
    *("/run/systemd/generator.late", "/etc/systemd/system.control", "/run/systemd/system.control"),
)
RUNNING_UNITS = "/run/systemd/units/invocation:"
"""Begins the paths of links that systemd has for the services that run, also those whose file is gone."""


UNIT_KINDS = (".service", ".socket", ".timer", ".mount", ".automount", ".target", ".path")


def has_unit(name: str) -> bool:
    """Whether systemd can know a unit. One that it does not know costs it more than all others together.

    It knows instances of a template, and not the template: asked for one, it answers for none.
    """
    full = name if name.endswith(UNIT_KINDS) else name + ".service"
    if "@" in full:
        return "@." not in full
    paths = [f"{directory}/{full}" for directory in UNIT_DIRECTORIES]
    return any(os.path.lexists(path) for path in (*paths, RUNNING_UNITS + full))


def show_units(names: list[str]) -> dict[str, dict[str, str]]:
    if not names or not has_systemd():
        return {name: {} for name in names}
    units = {name: {"LoadState": "not-found", "ActiveState": "inactive"} for name in names}
    names = [name for name in names if has_unit(name)]
    if not names:
        return units
    properties = (
        "Id,FragmentPath,Type,LoadState,ActiveState,UnitFileState,NeedDaemonReload,ConditionResult,Result,MainPID"
    )
    _, text = run(["systemctl", "show", "-p", properties, "--", *names], timeout=30.0)
    # In the order asked: an alias answers with another Id.
    parts = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    units.update({name: parts[i] if i < len(parts) else {} for i, name in enumerate(names)})
    return units
