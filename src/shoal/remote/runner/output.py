"""What a program prints, as lines of a log: of a line that overwrites itself, such as a progress bar, the last state.

tqdm draws bars below one another with a newline and, when it has drawn, "cursor up": the newline ends no line then. So
a line that was overwritten counts as finished when the cursor has been below it for a while.
"""

from __future__ import annotations

import time

HOLD_S = 0.5
"""So long a line that was overwritten waits for the cursor to come back."""
MAX_ROWS = 64
"""More bars than this are not drawn below one another."""
LONGEST_LINE = 16 * 1024
CURSOR_UP = b"\x1b[A"


class Row:
    """A line that the cursor is in, or may come back to."""

    def __init__(self) -> None:
        self.text = b""
        self.is_overwritten = False
        self.left = 0.0
        """When the cursor went below it."""
        self.time = 0.0

    def state(self) -> bytes:
        text = last_state(self.text).rstrip(b"\r")
        return text.rstrip() if self.is_overwritten else text


class Output:
    """Takes what a program prints, and gives the lines that are finished, each with its time."""

    def __init__(self) -> None:
        self._rows = [Row()]
        self._at = 0
        self._rest = b""

    def take(self, data: bytes) -> list[tuple[float, bytes]]:
        """The lines that this finishes."""
        data = self._rest + data
        self._rest = next((start for start in (CURSOR_UP[:2], CURSOR_UP[:1]) if data.endswith(start)), b"")
        lines: list[tuple[float, bytes]] = []
        for number, line in enumerate(data[: len(data) - len(self._rest)].split(b"\n")):
            if number:
                lines += self._go_down()
            for ups, text in enumerate(line.split(CURSOR_UP)):
                self._at = max(0, self._at - min(1, ups))
                lines += self._write(text)
        return lines

    def finished(self) -> list[tuple[float, bytes]]:
        """The lines to which the cursor has not come back."""
        until = time.monotonic() - HOLD_S
        count = 0
        while count < self._at and self._rows[count].left <= until:
            count += 1
        return self._finish(count)

    def end(self) -> list[tuple[float, bytes]]:
        """All that is left when the program has ended."""
        self._write(self._rest)
        for row in self._rows[self._at :]:
            row.time = time.time()
        if not self._rows[-1].text:
            self._rows.pop()
        return self._finish(len(self._rows))

    @property
    def waits(self) -> bool:
        """Whether there are lines to which the cursor may come back."""
        return self._at > 0

    def unfinished(self) -> bytes:
        """The state of the lines that are not finished, from top to bottom."""
        return b"  ".join(state for state in (row.state() for row in self._rows) if state)

    def _write(self, text: bytes) -> list[tuple[float, bytes]]:
        row = self._rows[self._at]
        text = row.text + text
        row.is_overwritten = row.is_overwritten or b"\r" in text.rstrip(b"\r")
        row.text = last_state(text)
        if len(row.text) <= LONGEST_LINE:
            return []
        row.time = time.time()
        return self._finish(self._at + 1)

    def _go_down(self) -> list[tuple[float, bytes]]:
        row = self._rows[self._at]
        row.left, row.time = time.monotonic(), time.time()
        self._at += 1
        if self._at == len(self._rows):
            self._rows.append(Row())
        else:
            self._rows[self._at].text += b"\r"  # the next text starts at its left end
        if not row.is_overwritten:
            return self._finish(self._at)
        return self._finish(1) if len(self._rows) > MAX_ROWS else []

    def _finish(self, count: int) -> list[tuple[float, bytes]]:
        """Remove the first rows. A bar that was cleared at its end leaves none."""
        rows, self._rows = self._rows[:count], self._rows[count:] or [Row()]
        self._at = max(0, self._at - count)
        return [(row.time, row.state()) for row in rows if row.state() or not row.is_overwritten]


def last_state(line: bytes) -> bytes:
    """What is left of a line that overwrote itself. At its end a carriage return has overwritten nothing yet."""
    return line[line.rfind(b"\r", 0, len(line.rstrip(b"\r"))) + 1 :]
