"""Small messages between the ranks outside of training, on a Gloo group of their own.

A separate group, because collectives of one group must run in the same order on every rank: a checkpoint that a
background thread writes during the training's all-reduces would otherwise deadlock the job.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(minutes=30)
"""Long, since a slow rank may be writing a large checkpoint to a busy disk."""


class RankGroup:
    """All ranks of the job, or only this process if torch.distributed is not initialized.

    The constructor is collective: every rank creates its groups in the same order. Use an object from one thread at a
    time.
    """

    def __init__(self, timeout: timedelta = COLLECTIVE_TIMEOUT) -> None:
        self.distributed = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if self.distributed else 0
        self.world_size: int = dist.get_world_size() if self.distributed else 1
        self.group: Any = dist.new_group(backend="gloo", timeout=timeout) if self.distributed else None

    def gather(self, value: T) -> list[T]:
        """Every rank's value, on every rank, in the order of the ranks."""
        if not self.distributed:
            return [value]
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""
        if not self.distributed:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=self.group)
        return values[0]  # type: ignore[no-any-return]

    def max_over_ranks(self, *numbers: int) -> tuple[int, ...]:
        """For each number its maximum over all ranks: one all-reduce of a few bytes."""
        if not self.distributed:
            return numbers
        tensor = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.group)
        return tuple(tensor.tolist())
