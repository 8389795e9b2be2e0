"""Runs of a proof as jobs of a cluster: sent as `shoal run` sends them, their records read back from the nodes."""

from __future__ import annotations

import asyncio
import contextlib
import io
import math
import re
import tarfile
from pathlib import Path, PurePosixPath

from shoal.errors import CommandFailed, Partly, ShoalError, UsageError
from shoal.hostlist import expand
from shoal.jobs.bundle import DEFAULT_LIMIT
from shoal.jobs.model import LAUNCHER_NAMES, JobSpec, job_root
from shoal.jobs.reason import Reason
from shoal.jobs.record import JobRecord
from shoal.plan.connections import Connections
from shoal.plan.progress import Phase
from shoal.proof.model import Asked, RunFailed, Trial
from shoal.spec.words import minutes
from shoal.verbs.cancel import cancel
from shoal.verbs.context import Context, computing
from shoal.verbs.logs import find_record, logs, wait_for_end
from shoal.verbs.run import run

CLUSTER_LAUNCHERS = tuple(name for name in LAUNCHER_NAMES if name != "python")
RECORDS = "proof"
"""The directory of the records, below the job's own."""
_FILE = re.compile(r"rank-[0-9]+\.(jsonl|end)")


class ClusterRunner:
    """Runs the script as jobs, one after the other."""

    def __init__(self, asked: Asked, context: Context, job: JobSpec, here: Path, limit: int = DEFAULT_LIMIT) -> None:
        """`job` has all that the runs have in common; the launcher and the number of processes are the proof's."""
        self._asked = asked
        self._context = context
        self._job = job
        self._here = here
        self._limit = limit
        nodes = job.nodes or 1
        if asked.processes % nodes:
            raise UsageError(
                f"{asked.processes} processes cannot be shared equally by {nodes} nodes",
                hint=f"use -n {nodes * math.ceil(asked.processes / nodes)}",
            )

    @property
    def where(self) -> str:
        return self._context.cluster

    async def run(self, trial: Trial, directory: Path, phase: Phase) -> None:
        job = self.spec(trial)
        submitting = asyncio.ensure_future(run(self._context, job, self._here, self._limit))
        try:
            # Shielded: a job may be in the queue before we know its number, and has to be cancelled then too.
            submitted = await asyncio.shield(submitting)
            phase.say(self.where, f"job {submitted.id}")
            record = await self._end_of(submitted.id)
        except asyncio.CancelledError:
            number = (await submitting).id
            await cancel(self._context, [number])
            with contextlib.suppress(ShoalError):  # the job is cancelled, whatever becomes of its records
                await self._remove(job, number)
            raise
        except UsageError as error:
            raise self._in_a_proofs_words(error) from None
        await self._fetch(job, record, directory)
        if record.failed:
            reason = (await logs(self._context, submitted.id, job.directory)).reason
            fix = reason.fix if reason else ""
            if reason and reason.kind == "time limit" and self._job.time is None:
                fix = "give it more with --timeout"
            raise RunFailed(_told(record, reason), hint=fix)

    def spec(self, trial: Trial) -> JobSpec:
        """The job of one run. It is not queued again: its records would be those of two halves."""
        nodes = self._job.nodes or 1
        one = trial.processes == 1
        # Slurm warns some time before the end, and refuses a job that would be warned before it began.
        minutes_needed = max(math.ceil(self._asked.timeout / 60), self._job.grace // 60 + 1)
        # The variables are Shoal's own, which a person may not set: not checked as theirs are.
        return self._job.model_copy(
            update={
                "launcher": trial.launcher,
                "nodes": 1 if one else nodes,
                "nodelist": None if one else self._job.nodelist,
                "ntasks_per_node": trial.processes if one else trial.processes // nodes,
                "requeue": False,
                "time": self._job.time or str(minutes_needed),
                "job_name": self._job.job_name or f"prove-{self._job.name}"[:64],
                "env": {**self._job.env, **trial.variables(self._asked, RECORDS)},
            }
        )

    def _in_a_proofs_words(self, error: UsageError) -> UsageError:
        """What `shoal run` advises, in the options that a proof has."""
        hint, processes = error.hint, self._asked.processes
        if most := re.search(r"--ntasks-per-node (\d+)", hint):
            fits = (n for n in range(1, processes + 1) if processes % n == 0 and processes // n <= int(most[1]))
            hint = hint.replace(most[0], f"-N {next(fits)}")
        if self._job.time is None:
            hint = re.sub(r"--time ([0-9:-]+)", lambda limit: f"--timeout {minutes(limit[1]) * 60:g}", hint)
        return UsageError(error.message, hint=hint)

    async def _end_of(self, number: str) -> JobRecord:
        async with await self._context.connections([self._context.controller]) as fleet:
            controller = await fleet.host(self._context.controller.name)
            record = await find_record(controller, number)
            if record is None:
                raise RunFailed(f"Slurm has forgotten job {number}", hint=f"`shoal logs {number}` may say more")
            return await wait_for_end(controller, record)

    async def _fetch(self, job: JobSpec, record: JobRecord, directory: Path) -> None:
        """Bring the records here from every node the job ran on, and take them away there: parameters are large."""
        place = self._place(job, record.id)
        async with await self._context.connections() as fleet:
            names = [name for name in expand(record.nodes) if name in fleet.targets] if record.nodes else []
            found = await fleet.each(names, lambda name: _records(fleet, name, _TAKE, place))
            # Only once all have read theirs: nodes that share storage have the same directory.
            await fleet.each(found, lambda name: _records(fleet, name, _REMOVE, place))
            failures = dict(fleet.failures)
        if failures:
            causes = "; ".join(str(error).partition("\n")[0] for error in failures.values())
            raise Partly(f"the records of job {record.id} could not all be read: {causes}", hint="repair these nodes")
        for archive in found.values():
            unpack(archive, directory)

    async def _remove(self, job: JobSpec, number: str) -> None:
        """Take the records away. Which nodes a job that is being cancelled has run on, Slurm may not say any more."""
        place = self._place(job, number)
        async with await self._context.connections() as fleet:
            await fleet.each(computing(self._context), lambda name: _records(fleet, name, _REMOVE, place))

    def _place(self, job: JobSpec, number: str) -> str:
        return f"{job_root(job, self._context.cluster)}/{number}"


async def _records(fleet: Connections, name: str, program: str, place: str) -> bytes:
    host = await fleet.host(name)
    result = await host.run(["sh", "-c", program, "sh", place, RECORDS], timeout=600)
    if result.status != 0:
        raise CommandFailed(name, f"cannot read {place}/{RECORDS}: {result.error_text.strip()}")
    return result.stdout


_TAKE = r"""
cd "$1" 2> /dev/null || exit 0
[ -d "$2" ] || exit 0
tar -cf - --exclude=checkpoints --exclude=tracking "$2"
"""
"""Prints the records as an archive. A job that failed early has none."""

_REMOVE = r"""
cd "$1" 2> /dev/null || exit 0
[ ! -d "$2" ] || rm -rf "$2"
"""


def unpack(archive: bytes, directory: Path) -> None:
    """Take the records out of an archive, and nothing else, under no other name."""
    if not archive:
        return
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for member in tar:
            name = PurePosixPath(member.name).name
            file = tar.extractfile(member) if member.isfile() and _FILE.fullmatch(name) else None
            if file is not None:
                (directory / name).write_bytes(file.read())


def _told(record: JobRecord, reason: Reason | None) -> str:
    if reason is None:
        return f"job {record.id}: {record.state.lower().replace('_', ' ')}"
    return f"job {record.id}: {reason.text}" + "".join(f"\n  {line}" for line in reason.details)
