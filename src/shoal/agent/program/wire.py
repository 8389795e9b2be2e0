"""The connection to the operator: JSON lines, one request or event each."""

from __future__ import annotations

import os
import select

from shoal.agent.program.fast_stdlib import dumps, loads

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, TypeAlias

Item: TypeAlias = "dict[str, Any]"
"""A request, an item of a document or an event: what one line of JSON holds."""
GONE = "the operator has gone"


class Wire:
    """The connection to the operator: requests in, events out, and whether anybody is still there."""

    def __init__(self) -> None:
        self.buffer = b""
        self.gone = False

    def request(self) -> Item | None:
        """The next request; None when the operator has gone."""
        while b"\n" not in self.buffer:
            if self.gone or not self._read():
                return None
        line, self.buffer = self.buffer.split(b"\n", 1)
        found: Item = loads(line.decode())
        return found

    def send(self, event: Item) -> None:
        data = dumps(event).encode() + b"\n"
        while data and not self.gone:
            try:
                data = data[os.write(1, data) :]
            except OSError:
                self.gone = True

    def still_there(self) -> bool:
        """Looks, without waiting, whether the operator has hung up."""
        if not self.gone and select.select([0], [], [], 0)[0]:
            self._read()
        return not self.gone

    def hang_up(self, *_: object) -> None:
        self.gone = True

    def _read(self) -> bool:
        try:
            data = os.read(0, 1 << 20)
        except OSError:
            data = b""
        self.buffer += data
        self.gone = self.gone or not data
        return bool(data)
