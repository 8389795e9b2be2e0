"""The command that compares a script's training with many processes to that with one: prove."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

from shoal.cli.options import Json
from shoal.cli.output import plain
from shoal.cli.run_command import read_job
from shoal.cli.screen import Columns, escape_text
from shoal.cli.session import Session
from shoal.errors import Interrupted, UsageError
from shoal.proof.compare import Difference

if TYPE_CHECKING:
    from shoal.plan.progress import ProgressReporter
    from shoal.proof.types import ProofResult, ProofRow, ProofSettings, Runner


def prove(
    script: Annotated[str, typer.Argument(help="A training script that uses shoal.train.")],
    args: Annotated[list[str] | None, typer.Argument(metavar="ARG", help="The script's arguments, after --.")] = None,
    processes: Annotated[
        int, typer.Option("--processes", "-n", metavar="NUMBER", help="How many processes to compare.", min=2)
    ] = 2,
    launcher: Annotated[
        str | None,
        typer.Option(
            metavar="WORD", help="What starts them, comma-separated. Default: torchrun,spawn; on a cluster srun."
        ),
    ] = None,
    parallel: Annotated[
        str, typer.Option(metavar="WORD", help="How the model is parallelized, comma-separated.")
    ] = "ddp,fsdp",
    dtype: Annotated[str, typer.Option(metavar="WORD", help="The precision: float64 or float32.")] = "float64",
    tolerance: Annotated[
        float | None,
        typer.Option(metavar="NUMBER", help="The largest relative difference. Default: 1e-12, in float32 1e-6.", min=0),
    ] = None,
    steps: Annotated[int, typer.Option(metavar="NUMBER", help="Optimizer steps to compare.", min=1)] = 10,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="How long each run may take.", min=1)] = 600,
    python: Annotated[
        str | None,
        typer.Option(
            metavar="PROGRAM", help="The Python that runs the script. Default: Shoal's own; on a cluster python3."
        ),
    ] = None,
    keep: Annotated[Path | None, typer.Option(metavar="DIRECTORY", help="Keep the records in this directory.")] = None,
    file: Annotated[
        Path | None, typer.Option("--file", "-f", metavar="FILE", help="Run as jobs on the cluster of this spec.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="NAME", help="Run as jobs on this cluster: you joined it, or it is a sandbox.")
    ] = None,
    job: Annotated[
        Path | None,
        typer.Option("--job", metavar="FILE", help="On a cluster: take partition, exports and so on from this file."),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-N", metavar="NUMBER", help="On a cluster: how many nodes. Default: 1.")
    ] = None,
    gpus_per_node: Annotated[
        int | None, typer.Option(metavar="NUMBER", help="On a cluster: GPUs of each node. Default: all.")
    ] = None,
    environment: Annotated[
        str | None, typer.Option("--env", metavar="NAME", help="On a cluster: the environment that runs the script.")
    ] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE", help="On a cluster: a variable for the script's environment; may be repeated."
        ),
    ] = None,
    image: Annotated[
        str | None, typer.Option(metavar="IMAGE", help="On a cluster: the image that the script runs in.")
    ] = None,
    mount: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SOURCE:DESTINATION[:ro]",
            help="On a cluster: a directory of the nodes in the image; may be repeated.",
        ),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that a script trains the same with many processes.

    It runs the script with one process, then with many under each launcher and parallelism, and compares the losses of
    each step and the final parameters. It explains a difference larger than rounding, and exits with 1. Without --file
    or --cluster it runs on this machine's CPU.
    """
    with Session(json, file, cluster) as session:
        from shoal.proof.types import PARALLELS, ProofSettings
        from shoal.verbs.prove import prove as verb

        on_cluster = file is not None or cluster is not None
        tolerance = _choose_tolerance(dtype, tolerance)
        _check_empty(keep)
        launchers, parallels = _choose_launchers(launcher, on_cluster), _parse_names("--parallel", parallel, PARALLELS)
        settings = ProofSettings(
            script, tuple(args or ()), processes, launchers, parallels, dtype, tolerance, steps, timeout
        )
        if on_cluster:
            if environment and python:
                raise UsageError(
                    "--env brings its own Python, and --python names another", hint="leave one of them out"
                )
            options = {"nodes": nodes, "gpus_per_node": gpus_per_node, "python": python, "export": export}
            options |= {"environment": environment, "image": image, "mount": mount}
            runner = _make_cluster_runner(session, settings, job, options)
        else:
            job_options = {"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--job": job, "--export": export}
            _reject_job_options({**job_options, "--env": environment, "--image": image, "--mount": mount})
            runner = _make_local_runner(settings, python)
        try:
            result = session.run(verb(settings, runner, progress_of(session), keep.absolute() if keep else None))
        except Interrupted:
            raise Interrupted(f"stopped; its {'job is cancelled' if on_cluster else 'processes are ended'}") from None
        finish(session, result)


