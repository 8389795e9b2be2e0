"""Why a run with many processes went another way than the one with a single process: the likely cause, in words.

The checks go from the beginning of a run to its end, and the first that finds something is the cause: where ranks read
other samples, whatever follows differs too, and says nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from shoal.proof.compare import Comparison, relative
from shoal.proof.records import RunRecord
from shoal.proof.samples import which_samples

NEAR = 1e-3
"""A ratio so near to the number of ranks is no accident."""
ROUNDING = 1e5
"""Differences up to so many tolerances may have grown from rounding."""


@dataclass(frozen=True)
class Runs:
    """Both runs, and how far they are apart."""

    one: RunRecord
    many: RunRecord
    found: Comparison
    tolerance: float

    def differ(self, one: float, many: float) -> bool:
        return relative(one, many) > self.tolerance

    @property
    def shared_steps(self) -> range:
        return range(min(self.one.steps, self.many.steps))

    @property
    def first_loss_differs(self) -> bool:
        return self.differ(self.one.losses[0].value, self.many.losses[0].value)

    @property
    def ratio(self) -> float:
        """How many times as large as one process's the first gradient is."""
        return self.many.gradient(0) / self.one.gradient(0) if self.one.gradient(0) else 0.0


def likely_cause(one: RunRecord, many: RunRecord, found: Comparison, tolerance: float) -> str:
    """One or two sentences: what is wrong, and what to do."""
    runs = Runs(one, many, found, tolerance)
    return next(cause for check in CHECKS if (cause := check(runs)))


def _start(runs: Runs) -> str:
    if not runs.found.start:
        return ""
    return (
        f"the parameters differ before the first step ({runs.found.start}): every run starts from another model;"
        " make it after init(), or set torch.manual_seed() before"
    )


def _not_finite(runs: Runs) -> str:
    for loss in runs.one.losses:
        if relative(loss.value, loss.value) > 0:
            return (
                f"the loss of one process is {loss.value} at step {loss.step}: that training diverges, and cannot be"
                " compared; use a smaller learning rate or fewer --steps"
            )
    return ""


def _samples(runs: Runs) -> str:
    for step in runs.shared_steps:
        if cause := which_samples(runs.one, runs.many, step):
            return f"step {step + 1}: {cause}"
    return ""


def _steps(runs: Runs) -> str:
    one, many = runs.found.steps
    if one == many:
        return ""
    return (
        f"one process took {one} steps, {runs.many.world_size} took {many}: the data of an epoch is divided by the"
        " number of ranks once too often, or too seldom; the global batch must be the same"
    )


def _losses_told(runs: Runs) -> str:
    if runs.found.losses_told:
        return ""
    one, many = ([loss.step for loss in run.losses] for run in (runs.one, runs.many))
    odd = sorted({*one} ^ {*many})
    where = f"step {odd[0]} is among those of one alone" if odd else "they are in another order"
    return (
        f"one process reported {len(one)} losses, {runs.many.world_size} reported {len(many)} ({where}): what was not "
        "reported cannot be compared; tell the loss after every step, on every rank"
    )


def _learning_rate(runs: Runs) -> str:
    for step in runs.shared_steps:
        one, many = runs.one.ranks[0].steps[step].lr, runs.many.ranks[0].steps[step].lr
        if runs.differ(one, many):
            return (
                f"step {step + 1}: the learning rate is {many:g} with {runs.many.world_size} processes and {one:g} with"
                " one; the global batch is the same, so the learning rate must not depend on the number of ranks"
            )
    return ""


def _unequal_batches(runs: Runs) -> str:
    for step in runs.shared_steps:
        sizes = [len(part) for part in runs.many.samples(step)]
        if len(set(sizes)) > 1 and runs.found.steps[0] == runs.found.steps[1]:
            return (
                f"step {step + 1}: the ranks have {', '.join(map(str, sizes))} samples, and their gradients are"
                " averaged as if these were equal; weight each rank's loss by its part (Loader.weights), or give"
                " all as many"
            )
    return ""


