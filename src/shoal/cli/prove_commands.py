"""The command that compares a script's training with many processes to that with one: prove."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.cli.job_commands import exported
from shoal.cli.options import Json
from shoal.cli.session import Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.plan.progress import Progress
    from shoal.proof.model import Asked, ProofResult, Runner


def prove(
    script: Annotated[str, typer.Argument(help="A training script that uses shoal.train.")],
    args: Annotated[list[str] | None, typer.Argument(help="The script's arguments, behind --.")] = None,
    processes: Annotated[int, typer.Option("--processes", "-n", help="How many processes to prove.", min=2)] = 2,
    launcher: Annotated[
        str | None,
        typer.Option(help="Who starts them, with commas between. Default: torchrun,spawn; on a cluster srun."),
    ] = None,
    parallel: Annotated[str, typer.Option(help="How the model is spread, with commas between.")] = "ddp,fsdp",
    dtype: Annotated[str, typer.Option(help="The precision: float64 or float32.")] = "float64",
    tolerance: Annotated[
        float | None, typer.Option(help="The largest relative difference. Default: 1e-12, in float32 1e-6.", min=0)
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of the optimizer to compare.", min=1)] = 10,
    timeout: Annotated[float, typer.Option(help="Seconds for each run.", min=1)] = 600,
    python: Annotated[
        str | None,
        typer.Option(help="The Python that runs the script. Default: Shoal's own; on a cluster python3."),
    ] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the records in this directory.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="Run as jobs of the cluster of this spec.")] = None,
    cluster: Annotated[str | None, typer.Option(help="Run as jobs of this sandbox cluster, which has no file.")] = None,
    job: Annotated[
        Path | None, typer.Option("--job", help="On a cluster: take partition, env and the rest from this file.")
    ] = None,
    nodes: Annotated[
        int | None, typer.Option("--nodes", "-N", help="On a cluster: how many nodes. Default: 1.")
    ] = None,
    gpus_per_node: Annotated[int | None, typer.Option(help="On a cluster: GPUs of each node. Default: all.")] = None,
    export: Annotated[
        list[str] | None,
        typer.Option(help="On a cluster: NAME=VALUE for the script's environment; may be given many times."),
    ] = None,
    json: Json = False,
) -> None:
    """Prove that a script trains with many processes as with one.

    It runs with one process, then with many in every way asked for; the losses of each step and the final parameters
    are compared. A difference that is more than rounding is explained, and the exit code is 1. Without --file or
    --cluster it runs on this machine's CPU.
    """
    with Session(json) as session:
        from shoal.proof.local import LOCAL_LAUNCHERS, LocalRunner
        from shoal.proof.model import PARALLELS, TOLERANCES, Asked
        from shoal.verbs.prove import prove as verb
        from shoal.verbs.prove_jobs import CLUSTER_LAUNCHERS

        far = file is not None or cluster is not None
        if dtype not in TOLERANCES:
            raise UsageError(f"--dtype is {dtype!r}", hint="use float64 or float32")
        _check_room(keep)
        launchers = _names("--launcher", launcher, CLUSTER_LAUNCHERS) if launcher else ()
        asked = Asked(
            script,
            tuple(args or ()),
            processes,
            launchers or (("srun",) if far else LOCAL_LAUNCHERS),
            _names("--parallel", parallel, PARALLELS),
            dtype,
            TOLERANCES[dtype] if tolerance is None else tolerance,
            steps,
            timeout,
        )
        given = {"nodes": nodes, "gpus_per_node": gpus_per_node, "python": python, "env": export}
        runner: Runner
        if far:
            runner = _as_jobs(session, asked, file, cluster, job, given)
        else:
            _refuse({"--nodes": nodes, "--gpus-per-node": gpus_per_node, "--job": job, "--export": export})
            runner = LocalRunner(asked, python)
        try:
            result = session.run(verb(asked, runner, progress_of(session), keep.absolute() if keep else None))
        except Interrupted:
            raise Interrupted(f"stopped; its {'job is cancelled' if far else 'processes are ended'}") from None
        finish(session, result)


def progress_of(session: Session) -> Progress:
    """A proof takes minutes. With --json, too, whoever sits at a terminal sees where it is; a script's log does not."""
    from shoal.cli.progress import TerminalProgress
    from shoal.plan.progress import Silence

    return TerminalProgress(session.errors) if session.errors.is_terminal or not session.json else Silence()


def _as_jobs(
    session: Session, asked: Asked, file: Path | None, cluster: str | None, job: Path | None, given: dict[str, Any]
) -> Runner:
    from shoal.jobs.load import job_of, load_job
    from shoal.verbs.prove_jobs import ClusterRunner

    options = {name: value for name, value in given.items() if value is not None}
    if "env" in options:
        options["env"] = dict(exported(text) for text in options["env"])
    options.update(script=asked.script, args=asked.args)
    spec = load_job(job, options) if job is not None else job_of(options)
    return ClusterRunner(asked, session.open(file, cluster), spec, Path.cwd())


def finish(session: Session, result: ProofResult) -> None:
    """Print what was found; the exit code is 1 where anything differs."""
    if session.json:
        from shoal.cli.as_json import plain

        session.finish_value(_finite({**plain(result), "passed": result.passed}))
    else:
        from shoal.cli.render_proof import show_proof

        show_proof(session.console, result)
    session.status = 0 if result.passed else 1


def _finite(value: Any) -> Any:
    """JSON knows no infinity: a difference without bound is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _check_room(keep: Path | None) -> None:
    try:
        used = keep is not None and keep.exists() and any(keep.iterdir())
    except OSError as error:
        raise UsageError(f"--keep {keep} cannot be used: {error.strerror}", hint="name a new directory") from None
    if used:
        raise UsageError(f"--keep {keep} is not empty", hint="name a new directory")


def _refuse(of_jobs: dict[str, Any]) -> None:
    for option, value in of_jobs.items():
        if value is not None and value != []:
            raise UsageError(f"{option} is for jobs of a cluster", hint="name the cluster with --file or --cluster")


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        said = ", ".join(unknown) if unknown else "nothing"
        raise UsageError(f"{option} names {said}", hint=f"use {', '.join(known)}, with commas between")
    return names


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(prove)
