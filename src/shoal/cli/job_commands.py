"""The commands of users: join, jobs, logs, fetch, cancel. `run_command.py` has run."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from shoal.cli.options import Cluster, Json, with_session
from shoal.cli.output import plain
from shoal.cli.session import PARTLY, Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.jobs.logs import LogLine
    from shoal.verbs.context import Context
    from shoal.verbs.joined_cluster import JoinResult
    from shoal.verbs.logs import LogsResult

T = TypeVar("T")

# `shoal logs -f` follows, so its --file has no short form.
LogsFile = Annotated[
    Path | None,
    typer.Option(
        "--file",
        metavar="FILE",
        envvar="SHOAL_FILE",
        help="The spec. Default: shoal.yaml here, else a joined cluster, else the sandbox.",
    ),
]


def join(
    login: Annotated[
        str | None,
        typer.Argument(metavar="USER@HOST", help="Your login on the controller or a login host. Default: as before."),
    ] = None,
    port: Annotated[int | None, typer.Option(metavar="NUMBER", help="The SSH port.", min=1, max=65535)] = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Join a cluster as an ordinary user: without its file, without root.

    Your commands then use this cluster wherever there is no shoal.yaml. Run it again to read the cluster's
    description anew; other commands do so by themselves.
    """
    with Session(json) as session:
        from shoal.verbs import joined_cluster

        if login is not None:
            chosen = joined_cluster.parse_login(login, port)
        else:
            before = joined_cluster.find_joined(cluster)
            if before is None or before.login is None:
                raise UsageError("no cluster is named", hint="use `shoal join USER@HOST`")
            chosen = before.login
        result = session.run(joined_cluster.join(chosen))
        if not session.finish(result):
            show_joined(session, result)


def show_joined(session: Session, result: JoinResult) -> None:
    what = "joined" if result.changed else "nothing has changed in"
    session.console.print(f"{what} cluster [bold]{result.cluster}[/] as {result.login}; your jobs are in {result.jobs}")
    if result.environments:
        session.console.print(f"environments: {', '.join(result.environments)}")
    session.console.print("next: `shoal status`, then `shoal run train.py`", markup=False)


@with_session
def jobs(
    numbers: Annotated[list[str] | None, typer.Argument(metavar="JOB", help="Only these jobs.")] = None,
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also jobs that ended more than a day ago.")] = False,
    *,
    session: Session,
) -> None:
    """Show jobs, their progress, and why they failed."""
    from shoal.cli.job_screens import show_jobs
    from shoal.verbs.jobs import jobs as verb

    result = session.run(verb(session.open(phases=ended), numbers or (), ended=ended))
    if not session.finish(result, PARTLY if result.failures else 0):
        show_jobs(session.console, result)


