"""The likely cause, as text, why a run with many processes differs from the run with one process.

The checks follow the order of a run, and the first that matches is the cause: where ranks read other samples, all that
follows differs too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from shoal.proof.compare import Comparison, relative, same_samples
from shoal.proof.records import RunRecord

RATIO_TOLERANCE = 1e-3
"""How near a ratio must be to the number of ranks to be caused by it."""
MAX_ROUNDING = 1e5
"""Differences of up to this many tolerances may come from rounding."""


@dataclass(frozen=True)
class RunPair:
    """Both runs and their comparison."""

    single: RunRecord
    many: RunRecord
    comparison: Comparison
    tolerance: float

    def differ(self, single: float, many: float) -> bool:
        return relative(single, many) > self.tolerance

    @property
    def shared_steps(self) -> range:
        return range(min(self.single.steps, self.many.steps))

    @property
    def first_loss_differs(self) -> bool:
        return self.differ(self.single.losses[0].value, self.many.losses[0].value)

    @property
    def ratio(self) -> float:
        """The first gradient's norm, relative to that of one process."""
        return self.many.gradient(0) / self.single.gradient(0) if self.single.gradient(0) else 0.0


def likely_cause(single: RunRecord, many: RunRecord, comparison: Comparison, tolerance: float) -> str:
    """One or two sentences: what is wrong, and the fix."""
    runs = RunPair(single, many, comparison, tolerance)
    return next(chain(_input_causes(runs), _report_causes(runs), _gradient_causes(runs), _late_causes(runs)))


def _input_causes(runs: RunPair) -> Iterator[str]:
    """Other parameters, samples or learning rates than those of one process."""
    if runs.comparison.start:
        yield (
            f"the parameters differ before the first step ({runs.comparison.start}): every run starts from another"
            " model; make it after init(), or set torch.manual_seed() before"
        )
    for loss in runs.single.losses:
        if relative(loss.value, loss.value) > 0:
            yield (
                f"the loss of one process is {loss.value} at step {loss.step}: that training diverges, and cannot be"
                " compared; use a smaller learning rate or fewer --steps"
            )
    for step in runs.shared_steps:
        if cause := sample_cause(runs.single, runs.many, step):
            yield f"step {step + 1}: {cause}"
    steps, many_steps = runs.comparison.steps
    if steps != many_steps:
        yield (
            f"one process took {steps} steps, {runs.many.world_size} took {many_steps}: the data of an epoch is divided"
            " by the number of ranks once too often, or too seldom; the global batch must be the same"
        )
    if not runs.comparison.losses_told:
        single_steps, many_run_steps = ([loss.step for loss in run.losses] for run in (runs.single, runs.many))
        unmatched_steps = sorted({*single_steps} ^ {*many_run_steps})
        difference = (
            f"step {unmatched_steps[0]} is among those of one alone" if unmatched_steps else "they are in another order"
        )
        yield (
            f"one process reported {len(single_steps)} losses, {runs.many.world_size} reported {len(many_run_steps)}"
            f" ({difference}): what was not reported cannot be compared; report the loss after every step, on every"
            " rank"
        )
    for step in runs.shared_steps:
        single_rate, many_rate = (run.ranks[0].steps[step].lr for run in (runs.single, runs.many))
        if runs.differ(single_rate, many_rate):
            yield (
                f"step {step + 1}: the learning rate is {many_rate:g} with {runs.many.world_size} processes and"
                f" {single_rate:g} with one; the global batch is the same, so the learning rate must not depend on"
                " the number of ranks"
            )
    for step in runs.shared_steps:
        sizes = [len(part) for part in runs.many.samples(step)]
        if len(set(sizes)) > 1:
            yield (
                f"step {step + 1}: the ranks have {', '.join(map(str, sizes))} samples, and their gradients are"
                " averaged as if these were equal; weight each rank's loss by its part (Loader.weights), or give"
                " all as many"
            )


def _report_causes(runs: RunPair) -> Iterator[str]:
    """Ranks that report no loss, or do not train together."""
    reporting_ranks, world = runs.many.reporting_ranks, runs.many.world_size
    if len(reporting_ranks) != world and runs.first_loss_differs and abs(runs.ratio - 1) <= runs.tolerance:
        noun = "rank" if len(reporting_ranks) == 1 else "ranks"
        ranks = f"{noun} {', '.join(map(str, reporting_ranks))}"
        yield (
            f"only {ranks} of {world} reported a loss, and it is that of its own part of the batch; the gradients"
            " agree: report the loss on every rank, not behind `if rank == 0`"
        )
    if runs.many.diverged is not None:
        name, rank = runs.many.diverged
        yield (
            f"the ranks hold different parameters at the end: {name} of rank {rank} is not that of rank 0, so their"
            " gradients are not averaged; call the model that parallelize() returned, and change no parameter on"
            " one rank alone"
        )


