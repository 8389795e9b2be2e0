"""Connects a training loop with its checkpoints and Slurm: restore, save, stop on all ranks, requeue.

    for step in Run(TrainState(model, optimizer, scheduler, data), "checkpoints", save_every=500).steps(10_000):
        ...one step of training...

Preemption (PreemptMode=REQUEUE) and the loss of a node requeue a job by themselves. A job that reaches its time limit,
or gets --signal, must request it.
"""

from __future__ import annotations

import atexit
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from shoal.contract import EXIT_REQUEUE, EXIT_UNSAVED, SHOAL_JOB_DIR, SHOAL_RUN_ID
from shoal.train import profile
from shoal.train.checkpoint import Checkpointer, SaveResult, TrainState
from shoal.train.data import Loader
from shoal.train.dist import RankGroup
from shoal.train.env import requeue_job_id
from shoal.train.errors import StopExit
from shoal.train.rank_record import end_record, open_record, record_step
from shoal.train.stop import Stop, Stopper

log = logging.getLogger("shoal.train.run")

RequeueOutcome = Literal["requeued", "cancelled", "failed"]

_STATUS: dict[RequeueOutcome, int] = {"requeued": 0, "cancelled": 128 + signal.SIGTERM, "failed": EXIT_REQUEUE}


class Run:
    """One training run over all its requeues. Create it in the main thread, on every rank, after init()."""

    def __init__(
        self,
        state: TrainState,
        directory: str | Path | None = None,
        *,
        save_every: int = 0,
        keep_last: int = 3,
        asynchronous: bool = False,
        stopper: Stopper | None = None,
        environ: Mapping[str, str] = os.environ,
    ) -> None:
        """`save_every` steps; 0 saves only at a stop and at the end. The default directory is that of the job."""
        if not state.run_id:
            state.run_id = environ.get(SHOAL_RUN_ID, "")
        self.state = state
        location = directory or Path(environ.get(SHOAL_JOB_DIR, "."), "checkpoints")
        self.checkpointer = Checkpointer(location, keep_last=keep_last, asynchronous=asynchronous)
        self.save_every = save_every
        self._stopper = stopper or Stopper(environ=environ)
        self._environ = environ
        open_record(environ)
        self._done = 0
        self._first = 0

    def steps(self, total: int) -> Iterator[int]:
        """The remaining steps, after restoring the newest complete checkpoint. The body of the loop is one step.

        Raises SystemExit when the job must stop, so that nothing after the loop runs: with status 0 if the job is
        requeued, EXIT_REQUEUE if the batch script must do that, that of SIGTERM if the job was cancelled, and
        EXIT_UNSAVED if nothing could be saved since the start. If the final save fails, the code after the loop still
        runs, and rank 0 then exits with EXIT_UNSAVED.
        """
        first = self._restore()
        for step in range(first, total):
            yield step
            self._after_step(step + 1, last=step + 1 == total)
        self._finish(max(first, total), trained=first < total)

    def epochs(self, total: int) -> Iterator[int]:
        """The remaining epochs, for a loop with one over `batches()` inside. `state.data` is a Loader.

        Saves and stops as `steps` does, also within an epoch. Code after the inner loop belongs to the epoch: it has
        run when a checkpoint is at the start of the next one.
        """
        loader = self._loader()
        first = self._done = self._restore()
        for epoch in range(loader.epoch, total):
            yield epoch
            loader.set_epoch(epoch + 1)  # if the inner loop was left early
            if self._done > first:
                self._after_step(self._done, last=epoch + 1 == total)
        self._finish(self._done, trained=self._done > first)

    def batches(self) -> Iterator[Any]:
        """The remaining batches of this epoch. The body of the loop is one step."""
        loader = self._loader()
        for batch in loader:
            yield batch
            self._done += 1
            if loader.remaining:
                self._after_step(self._done, last=False)

    def _loader(self) -> Loader:
        if not isinstance(self.state.data, Loader):
            raise TypeError(f"a run over epochs needs a shoal.train.Loader as TrainState.data, not {self.state.data!r}")
        return self.state.data

    def _restore(self) -> int:
        """The first step: that of the newest complete checkpoint, or 0."""
        self.checkpointer.claim(self._environ)
        self._first = self.checkpointer.restore(self.state) or 0
        return self._first

    def _after_step(self, step: int, *, last: bool) -> None:
        """After a step: stop if the job must, save if it is due."""
        profile.step("run", self._environ)
        record_step("run", step, self._environ)
        stop = self._stopper.agree(step, save_seconds=self.checkpointer.save_seconds)
        if stop is not None and not last:
            self._save_and_exit(stop)
        if self.save_every and step % self.save_every == 0 and not last:
            self.save(step)

    def _finish(self, step: int, *, trained: bool) -> None:
        end_record()
        saved = self.checkpointer.save(step, self.state, reason="end", wait=True) if trained else None
        if saved is not None and not saved.committed:
            self._log(
                logging.ERROR,
                "training is complete, but its final state could not be saved (the newest checkpoint is step %d): fix "
                "the cause and run it again with %s, or save the state after the loop by other means. The script "
                "continues, and exits with status %d",
                *(max(self.checkpointer.newest, self._first), self.checkpointer.directory, EXIT_UNSAVED),
            )
            if self.checkpointer.rank == 0:  # only rank 0: srun and torchrun end all ranks when one fails
                fail_at_exit(EXIT_UNSAVED)
        if not trained and self._first:
            location = self.checkpointer.directory
            self._log(logging.WARNING, "training is already complete; to start over, move %s away", location)
        self.checkpointer.close()
        self._stopper.close()

    def save(self, step: int, reason: str = "periodic") -> SaveResult:
        """Save now, in addition to `save_every`. `step` is the number of completed steps."""
        return self.checkpointer.save(step, self.state, reason=reason)

    def _save_and_exit(self, stop: Stop) -> None:
        saved = self.checkpointer.save(stop.step, self.state, reason=stop.reason, wait=True)
        self.checkpointer.close()
        if not saved.committed and self.checkpointer.newest <= self._first:
            # A requeued job would start from the same step and fail in the same way, forever.
            self._log(
                logging.ERROR,
                "nothing could be saved since the start of this process (%s): the job is not requeued. Fix the cause "
                "and run it again with %s: it continues from step %d",
                *(saved.error, self.checkpointer.directory, self._first),
            )
            raise StopExit(EXIT_UNSAVED, requeued=False)
        outcome = requeue(environ=self._environ)
        raise StopExit(_STATUS[outcome], requeued=outcome != "cancelled")

    def _log(self, level: int, message: str, *values: object) -> None:
        if self.checkpointer.rank == 0:  # once, not on every rank
            log.log(level, message, *values)


