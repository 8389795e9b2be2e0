"""What the ranks of a run recorded, put together: the job's losses, samples, gradients and parameters.

`shoal.train.proof` says what is in the files. Read with the standard library: whoever compares need not have torch.
"""

from __future__ import annotations

import json
import math
from array import array
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

SOURCES = ("progress", "tracker")
"""Who may have been told the losses. Progress is told of every step, a tracker perhaps of every tenth."""


@dataclass(frozen=True)
class Loss:
    step: int
    """As the script counts."""
    value: float
    samples: int
    """How many samples it is the mean of; 0 where that is not known."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer on one rank."""

    lr: float
    whole: float
    """The sum of the gradients' squares, of those that the rank has whole."""
    sharded: float
    """The same of the shards it has of the others."""
    samples: tuple[str, ...]
    """A name for each sample, in the order the model got them."""


@dataclass(frozen=True)
class Held:
    """What a rank holds of a parameter."""

    sharded: bool
    values: array[float]


@dataclass(frozen=True)
class RankRecord:
    """What one rank did."""

    rank: int
    world_size: int
    parallel: str = ""
    """Empty where the script never called parallelize()."""
    batch_norm: tuple[str, ...] = ()
    dropout: tuple[str, ...] = ()
    steps: tuple[Step, ...] = ()
    losses: Mapping[str, tuple[Loss, ...]] = field(default_factory=dict)
    """By who was told."""
    start: Mapping[str, Held] = field(default_factory=dict)
    end: Mapping[str, Held] = field(default_factory=dict)


@dataclass(frozen=True)
class RunRecord:
    """What a run did, all ranks together."""

    ranks: tuple[RankRecord, ...]

    @property
    def world_size(self) -> int:
        return self.ranks[0].world_size if self.ranks else 0

    @property
    def steps(self) -> int:
        """Steps of the optimizer that every rank took."""
        return min((len(rank.steps) for rank in self.ranks), default=0)

    @cached_property
    def source(self) -> str:
        """Who was told the losses; empty where nobody was."""
        return next((name for name in SOURCES if any(rank.losses.get(name) for rank in self.ranks)), "")

    @property
    def tellers(self) -> tuple[int, ...]:
        """The ranks that told their loss."""
        return tuple(rank.rank for rank in self.ranks if rank.losses.get(self.source))

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """The losses of the whole job: the mean over the ranks, each weighted by its samples.

        As many as the rank with the fewest has told.
        """
        told = [rank.losses[self.source] for rank in self.ranks if rank.losses.get(self.source)]
        return tuple(_mean(together) for together in zip(*told, strict=False))

    def samples(self, step: int) -> tuple[tuple[str, ...], ...]:
        """The samples of a step, rank by rank. The first step is 0."""
        return tuple(rank.steps[step].samples for rank in self.ranks)

    def gradient(self, step: int) -> float:
        """The norm of the whole gradient of a step."""
        return math.sqrt(self.ranks[0].steps[step].whole + sum(rank.steps[step].sharded for rank in self.ranks))

    @cached_property
    def start(self) -> dict[str, array[float]]:
        """The parameters before the first step."""
        return _joined([rank.start for rank in self.ranks])

    @cached_property
    def end(self) -> dict[str, array[float]]:
        """The parameters after the last step."""
        return _joined([rank.end for rank in self.ranks])

    @cached_property
    def apart(self) -> tuple[str, int] | None:
        """A parameter that all ranks hold whole, and a rank that ended up with another value of it than rank 0."""
        first, *others = self.ranks
        for name, held in first.end.items():
            for other in others:
                theirs = other.end.get(name)
                if theirs and not held.sharded and not theirs.sharded and theirs.values != held.values:
                    return name, other.rank
        return None


def read_run(directory: Path) -> RunRecord:
    """The records in a directory; without any, a run of no ranks."""
    found = []
    for path in directory.glob("rank-*.jsonl"):
        lines = list(_lines(path))
        if lines and lines[0].get("kind") == "start":
            found.append(_rank(lines, path))
    return RunRecord(tuple(sorted(found, key=lambda rank: rank.rank)))


