"""Records what one process of a proof does, for `shoal prove` to compare: losses, samples, gradients, parameters.

`proof_recorder()` is None unless `shoal prove` runs the script. Each rank writes its own files, so that no rank waits
for one that takes fewer steps, a mistake that a proof must find. It writes to the proof's directory

    rank-R.jsonl     one line per event
    rank-R.end       its part of the parameters after the last step, one after the other, in the proof's precision;
                     of those that every rank has whole, only rank 0 keeps more than the digest

The lines, by `kind`:

    start   rank, world_size
    model   parallel, batch_norm, dropout: how it is spread, and the layers whose result depends on how it is
    step    one step of the optimizer: its number, lr, gradients (squares summed: of whole tensors, of shards), samples,
            batches: how often the model was called for it
    random  state: a digest of the generators of random numbers before the first call of the model
    order   sampler: a DistributedSampler shuffles every epoch alike
    loss    source, step, loss, samples: what the script said, and how many samples it had seen since the last one
    begins  the parameters of rank 0 before the first step: for each its name and digest
    ends    those of this rank after the last one: type, and for each its name, digest, sharded, bytes in rank-R.end

Numbers that are compared are written as `float.hex` does, which loses no bit.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shoal import contract
from shoal.train.env import read_env


def detach(value: Any) -> Any:
    """A tensor without its gradient graph: scripts often report the loss before `backward()`.

    torch warns when such a tensor becomes a number, and a reference to it keeps the whole graph in memory.
    """
    detach = getattr(value, "detach", None)
    return detach() if callable(detach) else value


TYPES = {"float64": "d", "float32": "f"}
"""The type codes of struct and array for each precision."""

LOSS_NAMES = ("loss", "train_loss", "train/loss")
"""Names of the metric that is the loss."""


@dataclass(frozen=True)
class ParameterPart:
    """One rank's part of a parameter."""

    name: str
    sharded: bool
    """The parts of all ranks, one after the other, are the parameter; otherwise each rank has all of it."""
    values: bytes
    """Its elements, in the proof's precision."""

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.values, digest_size=16).hexdigest()


_recorders: dict[Path, ProofRecorder] = {}


def proof_recorder(environ: Mapping[str, str] = os.environ) -> ProofRecorder | None:
    """The recorder of this process, the same at every call; None if this is not a proof."""
    if not environ.get(contract.SHOAL_PROOF_DIR):
        return None
    directory = Path(environ.get(contract.SHOAL_JOB_DIR, "."), environ[contract.SHOAL_PROOF_DIR]).absolute()
    if directory not in _recorders:
        _recorders[directory] = ProofRecorder(directory, environ)
    return _recorders[directory]


class ProofRecorder:
    """Writes one rank's record. Raises on a full disk: a proof needs its records."""

    def __init__(self, directory: Path, environ: Mapping[str, str]) -> None:
        env = read_env(environ)
        self.directory = directory
        self.dtype = environ.get(contract.SHOAL_PROOF_DTYPE) or "float64"
        self.parallel = environ.get(contract.SHOAL_PROOF_PARALLEL, "")
        """Empty: as in the script."""
        self.total_steps = int(environ.get(contract.SHOAL_PROOF_STEPS) or 0)
        """0: as many as the script takes."""
        self.rank = env.rank
        directory.mkdir(parents=True, exist_ok=True)
        self._path = directory / f"rank-{env.rank}.jsonl"
        self._fresh: list[str] = []
        self._batches = 0
        self._seen: dict[str, int] = {}
        self._samples = 0
        self.steps = 0
        """Steps of the optimizer so far."""
        self.stopped_early = False
        """The proof was complete before the end of the script."""
        self._line("start", rank=env.rank, world_size=env.world_size)

    @property
    def complete(self) -> bool:
        """All steps of the proof are done."""
        return bool(self.total_steps) and self.steps >= self.total_steps

    def model(self, parallel: str, batch_norm: Sequence[str], dropout: Sequence[str]) -> None:
        self._line("model", parallel=parallel, batch_norm=list(batch_norm), dropout=list(dropout))

    def add_samples(self, digests: Iterable[str]) -> None:
        """The model receives these samples for training."""
        new_samples = list(digests)
        self._batches += 1
        self._fresh += new_samples
        self._samples += len(new_samples)

    def step(self, lr: float, whole: float, sharded: float) -> None:
        """The optimizer is about to take a step, with gradients whose squares sum up to this."""
        if self.complete:
            return
        samples, self._fresh = self._fresh, []
        gradients = [float(whole).hex(), float(sharded).hex()]
        self.steps += 1
        batches, self._batches = self._batches, 0
        self._line("step", step=self.steps, lr=float(lr).hex(), gradients=gradients, samples=samples, batches=batches)

    def random(self, state: str) -> None:
        self._line("random", state=state)

    def repeated_order(self, sampler: str) -> None:
        self._line("order", sampler=sampler)

    def loss(self, source: str, step: int, loss: Any) -> None:
        """The script reports its loss, which may be a tensor."""
        try:
            number = float(detach(loss))
        except (TypeError, ValueError):
            return
        samples = self._samples - self._seen.get(source, 0)
        self._seen[source] = self._samples
        self._line("loss", source=source, step=int(step), loss=number.hex(), samples=samples)

    def metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """The script reports its metrics; the loss may be among them."""
        name = next((name for name in LOSS_NAMES if name in metrics), None)
        if name is not None:
            self.loss("tracker", step, metrics[name])

    def record_start(self, parts: Iterable[ParameterPart]) -> None:
        """Record the model's parameters before it is distributed: all ranks start from rank 0's."""
        if self.rank == 0:
            self._line("begins", parts=[[part.name, part.digest] for part in parts])

    def record_end(self, parts: Iterable[ParameterPart]) -> None:
        """Record this rank's part of the parameters. A second call adds those of another model."""
        entries = []
        with self._path.with_suffix(".end").open("ab") as file:
            for part in parts:
                # Parameters are large, and those that every rank has are the same: a digest tells whether they are.
                size = file.write(part.values) if part.sharded or self.rank == 0 else 0
                entries.append([part.name, part.digest, part.sharded, size])
        self._line("ends", type=TYPES[self.dtype], parts=entries)

    def _line(self, kind: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")
