"""Tables as the commands show them: no lines, and readable in a narrow terminal."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

GAP = 2
"""Blanks between two columns."""
ANY_WIDTH = 10_000


class Columns(Table):
    """A table of which only the columns in `wraps` are broken into lines where the terminal is narrow.

    In the others a value stays whole: `completed` is not read as `complet` and `ed`. Titles may be broken at blanks.
    Where there is no room even for that, every column is broken, and nothing is left out.
    """

    def __init__(self, *titles: str, right: Collection[str] = (), wraps: Collection[str] = ()) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold", padding=(0, GAP, 0, 0))
        self._wraps = wraps
        self._least = [max(map(len, title.split()), default=0) for title in titles]
        for title in titles:
            self.add_column(title, overflow="fold", justify="right" if title in right else "left")

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*cells, **more)
        for number, cell in enumerate(cells):
            if self.columns[number].header not in self._wraps:
                text = cell if isinstance(cell, Text) else Text.from_markup(cell)
                self._least[number] = max(self._least[number], text.cell_len)

    def fold_same(self, console: Console, titles: Collection[str]) -> str:
        """Where the table is too wide: take out those columns that say the same in every row, and tell what that is."""
        if self._wanted(console, console.options) <= console.width:
            return ""
        same = [column for column in self.columns if column.header in titles and len(set(column.cells)) == 1]
        kept = [(column, least) for column, least in zip(self.columns, self._least, strict=True) if column not in same]
        self.columns, self._least = [column for column, _ in kept], [least for _, least in kept]
        return ", ".join(f"{column.header} {next(iter(column.cells))}" for column in same)

    def _wanted(self, console: Console, options: ConsoleOptions) -> int:
        return self.__rich_measure__(console, options.update(max_width=ANY_WIDTH)).maximum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wanted = self._wanted(console, options)
        if wanted > options.max_width >= sum(self._least) + GAP * len(self._least):
            for column, least in zip(self.columns, self._least, strict=True):
                if column.header not in self._wraps:
                    column.width = least
        yield from super().__rich_console__(console, options)
