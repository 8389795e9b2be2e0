"""Jobs from Python: `shoal.Job("train.py", nodes=2).submit().wait()`."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self, TypeVar

from shoal.errors import UsageError
from shoal.jobs.bundle import DEFAULT_LIMIT
from shoal.jobs.failure import FailureReason
from shoal.jobs.logs import LogLine
from shoal.jobs.model import JobSpec, job_from_options
from shoal.jobs.record import JobRecord
from shoal.verbs.context import Context, open_context
from shoal.verbs.jobs import cancel
from shoal.verbs.logs import LogsResult, logs, wait_for_job
from shoal.verbs.run import dry_run, run
from shoal.verbs.submission import SubmittedJob

T = TypeVar("T")

MIB = 1024 * 1024


class Job:
    """A script to run on a cluster. The options are those of `shoal run`, spelled with `_`."""

    def __init__(
        self,
        script: str,
        args: Sequence[str] = (),
        *,
        file: Path | str | None = None,
        cluster: str | None = None,
        tree: Path | str = ".",
        context: Context | None = None,
        max_size: int = DEFAULT_LIMIT // MIB,
        **options: Any,
    ) -> None:
        """`file` and `cluster` choose the cluster as on the command line; `tree` is the directory the script starts in,
        and `max_size` the largest working tree to send, in MiB.

        Raises SpecError with every option that is wrong.
        """
        self.spec: JobSpec = job_from_options({"script": script, "args": tuple(args), **options})
        self.id: str | None = None
        self._context = context or open_context(Path(file) if file is not None else None, cluster)
        self._tree = Path(tree).absolute()
        self._limit = max_size * MIB

    def script(self) -> str:
        """The batch script that `submit` would hand to sbatch."""
        return _result(dry_run(self._context, self.spec, self._tree, self._limit)).script

    def submit(self) -> Self:
        """Send the working tree and queue the job."""
        if self.id is not None:
            raise UsageError(f"this is job {self.id} already", hint="make another Job to run it again")
        self.submitted: SubmittedJob = _result(run(self._context, self.spec, self._tree, self._limit))
        self.id = self.submitted.id
        return self

    def wait(self) -> JobRecord:
        """Wait for the end; the record says how it ended."""
        number = self._require_single("wait")
        record = _result(wait_for_job(self._context, number))
        if record is None:
            raise UsageError(f"Slurm no longer has job {number}", hint="`shoal logs` still has what it printed")
        return record

    def logs(self, rank: int | None = None) -> list[LogLine]:
        """What the ranks have printed so far, in the order of time."""
        return [line for line in self._logs("logs").lines if rank is None or line.rank == rank]

    def reason(self) -> FailureReason | None:
        """Why it failed; None when it did not."""
        return self._logs("reason").reason

    def cancel(self) -> None:
        """End it."""
        _result(cancel(self._context, [self._number()]))

    def _logs(self, method: str) -> LogsResult:
        return _result(logs(self._context, self._require_single(method), self.spec.directory))

    def _require_single(self, method: str) -> str:
        number = self._number()
        if self.spec.array:
            raise UsageError(
                f"job {number} is an array, and {method}() is about one job",
                hint=f"`shoal jobs` shows how they are doing, `shoal logs {number}_0` what one of them printed",
            )
        return number

    def _number(self) -> str:
        if self.id is None:
            raise UsageError("the job is not submitted yet", hint="call submit() first")
        return self.id


def _result(work: Coroutine[Any, Any, T]) -> T:
    """The result of the work. A notebook runs a loop already, which must not block: a thread has its own."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()