def _gradient_causes(runs: RunPair) -> Iterator[str]:
    """The first loss or gradient differs, on the same samples and parameters."""
    world, ratio = runs.many.world_size, runs.ratio
    loss_clause = ", as is the reported loss" if runs.first_loss_differs else "; the loss itself agrees"
    single_batches, many_batches = runs.single.batches(0), runs.many.batches(0)
    if single_batches != many_batches and abs(ratio * single_batches / many_batches - 1) < RATIO_TOLERANCE:
        yield (
            f"the first gradient is {many_batches}/{single_batches} of that of one process{loss_clause}: one process"
            f" accumulates the gradients of {single_batches} batches for a step, {world} accumulate {many_batches}"
            " each, and backward() adds them up; divide the loss by the number of batches of a step"
        )
    if abs(ratio / world - 1) < RATIO_TOLERANCE:
        yield (
            f"the first gradient is {world} times that of one process{loss_clause}: gradients are summed over the"
            f" {world} ranks instead of averaged; take the mean over the rank's own samples as loss, and do not"
            " multiply by the number of ranks"
        )
    if abs(ratio * world - 1) < RATIO_TOLERANCE:
        yield (
            f"the first gradient is 1/{world} of that of one process{loss_clause}: it is divided by the number of"
            " ranks twice; DDP and FSDP average gradients already, so do not divide the loss or the gradients by it"
        )
    if runs.first_loss_differs:
        model, clauses = runs.many.ranks[0], []
        if model.batch_norm:
            clauses.append(
                f"{_shorten(model.batch_norm)} (BatchNorm) looks at the samples of its own rank only: use SyncBatchNorm"
                " on GPUs, or GroupNorm or LayerNorm"
            )
        if model.dropout:
            numbers, remedy = "draws other numbers on each rank", "prove the script with dropout 0"
            if runs.many.draws_same_numbers:
                numbers = "draws the same numbers on every rank, because their seeds are equal"
                remedy = f"seed each rank apart, torch.manual_seed(seed + rank), and {remedy}"
            clauses.append(f"{_shorten(model.dropout)} (Dropout) {numbers}: {remedy}")
        if clauses:
            yield "the first loss differs, on the same samples: " + "; ".join(clauses)
        single_loss, many_loss = runs.single.losses[0].value, runs.many.losses[0].value
        yield (
            f"the first loss differs, on the same samples and parameters: {single_loss:.6g} with one process,"
            f" {many_loss:.6g} with {world}; it depends on how the batch is split, or on random numbers: take a mean"
            " over the samples (the ranks' part of it), and draw what is random from each sample's own seed"
        )
    if runs.differ(runs.single.gradient(0), runs.many.gradient(0)):
        yield (
            f"the first loss agrees, and the first gradient is {ratio:.6g} times that of one process: something"
            " changes gradients between backward() and the optimizer's step on each rank by itself, as clipping the"
            " gradients of one rank's shards does"
        )


def _late_causes(runs: RunPair) -> Iterator[str]:
    """All agree at the first step. There is always a cause here."""
    if runs.many.repeated_order and replace(runs.comparison, epochs_alike=False).within(runs.tolerance):
        yield (
            f"the {runs.many.repeated_order} shuffles every epoch alike: set_epoch() does not change its order; call"
            " sampler.set_epoch(epoch) before each epoch"
        )
    worst = max(runs.comparison.losses.relative, runs.comparison.parameters.relative)
    if worst <= MAX_ROUNDING * runs.tolerance:
        yield (
            f"all agree at the first step, and differ by {worst:.1e} at most: rounding that grew;"
            " use --dtype float64, fewer --steps, or say which --tolerance is good enough"
        )
    yield (
        "samples, learning rate, first loss and first gradient agree, and then the runs part: look for what depends on"
        " the rank or on the number of ranks in the optimizer, in clipping, or between steps"
    )


