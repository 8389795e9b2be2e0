"""`shoal prove`: does a script compute with N processes what it computes with one?"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import math
import re
import tarfile
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path, PurePosixPath

from shoal.errors import CommandFailed, PartialFailure, ShoalError, UsageError
from shoal.hostlist import expand
from shoal.hosts.api import Host
from shoal.jobs.bundle import DEFAULT_LIMIT
from shoal.jobs.failure import FailureReason
from shoal.jobs.model import LAUNCHER_NAMES, JobSpec
from shoal.jobs.record import JobRecord
from shoal.plan.connections import Connections
from shoal.plan.progress import NestedProgress, Phase, ProgressReporter
from shoal.proof.causes import likely_cause
from shoal.proof.compare import compare
from shoal.proof.records import RunRecord, describe_missing_record, read_run
from shoal.proof.types import ProofResult, ProofRow, ProofRun, ProofSettings, Runner, ScriptFailed
from shoal.remote import shell_command
from shoal.spec.checks import minutes
from shoal.verbs.context import Context, compute_hosts
from shoal.verbs.jobs import cancel
from shoal.verbs.logs import logs, wait_for_job
from shoal.verbs.node_files import cancel_short_job, nodes_with_files, short_job_command
from shoal.verbs.run import run
from shoal.verbs.submission import SubmittedJob

RunOnce = Callable[[ProofRun], Awaitable[RunRecord]]


async def prove(
    settings: ProofSettings, runner: Runner, progress: ProgressReporter, keep: Path | None = None
) -> ProofResult:
    """Run the script with one process, then with every launcher and mode asked for, and compare.

    `keep` is a directory for the records; without it they are deleted.
    """
    with tempfile.TemporaryDirectory(prefix="shoal-prove-") as scratch:
        place = keep or Path(scratch)

        async def run_once(proof_run: ProofRun) -> RunRecord:
            return await _run(runner, proof_run, place, progress)

        single = await _reference(run_once)
        combinations = itertools.product(settings.launchers, settings.parallels)
        rows = [await _row(settings, launcher, parallel, run_once, single) for launcher, parallel in combinations]
    losses = tuple(loss.value for loss in single.losses)
    return ProofResult(
        settings.script, settings.processes, settings.dtype, settings.tolerance, single.steps, losses, tuple(rows)
    )


async def _reference(run_once: RunOnce) -> RunRecord:
    """The run with one process, which the others are compared with."""
    try:
        single = await run_once(ProofRun("python", "ddp", 1))
    except ScriptFailed as error:
        raise ShoalError(f"the script fails with one process: {error.message}", hint=error.hint) from None
    if missing := describe_missing_record(single, 1):
        raise ShoalError(missing[0], hint=missing[1])
    return single


async def _row(settings: ProofSettings, launcher: str, parallel: str, run_once: RunOnce, single: RunRecord) -> ProofRow:
    try:
        many = await run_once(ProofRun(launcher, parallel, settings.processes))
    except ScriptFailed as error:
        return ProofRow(launcher, parallel, False, cause=str(error))
    if missing := describe_missing_record(many, settings.processes):
        return ProofRow(launcher, parallel, False, cause=f"{missing[0]}\n  fix: {missing[1]}")
    comparison = compare(single, many)
    if comparison.within(settings.tolerance):
        return ProofRow(launcher, parallel, True, comparison)
    cause = likely_cause(single, many, comparison, settings.tolerance)
    return ProofRow(launcher, parallel, False, comparison, cause)


async def _run(runner: Runner, proof_run: ProofRun, place: Path, progress: ProgressReporter) -> RunRecord:
    directory = place / proof_run.title.replace(" ", "-")
    try:
        directory.mkdir(parents=True)
    except OSError as error:
        raise ShoalError(
            f"cannot make {directory}: {error.strerror}", hint="choose a directory that you may write to with --keep"
        ) from None
    with progress.phase(proof_run.title, 1) as phase:
        try:
            await runner.run(proof_run, directory, phase)
        except ScriptFailed as error:
            phase.done(runner.where, error.message.partition("\n")[0])
            raise
        phase.done(runner.where)
    return read_run(directory)


CLUSTER_LAUNCHERS = tuple(name for name in LAUNCHER_NAMES if name != "python")
RECORDS = "proof"
"""The directory of the records, below the job's own."""
_FILE = re.compile(r"rank-[0-9]+\.(jsonl|end)")


