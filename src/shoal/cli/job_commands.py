"""The commands about jobs: run, jobs, logs, cancel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli import early
from shoal.cli.completion import words
from shoal.cli.job_results import (
    finish_cancel,
    finish_dry_run,
    finish_follow,
    finish_jobs,
    finish_logs,
    finish_run,
    finish_wait,
    log_line,
    tell_run,
)
from shoal.cli.options import Cluster, File, Json
from shoal.cli.session import Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.jobs.model import JobSpec
    from shoal.verbs.context import Context
    from shoal.verbs.run import Submitted

LogsFile = Annotated[
    Path | None,
    typer.Option("--file", envvar="SHOAL_FILE", help="The spec. Default: shoal.yaml here, else the sandbox."),
]
Directory = Annotated[
    str | None, typer.Option(help="Where code and logs are kept on the hosts. Default: /var/lib/shoal/jobs/CLUSTER.")
]


def run(
    script: Annotated[str | None, typer.Argument(help="A script of your working tree.")] = None,
    args: Annotated[
        list[str] | None, typer.Argument(help="The script's arguments, its own options among them.")
    ] = None,
    job: Annotated[Path | None, typer.Option("--job", help="Take the job from this file; options replace it.")] = None,
    launcher: Annotated[
        str | None,
        typer.Option(
            help="Who starts the processes: srun, torchrun, spawn, mpirun or python. Default: srun.",
            autocompletion=words("srun", "torchrun", "spawn", "mpirun", "python"),
        ),
    ] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", "-N", help="How many nodes. Default: 1.")] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="GPUs of each node. Default: all they have.")] = None,
    ntasks_per_node: Annotated[
        int | None, typer.Option(help="Processes of the script on each node. Default: one a GPU.")
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option("--cpus-per-task", "-c", help="CPUs of each process. Default: the node's, shared out.")
    ] = None,
    mem: Annotated[str | None, typer.Option(help="Memory of each node, as 16G; 0 for all of it.")] = None,
    time: Annotated[str | None, typer.Option("--time", "-t", help="The time limit: minutes or [D-]HH:MM:SS.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="The queue.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", "-C", help="Features the nodes must have.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="The account to charge.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", "-q", help="The quality of service.")] = None,
    array: Annotated[str | None, typer.Option("--array", "-a", help="Run it many times: 0-9 or 0-99%10.")] = None,
    dependency: Annotated[
        str | None, typer.Option("--dependency", "-d", help="Wait for other jobs: afterok:17, or singleton.")
    ] = None,
    nodelist: Annotated[str | None, typer.Option("--nodelist", "-w", help="Exactly these nodes: gpu[01-02].")] = None,
    switches: Annotated[int | None, typer.Option(help="How many sites it may span. Default: one.")] = None,
    exclusive: Annotated[bool | None, typer.Option("--exclusive", help="Share the nodes with no other job.")] = None,
    requeue: Annotated[
        bool | None,
        typer.Option("--requeue/--no-requeue", help="Requeue it after a failed node, preemption, or when it asks."),
    ] = None,
    signal: Annotated[
        str | None, typer.Option(help="The warning before the end, and how many seconds before. Default: USR1@60.")
    ] = None,
    output: Annotated[
        str | None, typer.Option("--output", "-o", help="A file on the first node for all output, as sbatch names it.")
    ] = None,
    error: Annotated[str | None, typer.Option("--error", "-e", help="The same for what srun complains about.")] = None,
    job_name: Annotated[str | None, typer.Option("--job-name", "-J", help="Its name. Default: the script's.")] = None,
    profile: Annotated[
        str | None, typer.Option(help="Profile every rank: with torch, nsys or line. `shoal logs` says where it is.")
    ] = None,
    tracking_uri: Annotated[
        str | None, typer.Option(help="The MLflow server; MLFLOW_TRACKING_PASSWORD and the like go with it.")
    ] = None,
    experiment: Annotated[str | None, typer.Option(help="Its experiment. Default: the job's name.")] = None,
    export: Annotated[
        list[str] | None, typer.Option(help="NAME=VALUE for the script's environment; may be given many times.")
    ] = None,
    env: Annotated[str | None, typer.Option(help="The environment of the file that runs the script.")] = None,
    python: Annotated[str | None, typer.Option(help="The Python on the nodes. Default: python3.")] = None,
    directory: Directory = None,
    max_size: Annotated[int, typer.Option(help="The largest working tree to send, in MiB.", min=1)] = 64,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the batch script and submit nothing.")] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Show its output and wait for its end.")] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Run a script of your working tree as a Slurm job.

    Without options it gets all GPUs of one node, one process each; -N2 all those of two. The options are spelled as
    sbatch spells them.
    """
    given: dict[str, Any] = {
        **{"launcher": launcher, "nodes": nodes, "gpus_per_node": gpus_per_node, "ntasks_per_node": ntasks_per_node},
        **{"cpus_per_task": cpus_per_task, "mem": mem, "time": time, "partition": partition, "constraint": constraint},
        **{"account": account, "qos": qos, "array": array, "dependency": dependency, "nodelist": nodelist},
        **{"switches": switches},
        **{"exclusive": exclusive, "requeue": requeue, "signal": signal, "output": output, "error": error},
        **{"job_name": job_name, "python": python, "directory": directory, "profile": profile},
        **{"tracking_uri": tracking_uri, "experiment": experiment, "environment": env},
    }

    def asked() -> JobSpec:
        from shoal.jobs.options import job_of
        from shoal.verbs.run import check_secrets

        options = {name: value for name, value in given.items() if value is not None}
        if export:
            options["env"] = dict(exported(text) for text in export)
        if script is not None:
            options.update(script=script, args=tuple(args or ()))
        if job is None:
            spec = job_of(options)
        else:
            from shoal.jobs.load import load_job

            spec = load_job(job, options)
        if wait and spec.array:
            raise UsageError("--wait follows one job, and --array makes many", hint="`shoal jobs` shows them all")
        check_secrets(spec)
        if env and python:
            raise UsageError("--env brings its own Python, and --python names another", hint="leave one of them out")
        return spec

    with Session(json) as session:
        context = session.open(file, cluster, phases=False)
        limit = max_size * 1024 * 1024
        if dry_run:
            from shoal.verbs.run import dry_run as prepare

            return finish_dry_run(session, session.run(prepare(context, asked(), Path.cwd(), limit)))
        submitted = _submit(session, context, asked, limit)
        if not wait:
            return finish_run(session, submitted)
        tell_run(session, submitted)
        from shoal.verbs.logs import follow

        with left_running(submitted.id):
            ended = session.run(follow(context, submitted.id, log_line(session, None), directory), watching=True)
        finish_wait(session, submitted, ended)