def _choose_tolerance(dtype: str, tolerance: float | None) -> float:
    from shoal.proof.types import TOLERANCES

    if dtype not in TOLERANCES:
        raise UsageError(f"--dtype is {dtype!r}", hint="use float64 or float32")
    return TOLERANCES[dtype] if tolerance is None else tolerance


def _choose_launchers(launcher: str | None, on_cluster: bool) -> tuple[str, ...]:
    from shoal.proof.local_runner import LOCAL_LAUNCHERS
    from shoal.verbs.prove import CLUSTER_LAUNCHERS

    if launcher:
        return _parse_names("--launcher", launcher, CLUSTER_LAUNCHERS)
    return ("srun",) if on_cluster else LOCAL_LAUNCHERS


def _make_cluster_runner(
    session: Session, settings: ProofSettings, job: Path | None, options: dict[str, Any]
) -> Runner:
    from shoal.verbs.prove import ClusterRunner

    spec = read_job(job, {**options, "script": settings.script, "args": settings.args})
    return ClusterRunner(settings, session.open(), spec, Path.cwd())


def _make_local_runner(settings: ProofSettings, python: str | None) -> Runner:
    from shoal.proof.local_runner import LocalRunner

    return LocalRunner(settings, python)


def progress_of(session: Session) -> ProgressReporter:
    """A proof takes minutes, so a terminal shows progress even with --json; a script's log does not."""
    from shoal.cli.progress import TerminalProgress
    from shoal.plan.progress import NoProgress

    return TerminalProgress(session.errors) if session.errors.is_terminal or not session.json else NoProgress()


def finish(session: Session, result: ProofResult) -> None:
    """Print what was found; the exit code is 1 where anything differs."""
    if not session.finish(_replace_infinities({**plain(result), "passed": result.passed}), 0 if result.passed else 1):
        show_proof(session.console, result)


def _replace_infinities(value: Any) -> Any:
    """JSON has no infinity: an infinite difference becomes null."""
    if isinstance(value, dict):
        return {key: _replace_infinities(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_replace_infinities(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_empty(keep: Path | None) -> None:
    try:
        has_files = keep is not None and keep.exists() and any(keep.iterdir())
    except OSError as error:
        raise UsageError(f"cannot use --keep {keep}: {error.strerror}", hint="name a new directory") from None
    if has_files:
        raise UsageError(f"--keep {keep} is not empty", hint="name a new directory")


def _reject_job_options(job_options: dict[str, Any]) -> None:
    for option, value in job_options.items():
        if value is not None and value != []:
            raise UsageError(f"{option} is for jobs on a cluster", hint="name the cluster with --file or --cluster")


def _parse_names(option: str, text: str, choices: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in choices]
    if unknown or not names:
        rejected = ", ".join(unknown) if unknown else "nothing"
        raise UsageError(f"{option} names {rejected}", hint=f"use {', '.join(choices)}, comma-separated")
    return names


def show_proof(console: Console, result: ProofResult) -> None:
    table = Columns("launcher", "parallel", "losses", "first gradient", "parameters", "", wraps=("",))
    for row in result.rows:
        texts = ("-", "-", "-")
        if row.found:
            gradient = Difference(row.found.gradient.relative)
            texts = (_format(row.found.losses), _format(gradient), _format(row.found.parameters))
        table.add_row(row.launcher, row.parallel, *texts, _verdict(row))
    console.print(
        f"largest relative differences between {result.processes} processes and one, over {result.steps} steps"
        f" in {result.dtype}:",
        soft_wrap=True,
    )
    console.print(table)
    for cause in dict.fromkeys(row.cause for row in result.rows if row.cause):
        combinations = ", ".join(f"{row.launcher} {row.parallel}" for row in result.rows if row.cause == cause)
        lines = [escape_text(line) for line in cause.split("\n")]
        console.print(f"[red]✗[/] {combinations}: {lines[0]}", soft_wrap=True)
        for line in lines[1:]:
            console.print(f"  {line}", soft_wrap=True)
    if result.passed:
        console.print(
            f"[green]✓[/] {escape_text(result.script)} trains the same with {result.processes} processes as with"
            f" one: nothing differs by more than {result.tolerance:g}",
            soft_wrap=True,
        )


def _format(difference: Difference) -> str:
    if not difference.relative:
        return "none"
    location = f" ({escape_text(difference.where)})" if difference.where else ""
    return f"{difference.relative:.1e}{location}"


def _verdict(row: ProofRow) -> Text:
    if row.passed:
        return Text("✓ same", style="green")
    return Text("✗ differs" if row.found else "✗ failed", style="red")
