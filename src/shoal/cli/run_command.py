"""`shoal run`. Its options are made from the fields of a job: each is declared once, in `shoal.jobs.model`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo

from shoal.cli.job_commands import finish_log, live_output, watch_or_cancel
from shoal.cli.options import Cluster, File, Json, suggest
from shoal.cli.output import escape_controls
from shoal.cli.session import Session
from shoal.errors import UsageError
from shoal.jobs.model import (
    JOB_FIELDS,
    LAUNCHER_NAMES,
    PROFILER_NAMES,
    JobSpec,
    job_from_options,
    load_job,
    option_name,
)

if TYPE_CHECKING:
    from shoal.verbs.context import Context
    from shoal.verbs.logs import LogsResult
    from shoal.verbs.submission import SubmittedJob

CHOICES = {"launcher": LAUNCHER_NAMES, "profile": PROFILER_NAMES}
"""What the shell completes, by field."""


def run(
    script: Annotated[str | None, typer.Argument(help="A script of your working tree.")] = None,
    args: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="Its arguments and its own options.")] = None,
    job: Annotated[
        Path | None, typer.Option("--job", metavar="FILE", help="Take the job from this file; options override it.")
    ] = None,
    max_size: Annotated[int, typer.Option(metavar="MIB", help="The largest working tree to send, in MiB.", min=1)] = 64,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")] = False,
    wait: Annotated[
        bool,
        typer.Option(
            "--wait",
            help="Show the job's output until it ends; of an array, how each task ended. Ctrl-C leaves the job running,"
            " twice cancels it.",
        ),
    ] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
    **options: Any,
) -> None:
    """Run a script of your working tree as a Slurm job.

    Without options it gets all GPUs of one node, one process per GPU; -N2 takes those of two nodes. The options are
    spelled as sbatch spells them.
    """
    with Session(json, file, cluster) as session:
        context = session.open(phases=False)
        limit = max_size * 1024 * 1024
        spec = _job_spec(script, args, job, options)
        if spec.image:  # one of a registry is pulled at its first use
            context = session.with_progress(context)
        if not json and spec.args:
            _show_script_options(session, spec)
        if dry_run:
            from shoal.verbs.run import dry_run as prepare

            prepared_job = session.run(prepare(context, spec, Path.cwd(), limit))
            value = {
                "script": prepared_job.script,
                "code": prepared_job.tree.hash,
                "job": prepared_job.job.spec.as_dict(),
            }
            if not session.finish(value):
                print(escape_controls(prepared_job.script), end="")
            return
        from shoal.verbs.run import run as verb

        submitted_job = session.run(verb(context, spec, Path.cwd(), limit))
        if not json:
            from shoal.cli.job_screens import show_submitted

            show_submitted(session.errors if wait else session.console, submitted_job, watched=wait)
        if not wait:
            session.finish(submitted_job)
            return
        if spec.array:
            return _wait_for_array(session, context, submitted_job)
        from shoal.verbs.logs import follow

        with live_output(session, None) as (show, show_bars):
            work = follow(context, submitted_job.id, show, options["directory"], show_bars)
            result = watch_or_cancel(session, context, submitted_job.id, work)
        finish_wait(session, submitted_job, result)


def _wait_for_array(session: Session, context: Context, job: SubmittedJob) -> None:
    """Show each task when it ends, then all of them and why some failed."""
    from shoal.cli.job_screens import show_jobs, show_task_end
    from shoal.cli.output import plain
    from shoal.verbs.jobs import jobs
    from shoal.verbs.logs import wait_for_tasks

    work = wait_for_tasks(context, job.id, lambda task: show_task_end(session.errors, task))
    watch_or_cancel(session, context, job.id, work)
    result = session.run(jobs(context, [job.id]))
    if not session.finish({**plain(result), **plain(job)}):
        show_jobs(session.console, result)
    if any(view.record.failed for view in result.jobs):
        session.status = 1


def _show_script_options(session: Session, spec: JobSpec) -> None:
    """Say that options of `shoal run` behind the script are the script's own: they are often meant otherwise."""
    try:
        words = misplaced_options(spec.args, Path(spec.script).read_text(errors="ignore"))
    except OSError:
        return  # reported where it is read
    if words:
        note = f"note: {' '.join(words)} goes to {spec.script}; options of `shoal run` come before the script"
        session.errors.print(escape_controls(note), markup=False, soft_wrap=True)


