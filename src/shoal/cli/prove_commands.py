"""The command that compares a script's training with many processes to that with one: prove."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from shoal.cli.options import Json
from shoal.cli.session import Session
from shoal.errors import Interrupted, UsageError

if TYPE_CHECKING:
    from shoal.proof.model import Runner


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
    python: Annotated[str | None, typer.Option(help="The Python that runs the script. Default: Shoal's own.")] = None,
    keep: Annotated[Path | None, typer.Option(help="Keep the records and the output in this directory.")] = None,
    json: Json = False,
) -> None:
    """Prove that a script trains the same with many processes as with one.

    It runs with one process, then with many in every way asked for; the losses of each step and the final parameters
    are compared. A difference that is more than rounding is explained, and the exit code is 1.
    """
    with Session(json) as session:
        from shoal.cli.progress import TerminalProgress
        from shoal.cli.render_proof import show_proof
        from shoal.plan.progress import Silence
        from shoal.proof.local import LOCAL_LAUNCHERS, LocalRunner
        from shoal.proof.model import PARALLELS, TOLERANCES, Asked
        from shoal.verbs.prove import prove as verb

        if dtype not in TOLERANCES:
            raise UsageError(f"--dtype is {dtype!r}", hint="use float64 or float32")
        if keep is not None and keep.exists() and any(keep.iterdir()):
            raise UsageError(f"--keep {keep} is not empty", hint="name a new directory")
        asked = Asked(
            script,
            tuple(args or ()),
            processes,
            _names("--launcher", launcher, LOCAL_LAUNCHERS) if launcher else LOCAL_LAUNCHERS,
            _names("--parallel", parallel, PARALLELS),
            dtype,
            TOLERANCES[dtype] if tolerance is None else tolerance,
            steps,
            timeout,
        )
        runner: Runner = LocalRunner(asked, python)
        progress = Silence() if json else TerminalProgress(session.errors)
        try:
            result = session.run(verb(asked, runner, progress, keep.absolute() if keep else None))
        except Interrupted:
            raise Interrupted("stopped; its processes are ended") from None
        if json:
            from shoal.cli.as_json import plain

            session.finish_value({**plain(result), "passed": result.passed})
        else:
            show_proof(session.console, result)
        session.status = 0 if result.passed else 1


def _names(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    unknown = [name for name in names if name not in known]
    if unknown or not names:
        raise UsageError(
            f"{option} knows no {', '.join(map(repr, unknown)) or 'empty list'}", hint=f"use {', '.join(known)}"
        )
    return names


def register(app: typer.Typer) -> None:
    """Add this command."""
    app.command()(prove)
