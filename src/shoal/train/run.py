"""Ties a training loop to its checkpoints and to Slurm: restore, save, stop together, requeue.

state = TrainState(model, optimizer, scheduler, data)
for step in Run(state, "checkpoints", save_every=500).steps(10_000):
    ...one step of training...

or, where the script counts epochs and the data is a shoal.train.Loader:

run = Run(TrainState(model, optimizer, scheduler, loader), "checkpoints", save_every=500)
for epoch in run.epochs(10):
    for images, labels in run.batches():
        ...one step of training...
"""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from shoal.train import profile
from shoal.train.checkpoint import Checkpointer, SaveResult, TrainState
from shoal.train.contract import EXIT_REQUEUE, EXIT_UNSAVED, SHOAL_JOB_DIR, SHOAL_RUN_ID
from shoal.train.data import Loader
from shoal.train.errors import Leaving
from shoal.train.exit_status import fail_at_exit
from shoal.train.requeue import Answer, requeue
from shoal.train.stop import Stop, Stopper

log = logging.getLogger("shoal.train.run")

_STATUS: dict[Answer, int] = {"requeued": 0, "cancelled": 128 + signal.SIGTERM, "failed": EXIT_REQUEUE}


class Run:
    """One training run over all its requeues. Make it in the main thread, on every rank, after init()."""

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
        """`save_every` steps; 0 saves only at a stop and at the end. Without `directory`, in that of the job."""
        if not state.run_id:
            state.run_id = environ.get(SHOAL_RUN_ID, "")
        self.state = state
        place = directory or Path(environ.get(SHOAL_JOB_DIR, "."), "checkpoints")
        self.checkpointer = Checkpointer(place, keep_last=keep_last, asynchronous=asynchronous)
        self.save_every = save_every
        self._stopper = stopper or Stopper(environ=environ)
        self._environ = environ
        self._done = 0
        self._first = 0

    def steps(self, total: int) -> Iterator[int]:
        """The steps still to do, after restoring the newest whole checkpoint. The body of the loop is one step.

        Leaves by SystemExit when the job must stop, so that nothing after the loop runs: with status 0 once the job is
        requeued, with EXIT_REQUEUE where somebody else must do that, as SIGTERM would where it was cancelled, and with
        EXIT_UNSAVED where nothing of this turn could be saved. Where the end cannot be saved, what follows the loop
        runs all the same, and rank 0 leaves with EXIT_UNSAVED after it.
        """
        first = self._begin()
        for step in range(first, total):
            yield step
            self._after(step + 1, last=step + 1 == total)
        self._end(max(first, total), trained=first < total)

    def epochs(self, total: int) -> Iterator[int]:
        """The epochs still to do, for a loop over them with one over `batches()` inside. `state.data` is a Loader.

        Saves and leaves as `steps` does, also within an epoch. What the script does after the inner loop belongs to the
        epoch: it has been done when a checkpoint says that the next one begins.
        """
        loader = self._loader()
        first = self._done = self._begin()
        for epoch in range(loader.epoch, total):
            yield epoch
            loader.set_epoch(epoch + 1)  # where the inner loop was left early
            if self._done > first:
                self._after(self._done, last=epoch + 1 == total)
        self._end(self._done, trained=self._done > first)

    def batches(self) -> Iterator[Any]:
        """The batches still to do of this epoch. The body of the loop is one step."""
        loader = self._loader()
        for batch in loader:
            yield batch
            self._done += 1
            if loader.left:
                self._after(self._done, last=False)

    def _loader(self) -> Loader:
        if not isinstance(self.state.data, Loader):
            raise TypeError(f"a run over epochs needs a shoal.train.Loader as TrainState.data, not {self.state.data!r}")
        return self.state.data

    def _begin(self) -> int:
        """The step to begin with: that of the newest whole checkpoint, or 0."""
        self.checkpointer.claim(self._environ)
        self._first = self.checkpointer.restore(self.state) or 0
        return self._first

    def _after(self, done: int, *, last: bool) -> None:
        """A step is over: leave if the job must stop, save if it is time to."""
        profile.step("run", self._environ)
        stop = self._stopper.agree(done, save_seconds=self.checkpointer.save_seconds)
        if stop is not None and not last:
            self._leave(stop)
        if self.save_every and done % self.save_every == 0 and not last:
            self.save(done)

    def _end(self, done: int, *, trained: bool) -> None:
        saved = self.checkpointer.save(done, self.state, reason="end", wait=True) if trained else None
        if saved is not None and not saved.committed:
            self._tell(
                logging.ERROR,
                "training is done, and its last state is in no checkpoint (the newest is of step %d): solve that and "
                "run it again with %s, or save the state after the loop by other means. The script goes on, and ends "
                "with status %d",
                *(max(self.checkpointer.newest, self._first), self.checkpointer.directory, EXIT_UNSAVED),
            )
            if self.checkpointer.rank == 0:  # alone: srun and torchrun end all others when one fails
                fail_at_exit(EXIT_UNSAVED)
        if not trained and self._first:
            place = self.checkpointer.directory
            self._tell(logging.WARNING, "nothing is left to train; to start over, move %s away", place)
        self.checkpointer.close()
        self._stopper.close()

    def save(self, step: int, reason: str = "periodic") -> SaveResult:
        """Save now, besides what `save_every` does. `step` is the number of steps done."""
        return self.checkpointer.save(step, self.state, reason=reason)

    def _leave(self, stop: Stop) -> None:
        saved = self.checkpointer.save(stop.step, self.state, reason=stop.reason, wait=True)
        self.checkpointer.close()
        if not saved.committed and self.checkpointer.newest <= self._first:
            # The next turn would begin where this one did, and end as it does, for ever.
            self._tell(
                logging.ERROR,
                "nothing of this turn could be saved (%s): the job is not requeued. Solve that and run it again with "
                "%s: it goes on from step %d",
                *(saved.error, self.checkpointer.directory, self._first),
            )
            raise Leaving(EXIT_UNSAVED, comes_back=False)
        answer = requeue(environ=self._environ)
        raise Leaving(_STATUS[answer], comes_back=answer != "cancelled")

    def _tell(self, level: int, words: str, *values: object) -> None:
        if self.checkpointer.rank == 0:  # what all ranks would say is said once
            log.log(level, words, *values)
