"""Keeps what one process of a proof did, for `shoal prove` to compare: losses, samples, gradients, parameters.

`recorder()` is None unless `shoal prove` runs the script. Each rank writes on its own, so that no rank waits for one
that does less than it should: that is one of the mistakes a proof is there to find. In the proof's directory it leaves

    rank-R.jsonl     a line for each thing that happened
    rank-R.end       its part of the parameters after the last step, one after the other, in the proof's precision;
                     of those that every rank has whole, only rank 0 keeps more than the digest

The lines, by `kind`:

    start   rank, world_size
    model   parallel, batch_norm, dropout: how it is spread, and the layers whose result depends on how it is
    step    one step of the optimizer: its number, lr, gradients (squares summed: of whole tensors, of shards), samples
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

from shoal.train.contract import (
    SHOAL_JOB_DIR,
    SHOAL_PROOF_DIR,
    SHOAL_PROOF_DTYPE,
    SHOAL_PROOF_PARALLEL,
    SHOAL_PROOF_STEPS,
)
from shoal.train.env import Env, read_env
from shoal.train.scalars import detached

TYPES = {"float64": "d", "float32": "f"}
"""What the standard library's struct and array call the numbers of each precision."""

LOSS_NAMES = ("loss", "train_loss", "train/loss")
"""What a script may call the metric that is the loss."""


@dataclass(frozen=True)
class Settings:
    """What `shoal prove` asks of a run."""

    directory: Path
    dtype: str = "float64"
    parallel: str = ""
    """Empty: as the script says."""
    steps: int = 0
    """0: as many as the script takes."""


@dataclass(frozen=True)
class Part:
    """One rank's part of a parameter."""

    name: str
    sharded: bool
    """The parts of all ranks, one after the other, are the parameter; otherwise each rank has all of it."""
    values: bytes
    """Its elements, in the proof's precision."""

    @property
    def digest(self) -> str:
        return hashlib.blake2b(self.values, digest_size=16).hexdigest()


def settings(environ: Mapping[str, str] = os.environ) -> Settings | None:
    """What this run is to prove; None where it is no proof."""
    directory = environ.get(SHOAL_PROOF_DIR)
    if not directory:
        return None
    return Settings(
        Path(environ.get(SHOAL_JOB_DIR, "."), directory).absolute(),
        environ.get(SHOAL_PROOF_DTYPE) or "float64",
        environ.get(SHOAL_PROOF_PARALLEL, ""),
        int(environ.get(SHOAL_PROOF_STEPS) or 0),
    )


_recorders: dict[Path, Recorder] = {}


def recorder(environ: Mapping[str, str] = os.environ) -> Recorder | None:
    """The record of this process, the same one at every call; None where this is no proof."""
    asked = settings(environ)
    if asked is None:
        return None
    if asked.directory not in _recorders:
        _recorders[asked.directory] = Recorder(asked, read_env(environ))
    return _recorders[asked.directory]


class Recorder:
    """Writes one rank's record. A full disk raises: a proof without its records proves nothing."""

    def __init__(self, asked: Settings, env: Env) -> None:
        self.settings = asked
        self.rank = env.rank
        asked.directory.mkdir(parents=True, exist_ok=True)
        self._path = asked.directory / f"rank-{env.rank}.jsonl"
        self._fresh: list[str] = []
        self._seen: dict[str, int] = {}
        self._samples = 0
        self.steps = 0
        """Steps of the optimizer so far."""
        self.left = False
        """The proof has seen enough, and the script was left where it was."""
        self._line("start", rank=env.rank, world_size=env.world_size)

    @property
    def scratch(self) -> Path:
        """Where checkpoints of a proof go: it neither begins from one of the real run, nor leaves one there."""
        return self.settings.directory / "checkpoints"

    @property
    def enough(self) -> bool:
        """All steps that the proof wants are done."""
        return bool(self.settings.steps) and self.steps >= self.settings.steps

    def model(self, parallel: str, batch_norm: Sequence[str], dropout: Sequence[str]) -> None:
        self._line("model", parallel=parallel, batch_norm=list(batch_norm), dropout=list(dropout))

    def saw(self, digests: Iterable[str]) -> None:
        """The model is given these samples, to train on."""
        before = len(self._fresh)
        self._fresh += digests
        self._samples += len(self._fresh) - before

    def step(self, lr: float, whole: float, sharded: float) -> None:
        """The optimizer is about to take a step, with gradients whose squares sum up to this."""
        if self.enough:
            return
        samples, self._fresh = self._fresh, []
        gradients = [float(whole).hex(), float(sharded).hex()]
        self.steps += 1
        self._line("step", step=self.steps, lr=float(lr).hex(), gradients=gradients, samples=samples)

    def loss(self, source: str, step: int, loss: Any) -> None:
        """The script tells its loss. It may be a tensor."""
        try:
            number = float(detached(loss))
        except (TypeError, ValueError):
            return
        samples = self._samples - self._seen.get(source, 0)
        self._seen[source] = self._samples
        self._line("loss", source=source, step=int(step), loss=number.hex(), samples=samples)

    def metrics(self, metrics: Mapping[str, Any], step: int) -> None:
        """The script tells its metrics, and the loss may be among them."""
        name = next((name for name in LOSS_NAMES if name in metrics), None)
        if name is not None:
            self.loss("tracker", step, metrics[name])

    def begins(self, parts: Iterable[Part]) -> None:
        """The model's parameters, before it is spread over the ranks: they all start from rank 0's."""
        if self.rank == 0:
            self._line("begins", parts=[[part.name, part.digest] for part in parts])

    def ends(self, parts: Iterable[Part]) -> None:
        """Keep this rank's part of the parameters. A second call adds those of another model."""
        described = []
        with (self.settings.directory / f"rank-{self.rank}.end").open("ab") as file:
            for part in parts:
                # Parameters are large, and those that every rank has are the same: a digest tells whether they are.
                kept = file.write(part.values) if part.sharded or self.rank == 0 else 0
                described.append([part.name, part.digest, part.sharded, kept])
        self._line("ends", type=TYPES[self.settings.dtype], parts=described)

    def _line(self, kind: str, **values: Any) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({"kind": kind, **values}) + "\n")