SCONTROL_TIMEOUT_S = 20.0
"""slurmctld may be busy."""


def requeue(ranks: RankGroup | None = None, *, environ: Mapping[str, str] = os.environ) -> RequeueOutcome:
    """Requeue this job: rank 0 calls scontrol, all ranks get the outcome. Collective.

    "failed": exit with EXIT_REQUEUE, and the batch script requeues the job. "cancelled": a user ended the job, which
    must not be requeued.
    """
    group = ranks or RankGroup()
    return group.broadcast(_request_requeue(environ) if group.rank == 0 else "failed")


def _request_requeue(environ: Mapping[str, str]) -> RequeueOutcome:
    job = requeue_job_id(environ)
    if not job:
        return "failed"
    scontrol = shutil.which("scontrol", path=environ.get("PATH"))
    if scontrol is None:
        log.warning("cannot requeue job %s from here: no scontrol on this node or in this container", job)
        return "failed"
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": SCONTROL_TIMEOUT_S}
    try:
        job_query = subprocess.run([scontrol, "show", "job", job], **options)
        fields = dict(re.findall(r"\b(JobState|Reason|Restarts)=(\S+)", job_query.stdout))
        # Its grace time is over, or a user did it.
        if int(fields.get("Restarts", 0)) > int(environ.get("SLURM_RESTART_COUNT") or 0):
            log.warning("job %s is already requeued", job)
            return "requeued"
        if _is_cancelled(fields.get("JobState", ""), fields.get("Reason", "")):
            log.warning("job %s was cancelled and is not requeued", job)
            return "cancelled"
        # Slurm ends the processes of a requeued job at once, scontrol included: it ignores SIGTERM.
        requeue_result = subprocess.run(
            ["sh", "-c", 'trap "" TERM; exec "$0" "$@"', scontrol, "requeue", job], **options
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.error("cannot requeue job %s: %s", job, error)
        return "failed"
    if requeue_result.returncode != 0:
        log.error(
            "cannot requeue job %s: %s",
            job,
            requeue_result.stderr.strip() or f"exit status {requeue_result.returncode}",
        )
        return "failed"
    log.warning("job %s requeued", job)
    return "requeued"


def _is_cancelled(state: str, reason: str) -> bool:
    """Whether a user cancelled the job.

    While its processes run, Slurm shows it as COMPLETING, like a job at its time limit; only the latter has a reason.
    """
    return state.startswith("CANCELLED") or (state == "COMPLETING" and reason not in ("TimeLimit", "Preempted"))


def fail_at_exit(status: int) -> None:
    """Let this process exit with `status`, unless its script raises an exception."""
    atexit.register(_exit_with, status)


def _exit_with(status: int) -> None:
    atexit.unregister(_exit_with)
    if hasattr(sys, "last_type"):  # the script ended by an exception
        return
    # os._exit is the only way to change the status this late; run the other handlers first.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
