"""What all that is shown has in common: text of others, findings, and hosts that dropped out.

Light to load: it is between a command and its prompt, and `render.py` knows every verb's result.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from rich.console import Console
from rich.markup import escape

from shoal.errors import HostError
from shoal.hostlist import compress
from shoal.spec.finding import Finding
from shoal.spec.words import printable

LEVEL_STYLE = {"error": "red", "warning": "yellow", "info": "cyan"}


def free(text: str) -> str:
    """Text that others chose, such as a job's name: no markup, and nothing that a terminal would act on."""
    return escape(printable(text))


def show_findings(console: Console, findings: Iterable[Finding]) -> None:
    """What was found, a line each, and below it what to do about it."""
    for finding in findings:
        told = finding if finding.level == "info" else replace(finding, fix="")
        console.print(
            f"[{LEVEL_STYLE[finding.level]}]{finding.level}[/] {escape(str(told))}", highlight=False, soft_wrap=True
        )
        if told.fix != finding.fix:
            console.print(f"    fix: {escape(finding.fix)}", highlight=False, soft_wrap=True)


def show_failures(console: Console, failures: Mapping[str, HostError | str]) -> None:
    """The hosts that dropped out, with the cause and the fix; those with the same share a line.

    No line is broken: there are commands in them, which must be whole to be copied.
    """
    groups: dict[tuple[str, str], list[str]] = {}
    for name, error in failures.items():
        said = (error.cause, error.hint) if isinstance(error, HostError) else (error, "")
        groups.setdefault(said, []).append(name)
    for (cause, hint), names in groups.items():
        console.print(f"[red]✗[/] {compress(names)}: {escape(cause)}", highlight=False, soft_wrap=True)
        if hint:
            console.print(f"    fix: {escape(hint)}", highlight=False, soft_wrap=True)