def _submit(session: Session, context: Context, asked: Callable[[], JobSpec], limit: int) -> Submitted:
    """The hosts are being reached meanwhile. What is wrong with the options is told before what is with them."""
    ahead = early.begun(context)
    try:
        spec = asked()
    except BaseException:
        ahead.leave()
        raise
    from shoal.verbs.run import submit

    async def work() -> Submitted:
        async with await ahead.reached() as reached:
            return await submit(context, reached, spec, Path.cwd(), limit)

    return session.run(work(), ahead.take_over())


@contextmanager
def left_running(job: str) -> Iterator[None]:
    """Who stops watching a job does not stop the job."""
    try:
        yield
    except Interrupted:
        hint = f"`shoal logs -f {job}` shows it, `shoal cancel {job}` ends it"
        raise Interrupted(f"job {job} goes on", hint=hint) from None


def jobs(
    ended: Annotated[bool, typer.Option("--all", "-a", help="Also all jobs that ended more than a day ago.")] = False,
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show jobs, how far they are, and why they failed."""
    with Session(json) as session:
        from shoal.verbs.jobs import jobs as verb

        finish_jobs(session, session.run(verb(session.open(file, cluster, phases=ended), ended=ended)))


def logs(
    job: Annotated[str, typer.Argument(help="The job's number; 17_3 for one of an array.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
    rank: Annotated[int | None, typer.Option(help="Only what this rank printed.", min=0)] = None,
    timestamps: Annotated[bool, typer.Option("--timestamps", help="Begin each line with its time.")] = False,
    directory: Directory = None,
    file: LogsFile = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """Show what the ranks of a job printed, in the order of time."""
    with Session(json) as session:
        from shoal.verbs.logs import follow as follow_verb
        from shoal.verbs.logs import logs as verb

        context = session.open(file, cluster, phases=False)
        if follow:
            show = log_line(session, rank, timestamps)
            with left_running(job):
                followed = session.run(follow_verb(context, job, show, directory), watching=True)
            return finish_follow(session, followed, rank)
        finish_logs(session, session.run(verb(context, job, directory)), rank, timestamps)


def cancel(
    jobs: Annotated[list[str], typer.Argument(help="Numbers of jobs.")],
    file: File = None,
    cluster: Cluster = None,
    json: Json = False,
) -> None:
    """End jobs, running or waiting."""
    with Session(json) as session:
        from shoal.verbs.cancel import cancel as verb

        finish_cancel(session, session.run(verb(session.open(file, cluster, phases=False), jobs)))


def exported(text: str) -> tuple[str, str]:
    """The name and the value in an --export."""
    name, equals, value = text.partition("=")
    if not equals:
        raise UsageError(f"--export {name} has no value", hint=f"use --export {name}=VALUE")
    return name, value


def register(app: typer.Typer) -> None:
    """Add these commands."""
    app.command(context_settings={"allow_interspersed_args": False})(run)
    app.command()(jobs)
    app.command()(logs)
    app.command()(cancel)
