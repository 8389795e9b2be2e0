"""The command `doctor`: findings, fixes, and their history."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Yes, suggest_hosts, with_session
from shoal.cli.session import PARTLY, Session, confirm
from shoal.errors import UsageError

if TYPE_CHECKING:
    from shoal.verbs.doctor import DoctorResult


def suggest_findings(incomplete: str) -> list[str]:
    """Completes the findings of the table."""
    from shoal.health.reasons import FAULTS

    return [name for name in FAULTS if name.startswith(incomplete)]


@with_session
def doctor(
    findings: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="FINDING",
            help="With --fix: only these, as low-memory. Default: all that Shoal can fix safely.",
            autocompletion=suggest_findings,
        ),
    ] = None,
    fix: Annotated[bool, typer.Option("--fix", help="Apply fixes, check again, and resume nodes.")] = False,
    node: Annotated[
        str | None,
        typer.Option(metavar="HOSTS", help="Only these: gpu01, gpu[01-04].", autocompletion=suggest_hosts),
    ] = None,
    job: Annotated[str | None, typer.Option(metavar="NUMBER", help="Only what concerns this job in the queue.")] = None,
    history: Annotated[bool, typer.Option("--history", help="Show the fixes that were applied.")] = False,
    yes: Yes = False,
    *,
    session: Session,
) -> None:
    """Find what is wrong with the running cluster, and fix it.

    Without --fix it changes nothing. Ordinary users see what concerns their own jobs.
    """
    from shoal.verbs.doctor import doctor as verb
    from shoal.verbs.doctor_fixes import choose_fixes
    from shoal.verbs.doctor_fixes import fix as fix_verb
    from shoal.verbs.doctor_fixes import history as history_verb

    if findings and not fix:
        raise UsageError("findings are named without --fix", hint=f"use `shoal doctor --fix {findings[0]}`")
    context = session.open(operator=fix or history)
    if history:
        return finish_doctor(session, session.run(history_verb(context)), history=True)
    result = session.run(verb(context, node, job))
    selection = choose_fixes(result, findings or ()) if fix else []
    if selection:
        costly = [diagnosis for diagnosis in selection if diagnosis.cost and not diagnosis.blocked]
        if costly:
            labels = ", ".join(
                dict.fromkeys(f"{diagnosis.id} on {diagnosis.host}: {diagnosis.cost.label}" for diagnosis in costly)
            )
            confirm(f"has a cost: {labels}", f"Fix {labels}?", yes)
        result = session.run(fix_verb(context, selection, node))
    finish_doctor(session, result)


def finish_doctor(session: Session, result: DoctorResult, *, history: bool = False) -> None:
    problems = any(diagnosis.level != "info" for diagnosis in result.findings)
    if not session.finish(result, PARTLY if result.unchecked else 1 if problems else 0):
        from shoal.cli.doctor_screen import show_doctor, show_history

        if history:
            show_history(session.console, result.history)
        else:
            show_doctor(session.console, result)