def _shorten(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def sample_cause(single: RunRecord, many: RunRecord, step: int) -> str:
    """What is wrong with the samples of a step, and what to do; empty where they are the same, or not known.

    Samples are called by their place in the batch of one process, counted from 1.
    """
    if same_samples(single, many, step):
        return ""
    batch, parts = single.samples(step)[0], many.samples(step)
    read_counts = Counter(name for part in parts for name in part)
    ranks, sizes = len(parts), [len(part) for part in parts]
    if all(Counter(part) == Counter(parts[0]) for part in parts):
        return _describe_identical_parts(batch, parts[0])
    if all(size == len(batch) for size in sizes):
        return (
            f"each of the {ranks} ranks reads {len(batch)} samples, {sum(sizes)} together, and one process"
            f" {len(batch)}: the batch is stated for a rank; state it for the job, {len(batch)} // world_size a rank"
            f" (or Loader(global_batch={len(batch)}))"
        )
    if set(read_counts) - set(batch):
        return _describe_foreign_samples(single, many, step)
    return _describe_unread_samples(batch, parts, read_counts)


def _describe_identical_parts(batch: Sequence[str], part: Sequence[str]) -> str:
    fix = "give each rank its own part of the batch, as shoal.train.data.Loader or a DistributedSampler does"
    if Counter(part) == Counter(batch):
        return f"every rank reads all {len(batch)} samples that one process reads: {fix}"
    shared_places = [place for place, name in enumerate(batch, 1) if name in set(part)]
    if not shared_places:
        return f"every rank reads the same {len(part)} samples, none of which one process reads then: {fix}"
    unread_places = [place for place, name in enumerate(batch, 1) if name not in set(part)]
    return (
        f"every rank reads the same {len(part)} samples, {_format_places(shared_places)} of the {len(batch)} that one"
        f" process reads; no rank reads {_format_places(unread_places)}: {fix}"
    )


def _describe_foreign_samples(single: RunRecord, many: RunRecord, step: int) -> str:
    """Ranks read samples that are not in this batch."""
    batch = set(single.samples(step)[0])
    foreign_samples = {
        rank: [name for name in part if name not in batch] for rank, part in enumerate(many.samples(step))
    }
    readers = [rank for rank, names in foreign_samples.items() if names]
    count = sum(map(len, foreign_samples.values()))
    sentence = f"{_format_ranks(readers)} {count} samples that one process does not read then"
    other_samples = {
        name for other_step in range(single.steps) if other_step != step for name in single.samples(other_step)[0]
    }
    count_elsewhere = sum(name in other_samples for names in foreign_samples.values() for name in names)
    if count_elsewhere:
        return (
            f"{sentence}, but at another step ({count_elsewhere} of them): the ranks do not follow one order of the"
            " samples, the same for any number of them; cut one global order into batches and each batch into parts, as"
            " shoal.train.data.Loader does"
        )
    return (
        f"{sentence}: their data is shuffled, split or changed at random by each rank for itself;"
        " draw the order from one seed for all ranks, and what is random in a sample from that sample's own seed"
    )


def _describe_unread_samples(batch: Sequence[str], parts: Sequence[Sequence[str]], read_counts: Counter[str]) -> str:
    """Every sample is of this batch, but no rank reads some of them, or several ranks do."""
    unread_places = [place for place, name in enumerate(batch, 1) if not read_counts[name]]
    repeated_places = [place for place, name in enumerate(batch, 1) if read_counts[name] > batch.count(name)]
    clauses = []
    if unread_places:
        clauses.append(
            f"no rank reads {_format_places(unread_places)} of the {len(batch)} samples that one process reads"
        )
    if repeated_places:
        readers = [rank for rank, part in enumerate(parts) if batch[repeated_places[0] - 1] in part]
        clauses.append(f"{_format_ranks(readers)} the same: {_format_places(repeated_places)}")
    sizes = [len(part) for part in parts]
    short_rank = next((rank for rank, size in enumerate(sizes) if size < max(sizes)), None)
    if short_rank is not None:
        clauses.append(f"rank {short_rank} reads {sizes[short_rank]}, others {max(sizes)}")
    return "; ".join(clauses) + ": every sample of the batch must be read by one rank, and by one only"


def _format_places(places: Sequence[int]) -> str:
    """Places in a batch as a person writes them: `numbers 1-4, 7`."""
    ranges: list[list[int]] = []
    for place in sorted(places):
        if ranges and place == ranges[-1][-1] + 1:
            ranges[-1].append(place)
        else:
            ranges.append([place])
    text = ", ".join(
        str(positions[0]) if len(positions) == 1 else f"{positions[0]}-{positions[-1]}" for positions in ranges
    )
    return f"number{'s' * (len(places) > 1)} {text}"


def _format_ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} reads"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]} read"
