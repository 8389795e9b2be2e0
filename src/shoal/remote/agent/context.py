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
        self.parts: list[bytes] = []  # not one string: a document may have ten megabytes, and arrives in small pieces
        self.lines = 0
        self.closed = False

    def request(self) -> Item | None:
        """The next request; None when the operator disconnected."""
        while not self.lines:
            if self.closed or not self._read():
                return None
        line, rest = b"".join(self.parts).split(b"\n", 1)
        self.parts = [rest]
        self.lines -= 1
        request: Item = loads(line.decode())
        return request

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
        self.parts.append(data)
        self.lines += data.count(b"\n")
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
        self.reload_units = False
        self.known_units: dict[str, dict[str, str]] = {}  # what systemd answered; {} asks it again

    def report(self, text: str) -> None:
        self.connection.send({"event": "progress", "key": self.key, "text": text})

    def unit(self, name: str) -> dict[str, str]:
        """systemd's view of a service; one call answers for every service of the document."""
        if name not in self.known_units:
            names = [item["name"] for item in self.items if item["kind"] == "service"]
            self.units([name, *names, *(key[8:] for key in self.due if key.startswith("service "))])
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


def show_units(names: list[str]) -> dict[str, dict[str, str]]:
    if not names or not has_systemd():
        return {name: {} for name in names}
    properties = "Id,Type,LoadState,ActiveState,UnitFileState,NeedDaemonReload,ConditionResult,Result,MainPID"
    _, text = run(["systemctl", "show", "-p", properties, "--", *names], timeout=30.0)
    # In the order asked: an alias answers with another Id.
    units = [dict(line.split("=", 1) for line in part.splitlines() if "=" in line) for part in text.split("\n\n")]
    return {name: units[i] if i < len(units) else {} for i, name in enumerate(names)}
