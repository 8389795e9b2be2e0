"""What the ranks of a job tell each other outside the training itself: tiny messages on a Gloo group of their own.

A group of its own, because collectives of one group must run in the same order on every rank: a checkpoint written by a
background thread beside the training's own all-reduces would otherwise deadlock the job sooner or later.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

PATIENCE = timedelta(minutes=30)
"""How long ranks wait for each other: a slow rank may be writing a large checkpoint to a busy disk."""


class Ranks:
    """All ranks of the job, or this process alone where torch.distributed is not initialized.

    Making one is collective: every rank makes its groups in the same order. One object serves one thread at a time.
    """

    def __init__(self, patience: timedelta = PATIENCE) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self.distributed else 0
        self.world_size: int = dist.get_world_size() if self.distributed else 1
        self.group: Any = dist.new_group(backend="gloo", timeout=patience) if self.distributed else None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the ranks."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def from_rank_zero(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if not self.distributed:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[no-any-return]

    def largest(self, *numbers: int) -> tuple[int, ...]:
        """For each number, the largest that any rank gave: one all-reduce of a few bytes."""
        if not self.distributed:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(tensor.tolist())
