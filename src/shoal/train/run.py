"""Ties a training loop to its checkpoints and to Slurm: restore, save, stop together, requeue.

state = TrainState(model, optimizer, scheduler, data)
for step in Run(state, "checkpoints", save_every=500).steps(10_000):
    ...one step of training...
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path

from shoal.train.checkpoint import Checkpointer, SaveResult, TrainState
from shoal.train.contract import EXIT_REQUEUE, SHOAL_JOB_DIR, SHOAL_RUN_ID
from shoal.train.requeue import Answer, requeue
from shoal.train.stop import Stop, Stopper

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

    def steps(self, total: int) -> Iterator[int]:
        """The steps still to do, after restoring the newest whole checkpoint. The body of the loop is one step.

        Leaves by SystemExit when the job must stop, so that nothing after the loop runs: with status 0 once the job is
        requeued, with EXIT_REQUEUE where somebody else must do that, and as SIGTERM would where it was cancelled.
        """
        first = self.checkpointer.restore(self.state) or 0
        for step in range(first, total):
            yield step
            done = step + 1
            stop = self._stopper.agree(done, save_seconds=self.checkpointer.save_seconds)
            if stop is not None and done < total:
                self._leave(stop)
            if self.save_every and done % self.save_every == 0 and done < total:
                self.save(done)
        if first < total:
            self.checkpointer.save(total, self.state, reason="end", wait=True)
        self.checkpointer.close()
        self._stopper.close()

    def save(self, step: int, reason: str = "periodic") -> SaveResult:
        """Save now, besides what `save_every` does. `step` is the number of steps done."""
        return self.checkpointer.save(step, self.state, reason=reason)

    def _leave(self, stop: Stop) -> None:
        self.checkpointer.save(stop.step, self.state, reason=stop.reason, wait=True)
        self.checkpointer.close()
        raise SystemExit(_STATUS[requeue(environ=self._environ)])
