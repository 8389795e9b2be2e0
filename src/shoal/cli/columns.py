"""Tables as the commands show them: no lines, and readable in a narrow terminal."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from rich.table import Table
from rich.text import Text


class Columns(Table):
    """A table of which only the columns in `wraps` are broken into lines where the terminal is narrow.

    In the others a value stays whole: `completed` is not read as `complet` and `ed`. Titles may be broken at blanks.
    """

    def __init__(self, *titles: str, right: Collection[str] = (), wraps: Collection[str] = ()) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
        self._wraps = wraps
        for title in titles:
            longest = max(map(len, title.split()), default=0)
            self.add_column(title, overflow="fold", justify="right" if title in right else "left", min_width=longest)

    def add_row(self, *cells: Any, **more: Any) -> None:
        super().add_row(*cells, **more)
        for column, cell in zip(self.columns, cells, strict=False):
            if column.header not in self._wraps:
                text = cell if isinstance(cell, Text) else Text.from_markup(cell)
                column.min_width = max(column.min_width or 0, text.cell_len)
