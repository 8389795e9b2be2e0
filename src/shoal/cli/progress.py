"""Progress: a bar for each phase on a terminal; elsewhere a line for each, repeated while a phase is long."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bars
from rich.table import Column

from shoal.hostlist import compress
from shoal.plan.progress import Phase
from shoal.spec.finding import printable

MAX_SHOWN_HOSTS = 3
"""A line in a pipe shows the work of this many hosts."""
MIN_BAR_WIDTH = 80
"""A narrower terminal has no room for a bar."""


class TerminalProgress:
    """Bars on a terminal, each with the latest message of a host.

    In a pipe, a phase prints its state every `every` seconds.
    """

    def __init__(self, console: Console, every: float = 10.0) -> None:
        self._console = console
        self._every = every

    @contextmanager
    def phase(self, title: str, total: int) -> Iterator[Phase]:
        if not self._console.is_terminal:
            phase = PlainPhase(title, total)
            with _repeat(self._every, lambda: self._print(phase.so_far())):
                yield phase
            self._print(phase.line())
            return
        # The message of a host says more than a bar, where there is no room for both.
        bar = (
            [BarColumn(bar_width=16, table_column=Column(min_width=16))] if self._console.width >= MIN_BAR_WIDTH else []
        )
        bars = Bars(
            TextColumn("{task.description:<26}", table_column=Column(min_width=26)),
            *bar,
            MofNCompleteColumn(table_column=Column(min_width=5)),
            TimeElapsedColumn(table_column=Column(min_width=7)),
            TextColumn("{task.fields[text]}", style="dim", markup=False, table_column=Column(no_wrap=True, ratio=1)),
            console=self._console,
            transient=True,
            expand=True,
        )
        with bars:
            bar_phase = BarPhase(bars, title, total)
            yield bar_phase
        self._console.print(bar_phase.line())

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, soft_wrap=True)


@contextmanager
def _repeat(seconds: float, action: Callable[[], None]) -> Iterator[None]:
    """Repeat an action while the block runs. Outside of an event loop nothing runs long."""
    timer: asyncio.TimerHandle | None = None

    def run_action() -> None:
        nonlocal timer
        action()
        timer = loop.call_later(seconds, run_action)

    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        yield
        return
    timer = loop.call_later(seconds, run_action)
    try:
        yield
    finally:
        timer.cancel()


class PlainPhase:
    """Counts finished hosts, and holds the latest message of each other one."""

    def __init__(self, title: str, total: int) -> None:
        self.title = title
        self.total = total
        self.failed: list[str] = []
        self._begin = time.monotonic()
        self._count = f"0/{total}"
        self._finished = 0
        self._messages: dict[str, str] = {}

    def update(self, host: str, text: str) -> None:
        self._messages[host] = f"{host}: {text}"

    def done(self, host: str, error: str = "") -> None:
        self._finished += 1
        self._count = f"{self._finished}/{self.total}"
        self._messages.pop(host, None)
        if error:
            self.failed.append(host)

    def set_fraction(self, fraction: float, text: str = "") -> None:
        self._count = f"{fraction:.0%}"
        self._messages[""] = text

    @property
    def time(self) -> str:
        return f"{time.monotonic() - self._begin:6.1f} s"

    def so_far(self) -> str:
        messages = [text for text in self._messages.values() if text]
        more = f"; {len(messages) - MAX_SHOWN_HOSTS} more" if len(messages) > MAX_SHOWN_HOSTS else ""
        text = f"  {self.title:<26} {self._count:<8} {self.time}  {'; '.join(messages[:MAX_SHOWN_HOSTS])}{more}"
        return printable(text).rstrip()

    def line(self) -> str:
        mark = f"failed on {compress(self.failed)}" if self.failed else "done"
        return f"  {self.title:<26} {mark:<8} {self.time}"


class BarPhase(PlainPhase):
    """A bar that moves as hosts finish."""

    def __init__(self, bars: Bars, title: str, total: int) -> None:
        super().__init__(title, total)
        self._bars = bars
        self._task = bars.add_task(title, total=total, text="")

    def update(self, host: str, text: str) -> None:
        self._bars.update(self._task, text=printable(f"{host}: {text}"))

    def done(self, host: str, error: str = "") -> None:
        super().done(host, error)
        self._bars.advance(self._task)

    def set_fraction(self, fraction: float, text: str = "") -> None:
        self._bars.update(self._task, completed=round(fraction * self.total, 2), text=printable(text))

    def line(self) -> str:
        if self.failed:
            return f"[red]✗[/] {self.title:<26} failed on {compress(self.failed)} {self.time}"
        return f"[green]✓[/] {self.title:<26} {self.time}"
