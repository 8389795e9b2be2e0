"""The screen of `shoal doctor`: a block for each finding, a line for each fix."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from rich.console import Console

from shoal.cli.screen import LEVEL_STYLE, count, escape_text, group_by, print_wrapped
from shoal.health.diagnosis import Diagnosis
from shoal.hostlist import compress
from shoal.verbs.doctor import DoctorResult, FixOutcome


def show_doctor(console: Console, result: DoctorResult) -> None:
    """Fixes, findings, and a summary. Hosts with the same finding share its block."""
    for outcome in result.fixes:
        mark = "[green]✓[/] fixed" if outcome.fixed else "[red]✗[/] not fixed"
        console.print(f"{mark}: {_fix_text(outcome)}", soft_wrap=True)
    for group in group_by(
        result.findings, lambda diagnosis: (diagnosis.id, diagnosis.what, diagnosis.action, diagnosis.blocked)
    ).values():
        _show_finding(console, group)
    levels = [diagnosis.level for diagnosis in result.findings]
    numbers = [count(levels.count(level), level) for level in ("error", "warning") if level in levels]
    mark = "[red]✗[/]" if numbers else "[green]✓[/]"
    checked = f"; checked {count(len(result.checked), 'host')}" if result.checked else ""
    unchecked = f"; not checked: {', '.join(result.unchecked)}" if result.unchecked else ""
    console.print(f"{mark} {result.cluster}: {', '.join(numbers) or 'nothing is wrong'}{checked}{unchecked}")


def _show_finding(console: Console, group: list[Diagnosis]) -> None:
    diagnosis = group[0]
    where = (
        compress([each.host for each in group]) if diagnosis.host else f"job {', '.join(each.job for each in group)}"
    )
    since = f", since {diagnosis.since}" if diagnosis.since else ""
    level = f"[{LEVEL_STYLE[diagnosis.level]}]{diagnosis.level}[/]"
    print_wrapped(console, f"{level} {where}: {escape_text(diagnosis.what)} ({diagnosis.id}{since})")
    for each in group:
        prefix = f"{each.host}: " if len(group) > 1 and each.host else ""
        for line in each.evidence:
            console.print(f"    {prefix}{escape_text(line)}", soft_wrap=True)
    print_wrapped(console, f"  cause: {escape_text(diagnosis.cause)}")
    print_wrapped(console, f"  fix: {escape_text(diagnosis.fix)}")
    if diagnosis.action and diagnosis.blocked:
        print_wrapped(console, f"  Shoal cannot apply it yet: {escape_text(diagnosis.blocked)}")
    elif diagnosis.action:
        named = " if it is named" if diagnosis.explicit else ""
        print_wrapped(console, f"  --fix applies it{named}; cost: {diagnosis.cost.label}")


def show_history(console: Console, outcomes: Iterable[FixOutcome]) -> None:
    """The fixes that were applied."""
    lines = [
        f"{datetime.fromtimestamp(outcome.time):%Y-%m-%d %H:%M:%S} {escape_text(outcome.by)} "
        f"{'fixed' if outcome.fixed else 'did not fix'} {_fix_text(outcome)}"
        for outcome in outcomes
    ]
    for line in lines or ["no fix was applied yet"]:
        console.print(line, soft_wrap=True)


def _fix_text(outcome: FixOutcome) -> str:
    where = outcome.host or f"job {outcome.job}"
    detail = f": {escape_text(outcome.detail)}" if outcome.detail else ""
    return f"{outcome.id}, {where} ({outcome.action}){detail}"
