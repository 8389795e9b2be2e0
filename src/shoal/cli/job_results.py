"""What the commands about jobs say at their end: to a person, or as JSON; and the exit code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from shoal.cli.as_json import plain
from shoal.cli.session import PARTLY, Session

if TYPE_CHECKING:
    from shoal.jobs.logs import LogLine
    from shoal.verbs.cancel import CancelResult
    from shoal.verbs.jobs import JobsResult
    from shoal.verbs.logs import LogsResult
    from shoal.verbs.run import Prepared, Submitted


def finish_dry_run(session: Session, prepared: Prepared) -> None:
    if session.json:
        job = prepared.job
        return session.finish_value(
            {"script": prepared.script, "code": prepared.tree.hash, "job": job.spec.model_dump()}
        )
    print(prepared.script, end="")


def tell_run(session: Session, job: Submitted) -> None:
    """The job is in the queue, and there is more to come."""
    from shoal.cli.render_jobs import show_submitted

    if not session.json:
        show_submitted(session.errors, job)


def finish_run(session: Session, job: Submitted) -> None:
    from shoal.cli.render_jobs import show_submitted

    if session.json:
        return session.finish_value(job)
    show_submitted(session.console, job)


def log_line(session: Session, rank: int | None, timestamps: bool = False) -> Callable[[LogLine], None]:
    """What to do with each line of a log as it comes."""
    from shoal.cli.render_jobs import show_line

    def show(line: LogLine) -> None:
        if not session.json and rank in (None, line.rank):
            show_line(session.console, line, timestamps)

    return show


def finish_wait(session: Session, job: Submitted, ended: LogsResult) -> None:
    _finish_log(session, ended, {**plain(job), **plain(ended)}, well=True)
    if ended.record is None or ended.record.failed:
        session.status = 1


def finish_jobs(session: Session, result: JobsResult) -> None:
    from shoal.cli.render_jobs import show_jobs

    if session.json:
        session.finish_value(result)
    else:
        show_jobs(session.console, result)
    if result.failures:
        session.status = PARTLY


def finish_logs(session: Session, result: LogsResult, rank: int | None, timestamps: bool) -> None:
    from shoal.cli.render_jobs import show_lines

    if not session.json:
        show_lines(session.console, _of_rank(result, rank), timestamps)
    finish_follow(session, result, rank)


def finish_follow(session: Session, result: LogsResult, rank: int | None) -> None:
    """The lines have been shown as they came."""
    _finish_log(session, result, {**plain(result), "lines": _of_rank(result, rank)})


def _of_rank(result: LogsResult, rank: int | None) -> tuple[LogLine, ...]:
    return tuple(line for line in result.lines if rank in (None, line.rank))


def _finish_log(session: Session, result: LogsResult, value: dict[str, Any], *, well: bool = False) -> None:
    """The nodes that could not be asked, and how the job ended; `well`: also where that was well."""
    from shoal.cli.render_jobs import show_ending
    from shoal.cli.say import show_failures

    if session.json:
        session.finish_value(value)
    else:
        show_failures(session.errors, dict(result.failures))
        if well or result.reason is not None:
            show_ending(session.errors, result.record, result.reason)
    if result.failures:
        session.status = PARTLY


def finish_cancel(session: Session, result: CancelResult) -> None:
    if session.json:
        return session.finish_value(result)
    for word, jobs in (("cancelled", result.cancelled), ("had ended already:", result.ended)):
        if jobs:
            session.console.print(f"{word} {', '.join(jobs)}", highlight=False)
