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
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException

from shoal.train.checkpoint import layout as files
from shoal.train.checkpoint.claim import Claim, ClaimOwner, directory_in_use
from shoal.train.checkpoint.layout import Manifest
from shoal.train.checkpoint.reader import SafePlanner, SafeReader, map_load_failure
from shoal.train.checkpoint.state import TrainState, allocate_state, apply_state, capture_state
from shoal.train.checkpoint.writer import SAVE_ERRORS, CommittingWriter, SaveResult, describe_failure, first_line
from shoal.train.dist import RankGroup
from shoal.train.errors import CheckpointError
from shoal.train.proof_record import proof_recorder

log = logging.getLogger("shoal.train.checkpoint")


class Checkpointer:
    """Keeps the last checkpoints of a run in one directory that all ranks share.

    A failed save never raises: it is logged as an error, counted in `failures` and returned as the result.
    Training continues.
    """

    def __init__(self, directory: str | Path, *, keep_last: int = 3, asynchronous: bool = False) -> None:
        """With `asynchronous`, `save` returns once the state is copied to memory, and a thread writes it."""
        if keep_last < 1:
            raise ValueError(f"keep_last is {keep_last}; at least one checkpoint is kept")
        if proof := proof_recorder():  # `shoal prove` runs the script: it does not use the checkpoints of the real run
            directory = proof.directory / "checkpoints"
        self.directory = Path(directory).absolute()
        self.keep_last = keep_last
        self.asynchronous = asynchronous
        self.failures = 0
        """Saves that failed since the start of this process."""
        self.last: SaveResult | None = None
        """The newest save that has ended."""
        self.newest = 0
        """The newest step that this process has saved; 0 before the first."""
        self._claim: Claim | None = None
        self._ranks = RankGroup()
        self.rank = self._ranks.rank
        """This process's. Only rank 0 logs."""
        self._damaged: set[Path] = set()
        self._durations: deque[float] = deque(maxlen=3)
        self._thread: ThreadPoolExecutor | None = None
        self._pending: Future[SaveResult] | None = None
        self._stager: StateDictStager | None = None
        # A single process is a normal case; torch warns of it at every save.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")

    @property
    def save_seconds(self) -> float:
        """How long the next save may take: the maximum of the last three. 0 before the first."""
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
            if self._claim is not None and self._claim.new_owner is not None:
                raise CheckpointError(f"{self._claim.new_owner} writes to {self.directory} now")
            flat = capture_state(state, self.rank)
            if background:
                flat = self._copy(flat)
        except Exception as problem:  # any error must reach the other ranks, or they wait forever
            error = f"rank {self.rank}: {first_line(problem)}"
        errors, (nonce, *_) = zip(*self._ranks.gather((error, secrets.token_hex(4))), strict=True)
        error = "; ".join(filter(None, errors))
        if error:
            return self._record_result(SaveResult(step, "failed", reason, error=error))
        manifest = Manifest(step, self._ranks.world_size, state.run_id, reason, ())
        stall = time.monotonic() - began
        if background:
            self._thread = self._thread or ThreadPoolExecutor(1, "shoal-checkpoint")
            self._pending = self._thread.submit(self._write, flat, manifest, nonce, began, stall)
            return SaveResult(step, "pending", reason, stall_seconds=stall)
        return self._record_result(self._write(flat, manifest, nonce, began, None))

    def done(self) -> bool:
        """Whether no save is in progress on this rank. The only method that is not collective."""
        return self._pending is None or self._pending.done()

    def wait(self) -> SaveResult | None:
        """Wait for the save in progress. Returns the newest completed save, if any."""
        if self._pending is not None:
            began = time.monotonic()
            result, self._pending = self._pending.result(), None
            if (wait_seconds := time.monotonic() - began) > 1:
                log.warning("training waited %.1f s for the save of step %d", wait_seconds, result.step)
            self._record_result(result)
        return self.last

    def close(self) -> None:
        """Wait for the save in progress, end the thread, and release the directory for other jobs."""
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
        """Keep other jobs from writing into the directory, and delete leftovers of failed saves.

        CheckpointError if another job writes there now. Not needed for `restore` alone, as in an evaluation.
        """
        other: ClaimOwner | None = None
        with self._fail_together():
            if self.rank == 0:
                self._claim = Claim(self.directory, ClaimOwner.here(environ))
                other = self._claim.take()
        if (other := self._ranks.broadcast(other)) is not None:
            raise directory_in_use(self.directory, other)
        with self._fail_together():
            # Only now: later they may be those of a save in progress.
            for leftover in files.list_leftovers(self.directory) if self.rank == 0 else ():
                log.warning("deleting %s, which an earlier attempt did not finish", leftover)
                shutil.rmtree(leftover, ignore_errors=True)

    def latest(self) -> Path | None:
        """The newest complete checkpoint, verified byte by byte; each rank reads its share of the files.

        Damaged ones are logged as errors and skipped. CheckpointError if all are damaged: starting over silently would
        lose the run.
        """
        self.wait()
        candidates: list[Path] = []
        with self._fail_together():
            candidates = files.committed(self.directory) if self.rank == 0 else []
        candidates = self._ranks.broadcast(candidates)
        for checkpoint in candidates:
            damage = self._find_damage(checkpoint)
            if not damage:
                return checkpoint
            if self.rank == 0:
                log.error("%s is damaged and will not be used: %s", checkpoint, damage)
            self._damaged.add(checkpoint)
        if candidates:
            raise CheckpointError(
                f"none of the {len(candidates)} checkpoints in {self.directory} is whole",
                found=f"the newest: {self._find_damage(candidates[0])}",
                fix="bring the files back, or move the directory away to start from step 0",
            )
        return None

    def restore(self, state: TrainState) -> int | None:
        """Load the newest complete checkpoint into the objects of `state`. Returns its step; None if there is none.

        CheckpointError if it is of another model or lacks a part of `state`.
        """
        checkpoint = self.latest()
        if checkpoint is None:
            return None
        rank, world_size, saved_by = self.rank, self._ranks.world_size, 0
        flat: dict[str, Any] = {}
        with self._fail_together():
            manifest = files.read_manifest(checkpoint)
            saved_by, reader = manifest.world_size, SafeReader(checkpoint, manifest)
            flat = allocate_state(state, reader.read_metadata(), rank, world_size, saved_by)
        with torch.no_grad(), self._fail_together():
            dcp.load(flat, storage_reader=reader, planner=SafePlanner(), process_group=self._ranks.group)
        with self._fail_together():
            apply_state(state, flat, rank, world_size, saved_by)
        step = files.step_of(checkpoint)
        self.last = SaveResult(step, "committed", "restored", checkpoint)
        if rank == 0:
            # A warning, so that it is shown without any logging setup.
            ranks = "1 rank" if saved_by == 1 else f"{saved_by} ranks"
            log.warning("going on from step %d: %s, written by %s", step, checkpoint, ranks)
        return step

    def _copy(self, flat: dict[str, Any]) -> dict[str, Any]:
        """A copy of the state that training does not change. Its memory is reused for the next save."""
        pinned = torch.cuda.is_available()
        if self._stager is None:
            # Not torch's DefaultStager, which up to torch 2.11 cannot be used twice.
            self._stager = StateDictStager(pin_memory=pinned)
        copied: dict[str, Any] = self._stager.stage(flat, non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize()
        return copied

    def _write(
        self, flat: Mapping[str, Any], manifest: Manifest, nonce: str, began: float, stall: float | None
    ) -> SaveResult:
        """Write and commit. May run in a thread, so collectives only on the own group."""
        writing = self.directory / f"step-{manifest.step}.tmp-{nonce}"
        error, path = "", None
        try:
            writer = CommittingWriter(writing, manifest)
            dcp.save(dict(flat), storage_writer=writer, process_group=self._ranks.group)
            path = self._ranks.broadcast(writer.committed_to)
        except SAVE_ERRORS as problem:  # a failed save must not end training; dcp raises the same on every rank
            error = describe_failure(problem)
        if self.rank == 0:
            if path is None:
                shutil.rmtree(writing, ignore_errors=True)
            else:
                self._delete_older(path, nonce)
        seconds = time.monotonic() - began
        stall = seconds if stall is None else stall
        outcome: Literal["failed", "committed"] = "failed" if error else "committed"
        return SaveResult(manifest.step, outcome, manifest.reason, path, error, stall, seconds)

    def _record_result(self, result: SaveResult) -> SaveResult:
        if result.outcome == "failed":
            self.failures += 1
            consequence = ", training goes on without it" if result.reason == "periodic" else ""
            failure = f"{result.error} (failure {self.failures} of this process)"
            text = f"the checkpoint of step {result.step} ({result.reason}) FAILED{consequence}: {failure}"
        else:
            self.newest = max(self.newest, result.step)
            self._durations.append(result.seconds)
            stall = f"training stood still for {result.stall_seconds:.2f} s"
            text = f"step {result.step} saved in {result.seconds:.2f} s ({result.reason}, {stall}): {result.path}"
        if self.rank == 0:
            log.log(logging.ERROR if result.outcome == "failed" else logging.INFO, "%s", text)
        self.last = result
        return result

    def _find_damage(self, checkpoint: Path) -> str:
        """The first damage that any rank finds in a checkpoint. Each reads its share of the files."""
        try:
            manifest = files.read_manifest(checkpoint)
            if manifest.step != files.step_of(checkpoint):
                damage = f"its manifest is that of step {manifest.step}"
            else:
                damage = files.find_damage(checkpoint, manifest.files[self.rank :: self._ranks.world_size])
        except (OSError, ValueError) as error:
            damage = f"{files.MANIFEST}: {error}"
        return next(filter(None, self._ranks.gather(damage)), "")

    def _delete_older(self, just: Path, nonce: str) -> None:
        """Delete all but the last keep_last checkpoints. Damaged ones do not count."""
        committed = files.committed(self.directory)
        undamaged = [path for path in committed if path not in self._damaged]
        for checkpoint in sorted(set(committed) - {just, *undamaged[: self.keep_last]}):
            try:
                files.delete(checkpoint, nonce)
                self._damaged.discard(checkpoint)
            except OSError as error:
                log.error("cannot delete the old checkpoint %s: %s", checkpoint, error)

    @contextmanager
    def _fail_together(self) -> Iterator[None]:
        """If one rank raises, all ranks raise: none is left waiting."""
        problem: BaseException | None = None
        try:
            yield
        except SAVE_ERRORS as error:
            problem = error
        texts = self._ranks.gather("" if problem is None else first_line(problem))
        if isinstance(problem, CheckpointException):
            raise map_load_failure(problem) from problem
        if problem is not None:
            raise problem
        for rank, text in enumerate(texts):
            if text:
                raise CheckpointError(f"rank {rank} cannot load the checkpoint", found=text)