def what_is_missing(run: RunRecord, processes: int) -> tuple[str, str] | None:
    """What a run did not record, and the call that does it; None where all is there."""
    if not run.ranks:
        return "the script recorded nothing: it never called shoal.train.init()", "call shoal.train.init() at its start"
    if len(run.ranks) != processes:
        here = ", ".join(str(rank.rank) for rank in run.ranks)
        return f"of {processes} processes only rank {here} recorded anything", "call shoal.train.init() on every rank"
    if not all(rank.parallel for rank in run.ranks):
        return (
            "the script has shown no model: it never called shoal.train.parallelize()",
            'say model = parallelize(model, "ddp"), and make the optimizer from that',
        )
    if not any(rank.steps for rank in run.ranks):
        return (
            "no optimizer took a step with the model's parameters",
            "make the optimizer after parallelize(), from the parameters() of what it returns",
        )
    if idle := [str(rank.rank) for rank in run.ranks if not rank.steps]:
        return f"rank {', '.join(idle)} took no step: its optimizer never ran", "call optimizer.step() on every rank"
    if not run.source:
        return (
            "the script told nobody its loss",
            "after each step, on every rank: progress.step(step, loss) with shoal.train.progress.Progress,"
            ' or tracker.log({"loss": loss}, step)',
        )
    if not all(rank.end for rank in run.ranks):
        return "not every rank kept its final parameters", "let the script end by itself, not by os._exit() or a signal"
    return None


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text(errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            return  # a process that was killed may have left half a line
        if isinstance(value, dict):
            yield value


def _rank(lines: list[dict[str, Any]], path: Path) -> RankRecord:
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for line in lines:
        of_kind.setdefault(str(line.get("kind")), []).append(line)
    losses: dict[str, tuple[Loss, ...]] = {}
    for line in of_kind.get("loss", []):
        told = Loss(line["step"], float.fromhex(line["loss"]), line["samples"])
        losses[line["source"]] = (*losses.get(line["source"], ()), told)
    model = of_kind.get("model", [{}])[0]
    return RankRecord(
        rank=lines[0]["rank"],
        world_size=lines[0]["world_size"],
        parallel=model.get("parallel", ""),
        batch_norm=tuple(model.get("batch_norm", ())),
        dropout=tuple(model.get("dropout", ())),
        steps=tuple(_step(line) for line in of_kind.get("step", [])),
        losses=losses,
        start=_tensors(of_kind.get("tensors", []), "start", path.with_suffix(".start")),
        end=_tensors(of_kind.get("tensors", []), "end", path.with_suffix(".end")),
    )


def _step(line: dict[str, Any]) -> Step:
    whole, sharded = (float.fromhex(text) for text in line["gradients"])
    return Step(float.fromhex(line["lr"]), whole, sharded, tuple(line["samples"]))


def _tensors(lines: list[dict[str, Any]], moment: str, path: Path) -> dict[str, Held]:
    found: dict[str, Held] = {}
    data = path.read_bytes() if path.exists() else b""
    at = 0
    for model, line in enumerate(line for line in lines if line["moment"] == moment):
        for name, sharded, count in line["parts"]:
            values = array("d")
            values.frombytes(data[at : at + 8 * count])
            at += 8 * count
            # A script may train several models; their parameters may have the same names.
            found[f"model {model + 1}: {name}" if model else name] = Held(sharded, values)
    return found


def _joined(held: list[Mapping[str, Held]]) -> dict[str, array[float]]:
    """The whole parameters: a shard of each rank after that of the rank before, or rank 0's."""
    whole: dict[str, array[float]] = {}
    for name, first in held[0].items() if held else ():
        values = first.values[:]
        if first.sharded:
            for other in held[1:]:
                if name in other:
                    values.extend(other[name].values)
        whole[name] = values
    return whole


def _mean(losses: tuple[Loss, ...]) -> Loss:
    weights = [loss.samples for loss in losses]
    if not all(weights):
        weights = [1] * len(losses)
    total = math.fsum(loss.value * weight for loss, weight in zip(losses, weights, strict=True))
    return Loss(losses[0].step, total / sum(weights), sum(loss.samples for loss in losses))
