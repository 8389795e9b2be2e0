"""What the ranks of a run recorded, put together: the job's losses, samples, gradients and parameters.

`shoal.train.proof_record` documents the files. Only the standard library: the comparing Python may lack torch.
"""

from __future__ import annotations

import json
import math
import mmap
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

SOURCES = ("progress", "tracker")
"""Where a script may report its loss. Progress gets every step, a tracker perhaps every tenth."""


@dataclass(frozen=True)
class Loss:
    step: int
    """As the script counts."""
    value: float
    samples: int
    """How many samples it is the mean of; 0 if unknown."""


@dataclass(frozen=True)
class Step:
    """One step of the optimizer on one rank."""

    lr: float
    whole: float
    """The sum of the squared gradients that the rank holds whole."""
    sharded: float
    """The same for its shards of the others."""
    samples: tuple[str, ...]
    """A digest of each sample, in the order in which the model received them."""
    batches: int = 1
    """How often the model was called for it: more than once where gradients are accumulated."""


Values: TypeAlias = "Sequence[memoryview[float]]"
"""The elements of a parameter, in consecutive pieces."""


@dataclass(frozen=True)
class StoredParameter:
    """What a rank holds of a parameter."""

    sharded: bool
    digest: str
    values: memoryview[float]
    """Empty where rank 0 has stored the same."""


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
    losses: Mapping[str, Sequence[Loss]] = field(default_factory=dict)
    """By source: progress or tracker."""
    start: Mapping[str, str] = field(default_factory=dict)
    """The digest of each parameter before the first step, on rank 0."""
    end: Mapping[str, StoredParameter] = field(default_factory=dict)
    random_state: str = ""
    """A digest of its generators of random numbers before the first step; empty if unknown."""
    repeated_order: str = ""
    """A sampler that shuffles every epoch alike; empty if there is none."""


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
        """Where the losses were reported; empty if nowhere."""
        return next((name for name in SOURCES if any(rank.losses.get(name) for rank in self.ranks)), "")

    @property
    def reporting_ranks(self) -> tuple[int, ...]:
        """The ranks that reported a loss."""
        return tuple(rank.rank for rank in self.ranks if rank.losses.get(self.source))

    @cached_property
    def losses(self) -> tuple[Loss, ...]:
        """The losses of the whole job: the mean over the ranks, each weighted by its samples.

        As many as the rank with the fewest has reported.
        """
        losses_by_rank = [rank.losses[self.source] for rank in self.ranks if rank.losses.get(self.source)]
        return tuple(_mean(step_losses) for step_losses in zip(*losses_by_rank, strict=False))

    def samples(self, step: int) -> tuple[tuple[str, ...], ...]:
        """The samples of a step, rank by rank. The first step is 0."""
        return tuple(rank.steps[step].samples for rank in self.ranks)

    def gradient(self, step: int) -> float:
        """The norm of the whole gradient of a step."""
        return math.sqrt(self.ranks[0].steps[step].whole + sum(rank.steps[step].sharded for rank in self.ranks))

    @property
    def start(self) -> Mapping[str, str]:
        """The digests of the parameters before the first step."""
        return self.ranks[0].start

    @cached_property
    def end(self) -> dict[str, Values]:
        """The parameters after the last step."""
        # A shard of each rank after that of the rank before, or rank 0's.
        return {
            name: [rank.end[name].values for rank in self.ranks if name in rank.end]
            if parameter.sharded
            else [parameter.values]
            for name, parameter in (self.ranks[0].end.items() if self.ranks else ())
        }

    def batches(self, step: int) -> int:
        """How often a rank called the model for a step."""
        return self.ranks[0].steps[step].batches

    @property
    def draws_same_numbers(self) -> bool:
        """All ranks draw the same random numbers."""
        states = {rank.random_state for rank in self.ranks}
        return len(self.ranks) > 1 and len(states) == 1 and "" not in states

    @property
    def repeated_order(self) -> str:
        """A sampler of some rank that shuffles every epoch alike."""
        return next((rank.repeated_order for rank in self.ranks if rank.repeated_order), "")

    @cached_property
    def diverged(self) -> tuple[str, int] | None:
        """A parameter that all ranks hold whole, and a rank whose final value differs from rank 0's."""
        first_rank, *other_ranks = self.ranks
        for name, parameter in first_rank.end.items():
            for rank in other_ranks:
                copy = rank.end.get(name)
                if copy and not parameter.sharded and not copy.sharded and copy.digest != parameter.digest:
                    return name, rank.rank
        return None


