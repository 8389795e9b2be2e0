"""The batches of a rank: each sample once an epoch, resumable at any batch, at any number of ranks and workers.

The batch is stated for the whole job, so that another number of ranks trains on the same batches: of
`global_batch=512` each of 8 ranks gets 64. A checkpoint stores one number: how many samples of this epoch were read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.distributed
import torch.utils.data

from shoal.train.data.order import BLOCK, WINDOW, SampleOrder, rank_share
from shoal.train.errors import DataError
from shoal.train.stop import hold_stop_signals, worker_signals

Tail = Literal["pad", "drop"]


class Dataset(Protocol):
    """Any map-style dataset. `lengths`, `fingerprint`, `place` and `__getitems__` are used where it has them."""

    def __len__(self) -> int: ...

    def __getitem__(self, id: int, /) -> Any: ...


class Loader:
    """The batches of one rank. Iterate over it once an epoch; it moves on to the next epoch at the end of each.

    `global_batch` seldom divides the number of samples. With `tail="pad"` every sample comes exactly once, and the last
    batch is filled up with samples of the epoch's beginning, for which `loader.mask` is False and `loader.weights` 0;
    all ranks always have batches of the same size. With `tail="drop"` the rest is left out.

    Where samples are dicts, each has a `__seed__` that depends on the seed, the epoch and the sample alone: a random
    augmentation drawn from it is the same in a resumed run, and at any number of ranks and workers.

    A loop that is left before its end goes on where it stopped when the loader is iterated over again.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        global_batch: int,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        shuffle: bool = True,
        tail: Tail = "pad",
        decode: Callable[[Any], Any] | None = None,
        collate: Callable[[list[Any]], Any] | None = None,
        workers: int = 0,
        prefetch: int = 2,
        worker_init: Callable[[int], None] | None = None,
        pin_memory: bool = False,
        context: str | None = None,
        block: int = BLOCK,
        window: int = WINDOW,
    ) -> None:
        """`decode` makes of a sample what `collate` makes a batch of; both run in the workers.

        rank, world_size: by default those of torch.distributed.
        worker_init: called in each worker with its number. Workers outlive the signals that stop a job (`stop.py`).
        context: how workers are started: "fork", "forkserver" or "spawn".
        block, window: see `order.py`; fewer and smaller reads against better mixing.
        """
        self.rank, self.world_size = _find_rank(rank, world_size)
        self.global_batch, self.seed, self.tail = global_batch, seed, tail
        self._dataset = dataset
        self._shuffle, self._block, self._window = shuffle, block, window
        self._check()
        self._epoch = self._position = self._real = 0
        self._lap = 0
        self._order: tuple[int, SampleOrder] = (-1, SampleOrder([], 0, 0))
        self._batches = torch.utils.data.DataLoader(
            _Fetch(dataset, decode),
            batch_sampler=_Batches(self),
            collate_fn=collate or torch.utils.data.default_collate,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            persistent_workers=workers > 0,
            worker_init_fn=partial(_init_worker, worker_init),
            pin_memory=pin_memory,
            multiprocessing_context=context if workers else None,
            # DataLoader draws a number at each start. From torch's own generator, a resumed run would draw once more
            # than an uninterrupted one, and its dropout would differ from there on.
            generator=torch.Generator(),
        )

    def __len__(self) -> int:
        """Batches in a whole epoch."""
        return self._batches_in(len(self._dataset))

    @property
    def epoch(self) -> int:
        """The epoch that the next batch is of."""
        return self._epoch

    @property
    def position(self) -> int:
        """Samples of this epoch that were returned, over all ranks."""
        return self._position

    @property
    def remaining(self) -> int:
        """Batches of this epoch that were not returned yet."""
        return self._batches_in(max(0, len(self._dataset) - self._position))

    def _batches_in(self, samples: int) -> int:
        return samples // self.global_batch if self.tail == "drop" else -(-samples // self.global_batch)

    @property
    def mask(self) -> torch.Tensor:
        """Which samples of this rank's latest batch are real; all are, but in the last batch of an epoch."""
        start, stop = rank_share(0, self.global_batch, self.rank, self.world_size)
        return torch.arange(start, stop) < self._real

    @property
    def weights(self) -> torch.Tensor:
        """Weights for the losses of this rank's latest batch.

        `(losses * weights).sum()`, averaged over the ranks as DDP and FSDP average gradients, is the mean over the real
        samples of the global batch.
        """
        return self.mask * (self.world_size / max(1, self._real))

    def set_epoch(self, epoch: int) -> None:
        """Go to the start of an epoch. Does nothing within that epoch."""
        if epoch != self._epoch:
            self._move(epoch, 0)

    def state_dict(self) -> dict[str, Any]:
        """Where the data stands: batches handed out, not those that workers have read ahead. The same on every rank."""
        return {
            "epoch": self._epoch,
            "position": self._position,
            "seed": self.seed,
            "shuffle": self._shuffle,
            "block": self._block,
            "window": self._window,
            "samples": len(self._dataset),
            "fingerprint": str(getattr(self._dataset, "fingerprint", "")),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken. Ranks, workers and batch may differ; data and seed may not."""
        differences = [
            f"{name}={value!r} here, {state.get(name)!r} in the checkpoint"
            for name, value in self.state_dict().items()
            if name not in ("epoch", "position") and state.get(name) != value
        ]
        if differences:
            raise DataError(
                "cannot go on in the epoch: the checkpoint is of another order or of other data",
                found=", ".join(differences),
                fix="start the loader with the checkpoint's values on the same data, "
                "or do not load its data state, and begin a new epoch",
            )
        self._move(int(state["epoch"]), int(state["position"]))

    def close(self) -> None:
        """Stop the workers; iterating over the loader starts them again."""
        self._move(self._epoch, self._position)
        iterator = self._batches._iterator
        self._batches._iterator = None
        if iterator is not None:
            iterator._shutdown_workers()

    def __iter__(self) -> Iterator[Any]:
        self._lap += 1
        lap = self._lap
        samples = len(self._dataset)
        for batch in self._fetch_batches():
            self._real = min(self.global_batch, samples - self._position)
            # Counted before it is handed out: a checkpoint taken in the loop's body includes this batch.
            self._position += self._real
            yield batch
            if lap != self._lap:
                raise DataError(
                    "the loader was moved, or iterated over again, within a loop over it",
                    found=f"epoch {self._epoch}, position {self._position}",
                    fix="leave the loop before calling set_epoch or load_state_dict; give each loop its own Loader",
                )
        self._move(self._epoch + 1, 0)

    def _fetch_batches(self) -> Iterator[Any]:
        """DataLoader's batches, with an error that explains the death of a worker."""
        try:
            with hold_stop_signals():
                batches = iter(self._batches)
            yield from batches
        except RuntimeError as error:
            if not str(error).startswith("DataLoader worker (pid"):
                raise
            self.close()
            raise DataError(
                "a data worker died",
                found=str(error).strip(),
                fix="killed: too little memory, ask for more with --mem or use fewer workers or a smaller prefetch\n"
                "bus error: /dev/shm is full, see df /dev/shm",
            ) from None

    def _ids(self) -> Iterator[list[tuple[int, int]]]:
        """The samples of this rank's batches from here to the end of the epoch, each with its own seed."""
        order, position = self._current(), self._position
        # A batch that is not full ends the epoch: it is filled up, or left out.
        least = self.global_batch if self.tail == "drop" else 1
        while len(order) - position >= least:
            start, stop = rank_share(position, self.global_batch, self.rank, self.world_size)
            ids = order.ids(start, stop)
            yield list(zip(ids, order.seeds(ids), strict=True))
            position += self.global_batch

    def _current(self) -> SampleOrder:
        if self._order[0] != self._epoch:
            lengths = getattr(self._dataset, "lengths", None) or [len(self._dataset)]
            options = {"block": self._block, "window": self._window}
            self._order = self._epoch, SampleOrder(lengths, self.seed, self._epoch, shuffle=self._shuffle, **options)
        return self._order[1]

    def _move(self, epoch: int, position: int) -> None:
        self._epoch, self._position = epoch, position
        self._lap += 1

    def _check(self) -> None:
        if self.tail not in ("pad", "drop"):
            raise DataError(
                f"tail={self.tail!r} is not known", found="neither pad nor drop", fix='say tail="pad" or tail="drop"'
            )
        if self.global_batch < 1 or self.global_batch % self.world_size:
            near = max(1, round(self.global_batch / self.world_size)) * self.world_size
            raise DataError(
                f"global_batch={self.global_batch} cannot be shared equally by {self.world_size} ranks",
                found=f"{self.global_batch / self.world_size:g} samples a rank",
                fix=f"use a multiple of {self.world_size}, such as global_batch={near}",
            )
        samples = len(self._dataset)
        if samples == 0 or (self.tail == "drop" and samples < self.global_batch):
            raise DataError(
                f"the dataset gives not one batch of {self.global_batch}",
                found=f"{samples} samples",
                fix="check the list of shards" if samples == 0 else 'use tail="pad" or a smaller global_batch',
            )


class _Batches:
    """What DataLoader asks for the batches' ids, in the training process."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return self._loader._ids()


class _Fetch:
    """What DataLoader asks for a batch's samples, in a worker."""

    def __init__(self, dataset: Any, decode: Callable[[Any], Any] | None) -> None:
        self._dataset, self._decode = dataset, decode

    def __getitems__(self, batch: Sequence[tuple[int, int]]) -> list[Any]:
        ids = [id for id, _ in batch]
        get_items = getattr(self._dataset, "__getitems__", None)
        samples = get_items(ids) if get_items else [self._dataset[id] for id in ids]
        # A copy: the dataset may hand out dicts that it keeps.
        samples = [
            {**sample, "__seed__": seed} if isinstance(sample, dict) else sample
            for sample, (_, seed) in zip(samples, batch, strict=True)
        ]
        return [self._decode_sample(sample, id) for sample, id in zip(samples, ids, strict=True)]

    def _decode_sample(self, sample: Any, id: int) -> Any:
        try:
            return self._decode(sample) if self._decode else sample
        except Exception as error:
            place = getattr(self._dataset, "place", None)
            fields = [name for name in sample if not name.startswith("__")] if isinstance(sample, dict) else []
            raise DataError(
                f"decode failed on {place(id) if place else f'sample {id}'}",
                found=f"{type(error).__name__}: {error}"
                + (f"; the sample has the fields {', '.join(fields)}" if fields else ""),
                fix="repair or leave out the sample, or handle it in decode",
            ) from error


def _init_worker(then: Callable[[int], None] | None, worker: int) -> None:
    """What a worker does first."""
    worker_signals(worker)
    if then is not None:
        then(worker)


def _find_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """This process's rank and the world size. Never guessed: two ranks 0 would train on the same samples."""
    if (rank is None) != (world_size is None):
        raise DataError("rank and world_size go together", found="only one of them", fix="give both, or neither")
    if rank is None or world_size is None:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        if int(os.environ.get("WORLD_SIZE") or 1) > 1:
            raise DataError(
                "cannot tell which part of the data is this rank's",
                found=f"WORLD_SIZE={os.environ['WORLD_SIZE']}, and torch.distributed is not initialized",
                fix="call shoal.train.init() before making the Loader, or give it rank= and world_size=",
            )
        return 0, 1
    if not 0 <= rank < world_size:
        raise DataError(f"rank={rank} is not in a world of {world_size}", fix=f"ranks go from 0 to {world_size - 1}")
    return rank, world_size
