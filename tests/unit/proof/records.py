"""Records of runs for tests."""

from array import array
from collections.abc import Sequence

from shoal.proof.records import Loss, RankRecord, RunRecord, Step, StoredParameter

BATCH = tuple("abcdefgh")


def rank(
    number: int = 0,
    world: int = 1,
    *,
    samples: Sequence[Sequence[str]] = (BATCH, BATCH),
    losses: Sequence[float] = (2.0, 1.0),
    gradients: Sequence[float] = (9.0, 4.0),
    lr: float = 0.1,
    start: Sequence[float] = (1.0, 2.0),
    end: Sequence[float] = (3.0, 4.0),
    batch_norm: tuple[str, ...] = (),
    dropout: tuple[str, ...] = (),
) -> RankRecord:
    """A rank that did two steps; `gradients` are the sums of squares."""
    return RankRecord(
        number,
        world,
        "ddp",
        batch_norm,
        dropout,
        tuple(Step(lr, square, 0.0, tuple(seen)) for square, seen in zip(gradients, samples, strict=True)),
        {"progress": tuple(Loss(at + 1, value, len(samples[0])) for at, value in enumerate(losses))} if losses else {},
        {"w": repr(start)},
        {"w": StoredParameter(False, repr(end), memoryview(array("d", end)))},
    )


ONE = RunRecord((rank(),))


def many(world: int = 2, **each: object) -> RunRecord:
    """That many ranks, each with its part of the batch; `each` sets other fields."""
    size = len(BATCH) // world
    parts = [BATCH[at * size : (at + 1) * size] for at in range(world)]
    ranks = (rank(at, world, **{"samples": (parts[at], parts[at]), **each}) for at in range(world))  # type: ignore[arg-type]
    return RunRecord(tuple(ranks))


def reading(*parts: Sequence[str]) -> RunRecord:
    """Ranks that read these samples at the first step, and what they should at the second."""
    world = len(parts)
    right = many(world)
    samples = [(part, right.ranks[at].steps[1].samples) for at, part in enumerate(parts)]
    return RunRecord(tuple(rank(at, world, samples=samples[at], losses=(5.0, 6.0)) for at in range(world)))