def _told_by_some(runs: Runs) -> str:
    told, world = runs.many.tellers, runs.many.world_size
    if len(told) == world or not runs.first_loss_differs or abs(runs.ratio - 1) > runs.tolerance:
        return ""
    ranks = f"rank {told[0]}" if len(told) == 1 else f"ranks {', '.join(map(str, told))}"
    return (
        f"only {ranks} of {world} told a loss, and it is that of its own part of the batch; the gradients agree:"
        " tell the loss on every rank, not behind `if rank == 0`"
    )


def _drifted(runs: Runs) -> str:
    if runs.many.apart is None:
        return ""
    name, rank = runs.many.apart
    return (
        f"the ranks hold different parameters at the end: {name} of rank {rank} is not that of rank 0, so their"
        " gradients are not averaged; call the model that parallelize() returned, and change no parameter on"
        " one rank alone"
    )


def _layers(runs: Runs) -> str:
    if not runs.first_loss_differs:
        return ""
    model, told = runs.many.ranks[0], []
    if model.batch_norm:
        told.append(
            f"{_some(model.batch_norm)} (BatchNorm) looks at the samples of its own rank only: use SyncBatchNorm on"
            " GPUs, or GroupNorm or LayerNorm"
        )
    if model.dropout:
        told.append(
            f"{_some(model.dropout)} (Dropout) draws other numbers on each rank: prove the script with dropout 0"
        )
    return "the first loss differs, on the same samples: " + "; ".join(told) if told else ""


def _scale(runs: Runs) -> str:
    world, ratio = runs.many.world_size, runs.ratio
    also = ", as is the loss it tells" if runs.first_loss_differs else "; the loss itself agrees"
    if abs(ratio / world - 1) < NEAR:
        return (
            f"the first gradient is {world} times that of one process{also}: gradients are summed over the {world}"
            " ranks instead of averaged; take the mean over the rank's own samples as loss, and do not multiply by the"
            " number of ranks"
        )
    if abs(ratio * world - 1) < NEAR:
        return (
            f"the first gradient is 1/{world} of that of one process{also}: it is divided by the number of ranks twice;"
            " DDP and FSDP average gradients already, so do not divide the loss or the gradients by it"
        )
    return ""


def _first_step(runs: Runs) -> str:
    if runs.first_loss_differs:
        one, many = runs.one.losses[0].value, runs.many.losses[0].value
        return (
            f"the first loss differs, on the same samples and parameters: {one:.6g} with one process, {many:.6g} with"
            f" {runs.many.world_size}; it depends on how the batch is split, or on random numbers: take a mean over the"
            " samples (the ranks' part of it), and draw what is random from each sample's own seed"
        )
    if runs.differ(runs.one.gradient(0), runs.many.gradient(0)):
        return (
            f"the first loss agrees, and the first gradient is {runs.ratio:.6g} times that of one process: something"
            " changes gradients between backward() and the optimizer's step on each rank by itself, as clipping the"
            " gradients of one rank's shards does"
        )
    return ""


def _rounding(runs: Runs) -> str:
    worst = max(runs.found.losses.relative, runs.found.parameters.relative)
    if worst > ROUNDING * runs.tolerance:
        return ""
    return (
        f"all agree at the first step, and differ by {worst:.1e} at most: rounding that grew;"
        " use --dtype float64, fewer --steps, or say which --tolerance is good enough"
    )


def _unknown(runs: Runs) -> str:
    return (
        "samples, learning rate, first loss and first gradient agree, and then the runs part: look for what depends on"
        " the rank or on the number of ranks in the optimizer, in clipping, or between steps"
    )


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


CHECKS: tuple[Callable[[Runs], str], ...] = (
    *(_start, _not_finite, _samples, _steps, _losses_told, _learning_rate, _unequal_batches),
    *(_told_by_some, _drifted, _scale, _layers, _first_step, _rounding, _unknown),
)
"""In the order of a run; the last always finds something."""
