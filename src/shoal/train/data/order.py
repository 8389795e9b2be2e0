"""Which sample comes when: one global order from (seed, epoch), the same for any number of ranks and workers.

Samples are cut into blocks of neighbours, the blocks are shuffled, and the samples of each window of consecutive blocks
are shuffled among themselves: random enough to train on, while reading stays within a few regions of the shards. A
sample's position is its place in this order, which a checkpoint keeps; its id is its place in the dataset.

The keys that are sorted come from an arithmetic written out below, not from a random generator of torch or Python,
whose streams may change between releases: a run resumed after an upgrade goes on in the same order.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import torch

BLOCK = 512
"""Samples read as neighbours. Smaller mixes better, larger reads more sequentially."""

WINDOW = 16
"""Blocks whose samples are mixed with each other."""


class SampleOrder:
    """The order of one epoch over a dataset whose shards hold `lengths` samples."""

    def __init__(
        self,
        lengths: Sequence[int],
        seed: int,
        epoch: int,
        *,
        shuffle: bool = True,
        block: int = BLOCK,
        window: int = WINDOW,
    ) -> None:
        self.samples = sum(lengths)
        self._seed, self._epoch, self._shuffle = seed, epoch, shuffle
        starts, sizes = _blocks(lengths, block)
        if shuffle and starts:
            permutation = _mix(torch.arange(len(starts)), _salt(seed, epoch, "blocks")).argsort(stable=True).tolist()
            starts, sizes = [starts[at] for at in permutation], [sizes[at] for at in permutation]
        self._starts, self._sizes, self._window = starts, sizes, max(1, window)
        ends = list(accumulate(sizes))
        # Where each window begins in the order; a window is a whole number of blocks.
        self._edges = [0, *ends[self._window - 1 :: self._window]]
        if self._edges[-1] != self.samples:
            self._edges.append(self.samples)
        self._kept: tuple[int, list[int]] = (-1, [])

    def __len__(self) -> int:
        return self.samples

    def ids(self, start: int, stop: int) -> list[int]:
        """The samples at positions `start` to `stop`, in order. Past the end it begins again, as padding needs."""
        if self.samples == 0:
            return []
        ids: list[int] = []
        while len(ids) < stop - start:
            at = (start + len(ids)) % self.samples
            index = bisect_right(self._edges, at) - 1
            first = at - self._edges[index]
            ids += self._ids_of_window(index)[first : first + stop - start - len(ids)]
        return ids

    def seeds(self, ids: Sequence[int]) -> list[int]:
        """A number for each sample that depends on seed, epoch and sample alone: for random augmentation."""
        salt = _salt(self._seed, self._epoch, "samples")
        seeds: list[int] = (_mix(torch.tensor(ids, dtype=torch.int64), salt) & _POSITIVE).tolist()
        return seeds

    def _ids_of_window(self, index: int) -> list[int]:
        if self._kept[0] != index:
            window = slice(index * self._window, (index + 1) * self._window)
            blocks = zip(self._starts[window], self._sizes[window], strict=True)
            ids = torch.cat([torch.arange(start, start + size) for start, size in blocks])
            if self._shuffle:
                ids = ids[_mix(ids, _salt(self._seed, self._epoch, "window")).argsort(stable=True)]
            self._kept = (index, ids.tolist())
        return self._kept[1]


def rank_share(start: int, global_batch: int, rank: int, world_size: int) -> tuple[int, int]:
    """The positions that one rank takes of the global batch that starts at `start`.

    The ranks' parts side by side, in the order of ranks, are the global batch.
    """
    part = global_batch // world_size
    return start + rank * part, start + (rank + 1) * part


def _blocks(lengths: Sequence[int], block: int) -> tuple[list[int], list[int]]:
    """Where the blocks start and how long they are. A block never spans two shards; those of a shard are near equal."""
    starts: list[int] = []
    sizes: list[int] = []
    base = 0
    for length in lengths:
        pieces = -(-length // max(1, block))
        for piece in range(pieces):
            start, stop = length * piece // pieces, length * (piece + 1) // pieces
            starts.append(base + start)
            sizes.append(stop - start)
        base += length
    return starts, sizes


# The finalizer of splitmix64, in torch's signed 64-bit integers, whose products wrap around.
_POSITIVE = (1 << 63) - 1
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


def _mix(values: torch.Tensor, salt: int) -> torch.Tensor:
    mixed = (values + 1) * _GOLDEN ^ salt
    mixed = (mixed ^ _shift_right(mixed, 30)) * _FIRST
    mixed = (mixed ^ _shift_right(mixed, 27)) * _SECOND
    return mixed ^ _shift_right(mixed, 31)


def _shift_right(values: torch.Tensor, bits: int) -> torch.Tensor:
    """Shift to the right without dragging the sign along, as an unsigned number would."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _salt(seed: int, epoch: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{epoch}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)
