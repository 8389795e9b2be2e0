"""`shoal prove`: does a script compute with N processes what it computes with one?"""

from __future__ import annotations

import tempfile
from pathlib import Path

from shoal.errors import ShoalError
from shoal.plan.progress import Progress
from shoal.proof.causes import likely_cause
from shoal.proof.compare import compare
from shoal.proof.model import Asked, ProofResult, Row, RunFailed, Runner, Trial
from shoal.proof.records import RunRecord, read_run, what_is_missing


async def prove(asked: Asked, runner: Runner, progress: Progress, keep: Path | None = None) -> ProofResult:
    """Run the script with one process, then in every way asked for, and compare. `keep` keeps the records there."""
    with tempfile.TemporaryDirectory(prefix="shoal-prove-") as scratch:
        place = keep or Path(scratch)
        one = await _reference(runner, place, progress)
        rows = []
        for launcher in asked.launchers:
            for parallel in asked.parallels:
                trial = Trial(launcher, parallel, asked.processes)
                rows.append(await _row(asked, runner, trial, place, one, progress))
    losses = tuple(loss.value for loss in one.losses)
    return ProofResult(asked.script, asked.processes, asked.dtype, asked.tolerance, one.steps, losses, tuple(rows))


async def _reference(runner: Runner, place: Path, progress: Progress) -> RunRecord:
    """What one process does. Without it there is nothing to compare with."""
    trial = Trial("python", "ddp", 1)
    try:
        one = await _run(runner, trial, place, progress)
    except RunFailed as error:
        raise ShoalError(f"the script fails with one process: {error.message}", hint=error.hint) from None
    if missing := what_is_missing(one, 1):
        raise ShoalError(missing[0], hint=missing[1])
    return one


async def _row(asked: Asked, runner: Runner, trial: Trial, place: Path, one: RunRecord, progress: Progress) -> Row:
    try:
        many = await _run(runner, trial, place, progress)
    except RunFailed as error:
        return Row(trial.launcher, trial.parallel, False, cause=str(error))
    if missing := what_is_missing(many, trial.processes):
        return Row(trial.launcher, trial.parallel, False, cause=f"{missing[0]}\n  fix: {missing[1]}")
    found = compare(one, many)
    if found.within(asked.tolerance):
        return Row(trial.launcher, trial.parallel, True, found)
    return Row(trial.launcher, trial.parallel, False, found, likely_cause(one, many, found, asked.tolerance))


async def _run(runner: Runner, trial: Trial, place: Path, progress: Progress) -> RunRecord:
    directory = _room(place, trial)
    with progress.phase(trial.title, 1) as phase:
        try:
            await runner.run(trial, directory, phase)
        except RunFailed as error:
            phase.done(runner.where, error.message.partition("\n")[0])
            raise
        phase.done(runner.where)
    return read_run(directory)


def _room(place: Path, trial: Trial) -> Path:
    directory = place / trial.title.replace(" ", "-")
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ShoalError(
            f"cannot make {directory}: {error.strerror}", hint="name a directory that can be written with --keep"
        ) from None
    return directory
