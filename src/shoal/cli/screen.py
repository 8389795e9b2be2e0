"""What all screens share: tables, findings, failed hosts, and text that others chose.

Tables are `Columns`, not rich's Table alone: in 66 characters that breaks the state `running` into `runnin` and `g`,
and with `no_wrap` it cuts job `18_3` to `18` (rich 15.0).

Light to load: `shoal run` loads it, and `cluster_screens.py` knows every verb's result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from shoal.errors import HostError
from shoal.hostlist import compress, expand
from shoal.spec.finding import Finding, printable

K = TypeVar("K")
V = TypeVar("V")

LEVEL_STYLE = {"error": "red", "warning": "yellow", "info": "cyan"}
_HOST = "\0"
"""Stands for a host's name while texts about several hosts are compared."""
_GAP = 2
"""Blanks between two columns."""
_UNBOUNDED_WIDTH = 10_000


def escape_text(text: str) -> str:
    """Text that others chose, such as a job's name: no markup, and nothing that a terminal would act on."""
    return escape(printable(text))


def print_wrapped(console: Console, markup: str) -> None:
    """Print a line, on a terminal broken between words; a command in it (`shoal up`) stays whole, to be copied."""
    for line in Text.from_markup(markup).split("\n", allow_blank=True):
        for piece in line.divide(_line_breaks(line.plain, console.width) if console.is_terminal else ()):
            piece.rstrip()
            console.print(piece, soft_wrap=True)


def _line_breaks(line: str, width: int) -> Iterator[int]:
    start = 0
    for word in re.finditer(r"(?:`[^`]*`|\S)+", line):
        if cell_len(line[start : word.end()]) > width and word.start() > start:
            start = word.start()
            yield start


def print_fix(console: Console, hint: str, indent: int = 4) -> None:
    """Print what to do about an error. Never broken into lines: much of it is commands to copy."""
    if hint:
        console.print(f"{' ' * indent}fix: {escape(hint)}", soft_wrap=True)


def count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def format_time_limit(text: str) -> str:
    """A job's time limit. Slurm reports 365 days for a running job that has none."""
    return "unlimited" if text == "365-00:00:00" else text.lower()


def group_by(items: Iterable[V], key: Callable[[V], K]) -> dict[K, list[V]]:
    """Items with the same key together, in the order of their first."""
    groups: dict[K, list[V]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """A line for each finding, and its fix below. Hosts with the same finding share a line."""
    for finding in _group_findings(findings):
        text = finding if finding.level == "info" else replace(finding, fix="")
        print_wrapped(console, f"[{LEVEL_STYLE[finding.level]}]{finding.level}[/] {escape(str(text))}")
        if text.fix != finding.fix:
            print_fix(console, finding.fix)


def _group_findings(findings: Iterable[Finding]) -> Iterator[Finding]:
    def without_host(finding: Finding) -> Finding:
        what, found_text, fix = (
            _without_host(text, finding.host) for text in (finding.what, finding.found, finding.fix)
        )
        return replace(finding, what=what, found=found_text, fix=fix, host=finding.host and _HOST)

    for key, group in group_by(findings, without_host).items():
        # A finding of several hosts has them as a hostlist.
        hosts = [name for finding in group if finding.host for name in expand(finding.host)]
        what, found_text, fix, host = (_with_hosts(text, hosts) for text in (key.what, key.found, key.fix, key.host))
        yield replace(key, what=what, found=found_text, fix=fix, host=host)


def show_failures(console: Console, failures: Mapping[str, HostError | str]) -> None:
    """The hosts that failed, with the cause and the fix; those with the same ones share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, error in failures.items():
        cause, hint = (error.cause, error.hint) if isinstance(error, HostError) else (error, "")
        groups.setdefault((_without_host(cause, name), _without_host(hint, name)), []).append(name)
    for (cause, hint), hosts in groups.items():
        print_wrapped(console, f"[red]✗[/] {compress(hosts)}: {escape(_with_hosts(cause, hosts))}")
        print_fix(console, _with_hosts(hint, hosts))


def _without_host(text: str, host: str) -> str:
    """The text with a placeholder for the host's name, so that messages about several hosts compare equal."""
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", _HOST, text) if host else text


def _with_hosts(text: str, hosts: Sequence[str]) -> str:
    """The hosts in place of the placeholder. An `ssh` command takes one host, so it gets the first."""
    text = re.sub(rf"(\bssh(?: -\w)* ){_HOST}", lambda command: command[1] + hosts[0], text)
    return text.replace(_HOST, compress(hosts)) if _HOST in text else text


class Columns(Table):
    """A table without lines, of which only the columns in `wraps` are broken where the terminal is narrow.

    In the others a value stays whole: `completed` is not read as `complet` and `ed`. Titles may be broken at blanks.
    Where there is no room even for that, every column is broken, and nothing is left out: rich's own `no_wrap` leaves
    out the columns name, user and nodes of `shoal jobs` at 50 characters.
    """

    def __init__(self, *titles: str, right: Collection[str] = (), wraps: Collection[str] = ()) -> None:
        super().__init__(box=None, pad_edge=False, header_style="bold", padding=(0, _GAP, 0, 0))
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

    def drop_constant(self, console: Console, titles: Collection[str]) -> str:
        """If the table is too wide, drop those of these columns that have one value in all rows; their text."""
        if self._natural_width(console, console.options) <= console.width:
            return ""
        constant_columns = [
            column for column in self.columns if column.header in titles and len(set(column.cells)) == 1
        ]
        remaining = [
            (column, min_width)
            for column, min_width in zip(self.columns, self._least, strict=True)
            if column not in constant_columns
        ]
        self.columns, self._least = [column for column, _ in remaining], [min_width for _, min_width in remaining]
        return ", ".join(f"{column.header} {next(iter(column.cells))}" for column in constant_columns)

    def _natural_width(self, console: Console, options: ConsoleOptions) -> int:
        return self.__rich_measure__(console, options.update(max_width=_UNBOUNDED_WIDTH)).maximum

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = self._natural_width(console, options)
        if width > options.max_width >= sum(self._least) + _GAP * len(self._least):
            for column, min_width in zip(self.columns, self._least, strict=True):
                if column.header not in self._wraps:
                    column.width = min_width
        yield from super().__rich_console__(console, options)
