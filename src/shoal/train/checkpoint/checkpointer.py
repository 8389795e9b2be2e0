"""Saves and restores a run, all ranks together.

Every method that reads or writes is collective: call it on all ranks, in the same order.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException

from shoal.train.checkpoint import files
from shoal.train.checkpoint.claim import Claim, Writer, refusal
from shoal.train.checkpoint.files import Manifest
from shoal.train.checkpoint.outcome import PROBLEMS, SaveResult, cause, first_line
from shoal.train.checkpoint.state import TrainState, blank, capture, put_back
from shoal.train.checkpoint.writer import CommittingWriter
from shoal.train.errors import CheckpointError
from shoal.train.proof import recorder
from shoal.train.ranks import Ranks

log = logging.getLogger("shoal.train.checkpoint")


class Checkpointer:
    """Keeps the last checkpoints of a run in one directory that all ranks share.

    A save that fails never raises: it is logged as an error, counted in `failures` and told by the result.
    Training goes on.
    """

    def __init__(self, directory: str | Path, *, keep_last: int = 3, asynchronous: bool = False) -> None:
        """With `asynchronous`, `save` returns once the state is copied to memory, and a thread writes it."""
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least one checkpoint is kept")
        proof = recorder()  # None unless `shoal prove` runs the script, which begins from no checkpoint and leaves none
        self.directory = Path(proof.scratch if proof else directory).absolute()
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.failures = 0
        """Saves that failed since the start of this process."""
        self.last: SaveResult | None = None
        """The newest save that has ended."""
        self.newest = 0
        """The newest step that this process has saved whole; 0 before the first."""
        self._claim: Claim | None = None
        self._ranks = Ranks()
        self.rank = self._ranks.rank
        """This process's. Rank 0 speaks for all: each has the same to say."""
        self._damaged: set[Path] = set()
        self._durations: deque[float] = deque(maxlen=3)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[SaveResult] | None = None
        self._stager: StateDictStager | None = None
        # One process alone is a normal way to run; torch warns of it at every save.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    @property
    def save_seconds(self) -> float:
        """How long the next save may take: the longest of the last three. 0 before the first."""
        return max(self._durations, default=0.0)

    def save(self, step: int, state: TrainState, *, reason: str = "periodic", wait: bool = False) -> SaveResult:
        """Save the state after `step` steps. Asynchronous unless `wait`; waits for a save that is still under way."""
        began = time.monotonic()
        previous = self.wait()
        if previous is not None and previous.committed and previous.step == step:
            return previous
        background = self.asynchronous and not wait
        flat: dict[str, Any] = {}
        error = ""
        try:
            if self._claim is not None and self._claim.lost_to is not None:
                raise CheckpointError(f"{self._claim.lost_to} writes to {self.directory} now")
            flat = capture(state, self.rank)
            if background:
                flat = self._copy(flat)
        except Exception as problem:  # whatever it is, the other ranks must hear of it or they wait for ever
            error = f"rank {self.rank}: {first_line(problem)}"
        errors, (nonce, *_) = zip(*self._ranks.gather((error, secrets.token_hex(4))), strict=True)
        error = "; ".join(filter(None, errors))
        if error:
            return self._ended(SaveResult(step, "failed", reason, error=error))
        manifest = Manifest(step, self._ranks.world_size, state.run_id, reason, ())
        stall = time.monotonic() - began
        if background:
            self._thread = self._thread or ThreadPoolExecutor(1, "shoal-checkpoint")
            self._pending = self._thread.submit(self._write, flat, manifest, nonce, began, stall)
            return SaveResult(step, "pending", reason, stall_seconds=stall)
        return self._ended(self._write(flat, manifest, nonce, began, None))

    def done(self) -> bool:
        """Whether no save is under way on this rank. The only method that is not collective."""
        return self._pending is None or self._pending.done()

    def wait(self) -> SaveResult | None:
        """Wait for the save that is under way. The newest save that has ended, if any has."""
        if self._pending is not None:
            began = time.monotonic()
            result, self._pending = self._pending.result(), None
            if (waited := time.monotonic() - began) > 1:
                log.warning("training stood still for %.1f s: the save of step %d had not ended", waited, result.step)
            self._ended(result)
        return self.last

    def close(self) -> None:
        """Wait for the save that is under way, end the thread, and let another job write into the directory."""
        self.wait()
        if self._claim is not None:
            self._claim.release()
            self._claim = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        if self._stager is not None:
            self._stager.close()
            self._stager = None

    def claim(self, environ: Mapping[str, str] = os.environ) -> None:
        """Let no other job write into the directory, and delete what attempts that died left there.

        CheckpointError where another job writes there now. Not needed to `restore` alone, as an evaluation does.
        """
        other: Writer | None = None
        with self._together():
            if self.rank == 0:
                self._claim = Claim(self.directory, Writer.here(environ))
                other = self._claim.take()
        if (other := self._ranks.from_rank_zero(other)) is not None:
            raise refusal(self.directory, other)
        with self._together():
            self._clean()

    def latest(self) -> Path | None:
        """The newest checkpoint that is whole, verified byte by byte; each rank reads its share of the files.

        Damaged ones are logged as errors and passed over. CheckpointError where there are checkpoints and none is
        whole: to start from nothing in silence would throw the run away.
        """
        self.wait()
        seen: list[Path] = []
        with self._together():
            seen = files.committed(self.directory) if self.rank == 0 else []
        candidates = self._ranks.from_rank_zero(seen)
        for checkpoint in candidates:
            found = self._damage(checkpoint)
            if not found:
                return checkpoint
            if self.rank == 0:
                log.error("%s is damaged and will not be used: %s", checkpoint, found)
            self._damaged.add(checkpoint)
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints in {self.directory} is whole",
                found=f"the newest: {self._damage(candidates[0])}",
                fix="bring the files back, or move the directory away to start from step 0",
            )
        return None

    def restore(self, state: TrainState) -> int | None:
        """Put the newest whole checkpoint into the objects of `state`. Its step, or None where there is none.

        CheckpointError where it is of another model or does not hold what `state` asks for.
        """
        checkpoint = self.latest()
        if checkpoint is None:
            return None
        rank, world_size, saved_by = self.rank, self._ranks.world_size, 0
        reader = dcp.FileSystemReader(checkpoint)
        flat: dict[str, Any] = {}
        with self._together():
            saved_by = files.read_manifest(checkpoint).world_size
            flat = blank(state, reader.read_metadata(), rank, world_size, saved_by)
        with torch.no_grad(), self._together():
            dcp.load(flat, storage_reader=reader, process_group=self._ranks.group)
        with self._together():
            put_back(state, flat, rank, world_size, saved_by)
        step = files.step_of(checkpoint)
        self.last = SaveResult(step, "committed", "restored", checkpoint)
        if rank == 0:
            # A warning: where a script sets up no logging, nothing less is shown, and this must be.
            ranks = "1 rank" if saved_by == 1 else f"{saved_by} ranks"
            log.warning("going on from step %d: %s, written by %s", step, checkpoint, ranks)
        return step

    def _copy(self, flat: dict[str, Any]) -> dict[str, Any]:
        """The state in memory that training does not touch. The memory is kept for the next save."""
        pinned = torch.cuda.is_available()
        if self._stager is None:
            # Not torch's DefaultStager around it, which up to torch 2.11 cannot be used twice.
            self._stager = StateDictStager(pin_memory=pinned)
        copied: dict[str, Any] = self._stager.stage(flat, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        return copied

    def _write(
        self, flat: Mapping[str, Any], manifest: Manifest, nonce: str, began: float, stall: float | None
    ) -> SaveResult:
        """Write and commit. Runs in the thread for an asynchronous save, so no collective but on our own group."""
        writing = self.directory / f"step-{manifest.step}.tmp-{nonce}"
        error, path = "", None
        try:
            writer = CommittingWriter(writing, manifest)
            dcp.save(dict(flat), storage_writer=writer, process_group=self._ranks.group)
            path = self._ranks.from_rank_zero(writer.committed_to)
        except PROBLEMS as problem:  # a save must never end the training; dcp raises the same on every rank
            error = cause(problem)
        if self.rank == 0:
            if path is None:
                shutil.rmtree(writing, ignore_errors=True)
            else:
                self._delete_older(path, nonce)
        seconds = time.monotonic() - began
        return SaveResult(
            manifest.step,
            "failed" if error else "committed",
            manifest.reason,
            path,
            error,
            seconds if stall is None else stall,
            seconds,
        )

    def _ended(self, result: SaveResult) -> SaveResult:
        if result.outcome == "failed":
            self.failures += 1
            if self.rank == 0:
                log.error(
                    "the checkpoint of step %d (%s) FAILED%s: %s (failure %d of this process)",
                    result.step,
                    result.reason,
                    ", training goes on without it" if result.reason == "periodic" else "",
                    result.error,
                    self.failures,
                )
        else:
            self.newest = max(self.newest, result.step)
            self._durations.append(result.seconds)
            if self.rank == 0:
                log.info(
                    "step %d saved in %.2f s (%s, training stood still for %.2f s): %s",
                    result.step,
                    result.seconds,
                    result.reason,
                    result.stall_seconds,
                    result.path,
                )
        self.last = result
        return result

    def _damage(self, checkpoint: Path) -> str:
        """What any rank finds wrong with a checkpoint. Each reads its share of the files."""
        try:
            manifest = files.read_manifest(checkpoint)
            if manifest.step != files.step_of(checkpoint):
                found = f"its manifest is that of step {manifest.step}"
            else:
                found = files.damage(checkpoint, manifest.files[self.rank :: self._ranks.world_size])
        except (OSError, ValueError) as error:
            found = f"{files.MANIFEST}: {error}"
        return next(filter(None, self._ranks.gather(found)), "")

    def _delete_older(self, just: Path, nonce: str) -> None:
        """Delete what is beyond keep_last, now that a newer one is there. Damaged ones do not count."""
        whole = [path for path in files.committed(self.directory) if path not in self._damaged]
        kept = {just, *whole[: self.keep_last]}
        for checkpoint in files.committed(self.directory):
            if checkpoint in kept:
                continue
            try:
                files.delete(checkpoint, nonce)
                self._damaged.discard(checkpoint)
            except OSError as error:
                log.error("%s is no longer needed and cannot be deleted: %s", checkpoint, error)

    def _clean(self) -> None:
        """Delete what attempts that died left behind. Only when the directory has become ours: later, some of it is."""
        if self.rank != 0:
            return
        for leftover in files.leftovers(self.directory):
            log.warning("deleting %s, which an earlier attempt did not finish", leftover)
            shutil.rmtree(leftover, ignore_errors=True)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Where one rank fails to read, all of them fail: none is left waiting."""
        problem: BaseException | None = None
        try:
            yield
        except PROBLEMS as error:
            problem = error
        texts = self._ranks.gather("" if problem is None else first_line(problem))
        if isinstance(problem, CheckpointException):
            raise CheckpointError("the checkpoint cannot be loaded", found=cause(problem)) from problem
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise CheckpointError(f"rank {rank} cannot load the checkpoint", found=text)
