"""The connection to the operator: JSON lines, one request or event each."""

from __future__ import annotations

import os
import select

from shoal.remote.agent.fast_stdlib import dumps, loads

TYPE_CHECKING = False  # `typing` is slow to import, and only a type checker needs it
if TYPE_CHECKING:
    from typing import Any, TypeAlias

Item: TypeAlias = "dict[str, Any]"
"""A request, an item of a document or an event: what one line of JSON holds."""
OPERATOR_LEFT = "the operator disconnected"


class OperatorConnection:
    """The connection to the operator: requests in, events out, and whether it is still open."""

    def __init__(self) -> None:
        self.buffer = b""
        self.closed = False

    def request(self) -> Item | None:
        """The next request; None when the operator disconnected."""
        while b"\n" not in self.buffer:
            if self.closed or not self._read():
                return None
        line, self.buffer = self.buffer.split(b"\n", 1)
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
        self.buffer += data
        self.closed = self.closed or not data
        return bool(data)