class ClusterRunner:
    """Runs the script as jobs, one after the other."""

    def __init__(
        self, settings: ProofSettings, context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT
    ) -> None:
        """`job` has what all runs have in common; the proof sets the launcher and the number of processes."""
        self._settings = settings
        self._context = context
        self._job = job
        self._here = here
        self._limit = limit
        nodes = job.nodes or 1
        if settings.processes % nodes:
            raise UsageError(
                f"cannot divide {settings.processes} processes equally among {nodes} nodes",
                hint=f"use -n {nodes * math.ceil(settings.processes / nodes)}",
            )

    @property
    def where(self) -> str:
        return self._context.cluster

    async def run(self, proof_run: ProofRun, directory: Path, phase: Phase) -> None:
        job = self.spec(proof_run)
        context = replace(self._context, progress=NestedProgress(phase))  # it may pull an image
        submission = asyncio.ensure_future(run(context, job, self._here, self._limit))
        try:
            # Shielded: a job that is queued before we know its number must be cancelled too.
            submitted_job = await asyncio.shield(submission)
            phase.update(self.where, f"job {submitted_job.id}")
            record = await wait_for_job(self._context, submitted_job.id)
        except asyncio.CancelledError:
            submitted_job = await submission
            await cancel(self._context, [submitted_job.id])
            with contextlib.suppress(ShoalError):  # the job is cancelled, even if its records stay
                await self._remove(submitted_job)
            raise
        except UsageError as error:
            raise self._with_proof_options(error) from None
        if record is None:
            hint = f"look at `shoal logs {submitted_job.id}`"
            raise ScriptFailed(f"Slurm does not know job {submitted_job.id} any more", hint=hint)
        await self._fetch(submitted_job, record, directory)
        if record.failed:
            reason = (await logs(self._context, submitted_job.id, job.directory)).reason
            fix = reason.fix if reason else ""
            if reason and reason.kind == "time limit" and self._job.time is None:
                fix = "give it more with --timeout"
            raise ScriptFailed(_failure_text(record, reason), hint=fix)

    def spec(self, proof_run: ProofRun) -> JobSpec:
        """The job of one run. It is not requeued: its records would be those of two halves."""
        nodes = self._job.nodes or 1
        is_single = proof_run.processes == 1
        # Slurm rejects a job whose warning would come before its start.
        minutes_needed = max(math.ceil(self._settings.timeout / 60), self._job.grace // 60 + 1)
        # `replace` does not check: the variables are Shoal's own, which a job file may not set.
        return replace(
            self._job,
            launcher=proof_run.launcher,
            nodes=1 if is_single else nodes,
            nodelist=None if is_single else self._job.nodelist,
            ntasks_per_node=proof_run.processes if is_single else proof_run.processes // nodes,
            requeue=False,
            time=self._job.time or str(minutes_needed),
            job_name=self._job.job_name or f"prove-{self._job.name}"[:64],
            export={**self._job.export, **proof_run.variables(self._settings, RECORDS)},
        )

    def _with_proof_options(self, error: UsageError) -> UsageError:
        """The hint of `shoal run`, with the options of `shoal prove`."""
        hint, processes = error.hint, self._settings.processes
        if tasks_limit := re.search(r"--ntasks-per-node (\d+)", hint):
            node_counts = (
                n for n in range(1, processes + 1) if processes % n == 0 and processes // n <= int(tasks_limit[1])
            )
            hint = hint.replace(tasks_limit[0], f"-N {next(node_counts)}")
        if self._job.time is None:
            hint = re.sub(r"--time ([0-9:-]+)", lambda limit: f"--timeout {minutes(limit[1]) * 60:g}", hint)
        return UsageError(error.message, hint=hint)

    async def _fetch(self, job: SubmittedJob, record: JobRecord, directory: Path) -> None:
        """Fetch the records from every node of the job, then remove them there: parameters are large."""
        place = _directory_of(job)
        async with await self._context.connections() as fleet:
            if nodes_of_user := nodes_with_files(self._context, record):
                host = await fleet.host(self._context.controller.name)
                archives = await fleet.each(nodes_of_user, lambda name: _records_by_job(host, record, name, place))
            else:
                nodes = self._hosts_of(expand(record.nodes) if record.nodes else [])
                names = [name for name in nodes if name in fleet.targets]
                archives = await fleet.each(names, lambda name: _records(fleet, name, _TAKE, place))
                # Only after all are read: nodes with shared storage have the same directory.
                await fleet.each(archives, lambda name: _records(fleet, name, _REMOVE, place))
            failures = dict(fleet.failures)
        if failures:
            causes = "; ".join(str(error).partition("\n")[0] for error in failures.values())
            raise PartialFailure(f"cannot read all records of job {record.id}: {causes}", hint="repair these nodes")
        for archive in archives.values():
            unpack(archive, directory)

    async def _remove(self, job: SubmittedJob) -> None:
        """Remove the records on all nodes: Slurm may not know the nodes of a cancelled job any more."""
        place, names = _directory_of(job), self._hosts_of(compute_hosts(self._context))
        async with await self._context.connections() as fleet:
            await fleet.each(names, lambda name: _records(fleet, name, _REMOVE, place))

    def _hosts_of(self, nodes: list[str]) -> list[str]:
        """The hosts that have the files of these nodes. A user reaches one, which shares their directory for jobs."""
        return nodes if self._context.joined is None else [self._context.controller.name]


def _directory_of(job: SubmittedJob) -> str:
    """The job's own directory: below the one that its script starts in."""
    start = re.search(r"^#SBATCH --chdir=(.+)$", job.script, re.MULTILINE)
    assert start is not None
    return f"{start[1]}/{job.id}"


async def _records(fleet: Connections, name: str, program: str, place: str) -> bytes:
    host = await fleet.host(name)
    result = await host.run(shell_command(program, place, RECORDS), timeout=600)
    if result.status != 0:
        raise CommandFailed(name, f"cannot read {place}/{RECORDS}: {result.error_text.strip()}")
    return result.stdout


async def _records_by_job(host: Host, record: JobRecord, node: str, place: str) -> bytes:
    """The records of a user's job that its node alone has: a short job of the user's takes them away."""
    line = short_job_command(record, node, shell_command(_TAKE_AWAY, place, RECORDS))
    try:
        result = await host.run(line, timeout=600, root=False)
    except BaseException:
        await cancel_short_job(host, line)
        raise
    if result.status != 0:
        raise CommandFailed(node, f"cannot read {place}/{RECORDS}: {result.error_text.strip()}")
    return result.stdout


_TAKE = r"""
cd "$1" 2> /dev/null || exit 0
[ -d "$2" ] || exit 0
tar -cf - --exclude=checkpoints --exclude=tracking "$2"
"""
"""Prints the records as an archive. A job that failed early has none."""

_TAKE_AWAY = f'{_TAKE.rstrip()} && rm -rf "$2"\n'

_REMOVE = r"""
cd "$1" 2> /dev/null || exit 0
[ ! -d "$2" ] || rm -rf "$2"
"""


def unpack(archive: bytes, directory: Path) -> None:
    """Extract only the records from an archive, under their own names."""
    if not archive:
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            file = tar.extractfile(member) if member.isfile() and _FILE.fullmatch(name) else None
            if file is not None:
                (directory / name).write_bytes(file.read())


def _failure_text(record: JobRecord, reason: FailureReason | None) -> str:
    if reason is None:
        return f"job {record.id}: {record.state.lower().replace('_', ' ')}"
    return f"job {record.id}: {reason.text}" + "".join(f"\n  {line}" for line in reason.details)