def misplaced_options(args: Iterable[str], script: str) -> list[str]:
    """Arguments that are options of `shoal run`, and none that the script's text names."""
    text, own = script.replace("_", "-"), _run_options()
    names = {word: word.partition("=")[0] for word in args}
    return [
        word for word, name in names.items() if (name in own and name not in text) or re.fullmatch("-N[0-9]+", word)
    ]


def _run_options() -> set[str]:
    """The long options of `shoal run`."""
    names: set[str] = set()
    for parameter in inspect.signature(run).parameters.values():
        option = get_args(parameter.annotation)[-1]
        if isinstance(option, OptionInfo):
            words = [str(word) for word in (option.default, *(option.param_decls or ())) if word not in (None, ...)]
            names |= {part for word in words or [f"--{parameter.name.replace('_', '-')}"] for part in word.split("/")}
    return {name for name in names if name.startswith("--")}


def _job_spec(script: str | None, args: list[str] | None, file: Path | None, options: dict[str, Any]) -> JobSpec:
    from shoal.verbs.submission import check_secrets

    spec = read_job(file, options if script is None else {**options, "script": script, "args": tuple(args or ())})
    check_secrets(spec)
    if options["environment"] and options["python"]:
        raise UsageError("--env brings its own Python, and --python names another", hint="leave one of them out")
    return spec


def read_job(file: Path | None, options: Mapping[str, Any]) -> JobSpec:
    """The job of a command line. Options that are given are in place of what the file says."""
    values = {name: value for name, value in options.items() if value is not None}
    if "export" in values:
        values["export"] = parse_exports(values["export"])
    if file is None:
        return job_from_options(values)
    return load_job(file, values)


def parse_exports(texts: list[str]) -> dict[str, str]:
    """The variables of all --export options."""
    exports = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"--export {name} has no value", hint=f"use --export {name}=VALUE")
        exports[name] = value
    return exports


def finish_wait(session: Session, job: SubmittedJob, result: LogsResult) -> None:
    from shoal.cli.output import plain

    finish_log(session, result, {**plain(job), **plain(result)}, always=True)
    if not session.json and result.record is not None and result.record.work_dir:
        from shoal.cli.job_screens import show_job_directory

        show_job_directory(session.errors, result.record)
    if result.record is None or result.record.failed:
        session.status = 1


def _job_options() -> Iterator[inspect.Parameter]:
    """The options for the fields of a job. None stands for one that is not given: the job's file may have it."""
    types = get_type_hints(JobSpec)
    for name, spelling in JOB_FIELDS.items():
        if not spelling.help:
            continue  # the script and its arguments
        names = "/".join(filter(None, (option_name(name), spelling.negative)))
        option = typer.Option(
            *filter(None, (names, spelling.short)),
            help=spelling.help,
            metavar=spelling.metavar or None,
            autocompletion=suggest(*CHOICES[name]) if name in CHOICES else None,
        )
        annotation: Any = Annotated[Any, option]  # its type is known only now
        annotation = annotation.copy_with((_option_type(types[name]) | None,))
        yield inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def _option_type(annotation: Any) -> Any:
    """What the command line hands over for a field: text, a number, a flag, or many texts for a mapping or a list."""
    while args := get_args(annotation):
        if get_origin(annotation) in (Mapping, tuple):
            return list[str]
        annotation = args[0]
    return annotation


def _signature(function: Callable[..., None]) -> inspect.Signature:
    """The function's parameters with the job's options, where typer looks for them, in place of `**options`."""
    parameters = list(inspect.signature(function, eval_str=True).parameters.values())[:-1]
    keyword_parameters = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in parameters]
    return inspect.Signature([*keyword_parameters[:3], *_job_options(), *keyword_parameters[3:]])


run.__signature__ = _signature(run)  # type: ignore[attr-defined]
