"""What all that is shown has in common: text of others, findings, and hosts that dropped out.

Light to load: it is between a command and its prompt, and `render.py` knows every verb's result.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from rich.cells import cell_len
from rich.console import Console
from rich.markup import escape
from rich.text import Text

from shoal.errors import HostError
from shoal.hostlist import compress
from shoal.spec.finding import Finding
from shoal.spec.words import printable

HOST = "HOST"
"""Stands for the name where the same is said of several hosts."""
LEVEL_STYLE = {"error": "red", "warning": "yellow", "info": "cyan"}


def free(text: str) -> str:
    """Text that others chose, such as a job's name: no markup, and nothing that a terminal would act on."""
    return escape(printable(text))


def say(console: Console, markup: str) -> None:
    """Print a line, on a terminal broken between words; a command in it (`shoal up`) stays whole, to be copied.

    The line below it, with what to do, is never broken: much of it is commands.
    """
    for line in Text.from_markup(markup).split("\n", allow_blank=True):
        for part in line.divide(_breaks(line.plain, console.width) if console.is_terminal else ()):
            part.rstrip()
            console.print(part, highlight=False, soft_wrap=True)


def _breaks(line: str, width: int) -> Iterator[int]:
    begun = 0
    for word in re.finditer(r"(?:`[^`]*`|\S)+", line):
        if cell_len(line[begun : word.end()]) > width and word.start() > begun:
            begun = word.start()
            yield begun


def time_limit(text: str) -> str:
    """A job's time limit. Slurm lets a job without one run for a year, and says so once it runs."""
    return "unlimited" if text == "365-00:00:00" else text.lower()


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """What was found, a line each, and below it what to do about it. Hosts of which the same is found share a line."""
    for finding in _shared(findings):
        told = finding if finding.level == "info" else replace(finding, fix="")
        say(console, f"[{LEVEL_STYLE[finding.level]}]{finding.level}[/] {escape(str(told))}")
        if told.fix != finding.fix:
            console.print(f"    fix: {escape(finding.fix)}", highlight=False, soft_wrap=True)


def _shared(findings: Iterable[Finding]) -> Iterator[Finding]:
    groups: dict[Finding, list[Finding]] = {}
    for one in findings:
        what, found, fix = (_nameless(text, one.host) for text in (one.what, one.found, one.fix))
        groups.setdefault(replace(one, what=what, found=found, fix=fix, host=one.host and HOST), []).append(one)
    for same, alike in groups.items():
        yield alike[0] if len(alike) == 1 else replace(same, host=same.host and compress(one.host for one in alike))


def show_failures(console: Console, failures: Mapping[str, HostError | str]) -> None:
    """The hosts that dropped out, with the cause and the fix; those with the same share a line."""
    groups: dict[tuple[str, str], list[str]] = {}
    said = {name: (one.cause, one.hint) if isinstance(one, HostError) else (one, "") for name, one in failures.items()}
    for name, (cause, hint) in said.items():
        groups.setdefault((_nameless(cause, name), _nameless(hint, name)), []).append(name)
    for same, names in groups.items():
        cause, hint = same if len(names) > 1 else said[names[0]]
        say(console, f"[red]✗[/] {compress(names)}: {escape(cause)}")
        if hint:
            console.print(f"    fix: {escape(hint)}", highlight=False, soft_wrap=True)


def _nameless(text: str, host: str) -> str:
    """What is said of a host as it could be said of others: `shoal ssh HOST`."""
    return re.sub(rf"(?<![\w.-]){re.escape(host)}(?![\w.-])", HOST, text) if host else text