def read_run(directory: Path) -> RunRecord:
    """The records in a directory; without any, a run of no ranks."""
    ranks = []
    for path in directory.glob("rank-*.jsonl"):
        lines = list(_lines(path))
        if lines and lines[0].get("kind") == "start":
            ranks.append(_rank(lines, path))
    return RunRecord(tuple(sorted(ranks, key=lambda rank: rank.rank)))


def describe_missing_record(run: RunRecord, processes: int) -> tuple[str, str] | None:
    """What a run did not record, and the call that records it; None if complete."""
    if not run.ranks:
        return "the script recorded nothing: it never called shoal.train.init()", "call shoal.train.init() at its start"
    if len(run.ranks) != processes:
        rank_text = ", ".join(str(rank.rank) for rank in run.ranks)
        return (
            f"of {processes} processes only rank {rank_text} recorded anything",
            "call shoal.train.init() on every rank",
        )
    if not all(rank.parallel for rank in run.ranks):
        return (
            "the script recorded no model: it never called shoal.train.parallelize()",
            'call model = parallelize(model, "ddp"), and make the optimizer from that',
        )
    if not any(rank.steps for rank in run.ranks):
        return (
            "no optimizer took a step with the model's parameters",
            "make the optimizer after parallelize(), from the parameters() of what it returns",
        )
    if idle_ranks := [str(rank.rank) for rank in run.ranks if not rank.steps]:
        return (
            f"rank {', '.join(idle_ranks)} took no step: its optimizer never ran",
            "call optimizer.step() on every rank",
        )
    if not run.source:
        return (
            "the script reported no loss",
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
            return  # a killed process may leave half a line
        if isinstance(value, dict):
            yield value


def _rank(lines: list[dict[str, Any]], path: Path) -> RankRecord:
    lines_by_kind: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for line in lines:
        lines_by_kind[str(line.get("kind"))].append(line)
    losses: dict[str, list[Loss]] = defaultdict(list)
    for line in lines_by_kind["loss"]:
        losses[line["source"]].append(Loss(line["step"], float.fromhex(line["loss"]), line["samples"]))
    model = lines_by_kind["model"][0] if lines_by_kind["model"] else {}
    return RankRecord(
        rank=lines[0]["rank"],
        world_size=lines[0]["world_size"],
        parallel=model.get("parallel", ""),
        batch_norm=tuple(model.get("batch_norm", ())),
        dropout=tuple(model.get("dropout", ())),
        steps=tuple(_step(line) for line in lines_by_kind["step"]),
        losses=losses,
        start={name: digest for name, (digest,) in _parts(lines_by_kind["begins"])},
        end=_read_parameters(lines_by_kind["ends"], path.with_suffix(".end")),
        random_state=next((line["state"] for line in lines_by_kind["random"]), ""),
        repeated_order=next((line["sampler"] for line in lines_by_kind["order"]), ""),
    )


def _step(line: dict[str, Any]) -> Step:
    whole_norm, sharded = (float.fromhex(text) for text in line["gradients"])
    return Step(float.fromhex(line["lr"]), whole_norm, sharded, tuple(line["samples"]), line.get("batches", 1))


def _read_parameters(lines: list[dict[str, Any]], path: Path) -> dict[str, StoredParameter]:
    parameters: dict[str, StoredParameter] = {}
    data, offset = _map_file(path), 0
    for name, (digest, sharded, size) in _parts(lines):
        parameters[name] = StoredParameter(sharded, digest, data[offset : offset + size].cast(lines[0]["type"]))
        offset += size
    return parameters


def _parts(lines: list[dict[str, Any]]) -> Iterator[tuple[str, list[Any]]]:
    """The parameters of all models that a script trains. Two models may use the same names."""
    for model, line in enumerate(lines, 1):
        for name, *fields in line["parts"]:
            yield (name if model == 1 else f"model {model}: {name}"), fields


def _map_file(path: Path) -> memoryview:
    """The bytes of a file, memory-mapped: those of all ranks may not fit into memory."""
    if not path.exists() or not path.stat().st_size:
        return memoryview(b"")
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))


def _mean(losses: tuple[Loss, ...]) -> Loss:
    samples = [loss.samples for loss in losses]
    weights = samples if all(samples) else [1] * len(losses)
    total = math.fsum(loss.value * weight for loss, weight in zip(losses, weights, strict=True))
    return Loss(losses[0].step, total / sum(weights), sum(samples))