def logs(
    job: Annotated[str, typer.Argument(help="The job's number; 17_3 for a task of an array.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job ends.")] = False,
    rank: Annotated[int | None, typer.Option(metavar="NUMBER", help="Only what this rank printed.", min=0)] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Begin each line with its time.")] = False,
    directory: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="The --directory the job ran with, where Slurm no longer knows the job."
        ),
    ] = None,
    file: LogsFile = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show what the ranks of a job printed, ordered by time."""
    with Session(json, file, cluster) as session:
        from shoal.verbs.logs import follow as follow_verb
        from shoal.verbs.logs import logs as verb

        context = session.open(phases=False)
        if follow:
            with keep_running(job), live_output(session, rank, timestamps) as (show, show_bars):
                result = session.run(follow_verb(context, job, show, directory, show_bars), watching=True)
            return finish_follow(session, result, rank)
        finish_logs(session, session.run(verb(context, job, directory)), rank, timestamps)


@with_session
def fetch(
    job: Annotated[str, typer.Argument(help="The job's number; 17_3 for a task of an array.")],
    path: Annotated[
        str, typer.Argument(help="A file or directory that it has made. Default: all that it has made.")
    ] = "",
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIRECTORY", help="Where to put it. Default: job-JOB here.")
    ] = None,
    directory: Annotated[
        str | None,
        typer.Option(
            metavar="DIRECTORY", help="The --directory the job ran with, where Slurm no longer knows the job."
        ),
    ] = None,
    *,
    session: Session,
) -> None:
    """Copy what a job has made to this machine.

    That is its logs and checkpoints, and what the script wrote where it started. Run it again to copy only what has
    changed. With several nodes that share no directory, the files of each are below its name.
    """
    from shoal.cli.job_screens import show_fetched
    from shoal.verbs.fetch import fetch as verb

    result = session.run(verb(session.open(), job, path, to, directory), watching=True)
    if not session.finish(result, PARTLY if result.failures else 0):
        show_fetched(session.console, session.errors, result)


@with_session
def cancel(
    jobs: Annotated[list[str], typer.Argument(metavar="JOB", help="Numbers of jobs.")], session: Session
) -> None:
    """Cancel jobs, running or waiting."""
    from shoal.verbs.jobs import cancel as verb

    result = session.run(verb(session.open(phases=False), jobs))
    if session.finish(result):
        return
    for text, numbers in (("cancelled", result.cancelled), ("already ended:", result.ended)):
        if numbers:
            session.console.print(f"{text} {', '.join(numbers)}")


@contextmanager
def keep_running(job: str) -> Iterator[None]:
    """Ctrl-C stops watching the job, not the job."""
    try:
        yield
    except Interrupted as interrupted:
        interrupted.message = f"job {job} goes on"
        interrupted.hint = f"`shoal logs -f {job}` shows it, `shoal cancel {job}` ends it"
        raise


def watch_or_cancel(session: Session, context: Context, job: str, watch: Coroutine[Any, Any, T]) -> T:
    """Watch a job to its end. Ctrl-C leaves it running, and a second one soon after cancels it."""
    from shoal.verbs.jobs import cancel as verb

    try:
        with keep_running(job):
            return session.run(watch, watching=True, second=f"Ctrl-C again now cancels job {job}")
    except Interrupted as interrupted:
        if len(interrupted.signals) < 2:
            raise
    ended = session.run(verb(context, [job])).ended
    hint = f"`shoal logs {job}` shows what it printed at its end"
    raise Interrupted(f"job {job} had ended already" if ended else f"job {job} was cancelled", hint=hint)


def print_line(session: Session, rank: int | None, timestamps: bool = False) -> Callable[[LogLine], None]:
    """Prints each line of a log as it comes, of one rank or of all."""
    from shoal.cli.job_screens import show_line

    def show(line: LogLine) -> None:
        if not session.json and rank in (None, line.rank):
            show_line(session.console, line, timestamps)

    return show


@contextmanager
def live_output(
    session: Session, rank: int | None, timestamps: bool = False
) -> Iterator[tuple[Callable[[LogLine], None], Callable[[Iterable[LogLine]], None]]]:
    """Prints lines as they come, and below them those that are not finished, of one rank or of all."""
    from shoal.cli.job_screens import BarArea

    print_one, area = print_line(session, rank, timestamps), BarArea(session.console)

    def show(line: LogLine) -> None:
        area.clear()
        print_one(line)

    def show_bars(lines: Iterable[LogLine]) -> None:
        if not session.json:
            area.show(line for line in lines if rank in (None, line.rank))

    try:
        yield show, show_bars
    finally:
        area.clear()


def finish_logs(session: Session, result: LogsResult, rank: int | None, timestamps: bool) -> None:
    show = print_line(session, rank, timestamps)
    for line in result.lines:
        show(line)
    finish_follow(session, result, rank)


def finish_follow(session: Session, result: LogsResult, rank: int | None) -> None:
    """Finish a log whose lines are already shown."""
    finish_log(session, result, {**plain(result), "lines": _lines_of(result, rank)})


def finish_log(session: Session, result: LogsResult, value: dict[str, Any], *, always: bool = False) -> None:
    """Show the nodes that could not be read, and how the job ended; `always`: also when it succeeded."""
    from shoal.cli.job_screens import show_job_end
    from shoal.cli.screen import show_failures

    if not session.finish(value, PARTLY if result.failures else 0):
        show_failures(session.errors, result.failures)
        if always or result.reason is not None:
            show_job_end(session.errors, result.record, result.reason)


def _lines_of(result: LogsResult, rank: int | None) -> tuple[LogLine, ...]:
    return tuple(line for line in result.lines if rank in (None, line.rank))
