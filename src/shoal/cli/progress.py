"""Progress for a person: a bar for each phase on a terminal, one line for each phase elsewhere."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

from shoal.plan.progress import Phase
from shoal.spec.words import printable


class TerminalProgress:
    """Bars on a terminal. What a host says last stands behind the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Phase]:
        begun = time.monotonic()
        if not self._console.is_terminal:
            phase = PlainPhase(title, total)
            yield phase
            self._console.print(phase.line(time.monotonic() - begun), highlight=False, markup=False)
            return
        bars = Bars(
            TextColumn("{task.description:<26}", table_column=Column(min_width=26)),
            BarColumn(bar_width=16, table_column=Column(min_width=16)),
            MofNCompleteColumn(table_column=Column(min_width=5)),
            TimeElapsedColumn(table_column=Column(min_width=7)),
            TextColumn("{task.fields[text]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=self._console,
            transient=True,
            expand=True,
        )
        with bars:
            bar = BarPhase(bars, title, total)
            yield bar
        self._console.print(bar.line(time.monotonic() - begun), highlight=False)


class PlainPhase:
    """Counts, and says nothing until the end."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.failed: list[str] = []

    def say(self, host: str, text: str) -> None: ...

    def done(self, host: str, error: str = "") -> None:
        if error:
            self.failed.append(host)

    def at(self, fraction: float, text: str = "") -> None: ...

    def line(self, seconds: float) -> str:
        mark = f"failed on {', '.join(self.failed)}" if self.failed else "done"
        return f"  {self.title:<26} {mark:<8} {seconds:6.1f} s"


class BarPhase(PlainPhase):
    """A bar that moves as hosts finish."""

    def __init__(self, bars: Bars, title: str, total: int) -> None:
        super().__init__(title, total)
        self._bars = bars
        self._task = bars.add_task(title, total=total, text="")

    def say(self, host: str, text: str) -> None:
        self._bars.update(self._task, text=printable(f"{host}: {text}"))

    def done(self, host: str, error: str = "") -> None:
        super().done(host, error)
        self._bars.advance(self._task)

    def at(self, fraction: float, text: str = "") -> None:
        self._bars.update(self._task, completed=round(fraction * self.total, 2), text=printable(text))

    def line(self, seconds: float) -> str:
        if self.failed:
            return f"[red]✗[/] {self.title:<26} failed on {', '.join(self.failed)} {seconds:6.1f} s"
        return f"[green]✓[/] {self.title:<26} {seconds:6.1f} s"
