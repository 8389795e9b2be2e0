"""The loader: exactly once, the same order for any ranks and workers, and exact resume from any interruption."""

import os
import signal
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.cases import cases

from shoal.train.data import DataError, Loader, SampleOrder, ShardDataset, write_shards


class Numbers:
    """A dataset whose samples are their own ids."""

    def __init__(self, *lengths: int) -> None:
        self.lengths = list(lengths)

    def __len__(self) -> int:
        return sum(self.lengths)

    def __getitem__(self, id: int) -> int:
        return id


def loaders(dataset: Any, world_size: int, global_batch: int, **options: Any) -> list[Loader]:
    options = {"collate": list, "block": 4, "window": 3, **options}
    return [
        Loader(dataset, global_batch=global_batch, rank=rank, world_size=world_size, **options)
        for rank in range(world_size)
    ]


def run(ranks: list[Loader], batches: int | None = None) -> list[int]:
    """Run all ranks in step, as a job does, for some batches or to the end; the real samples in global order."""
    seen: list[int] = []
    iterators, step = [iter(loader) for loader in ranks], 0
    while step != batches:
        parts = [next(iterator, None) for iterator in iterators]
        if parts[0] is None:
            assert parts == [None] * len(parts), "ranks have different numbers of batches"
            break
        assert len({len(part) for part in parts if part is not None}) == 1, "ranks have batches of different sizes"
        for loader, part in zip(ranks, parts, strict=True):
            seen += [id for id, real in zip(part or [], loader.mask.tolist(), strict=True) if real]
        step += 1
    assert len({tuple(loader.state_dict().items()) for loader in ranks}) == 1, "ranks disagree on the position"
    return seen


shards = st.lists(st.integers(1, 25), min_size=1, max_size=5)


@given(shards, st.integers(0, 5), st.integers(0, 3), st.integers(1, 5), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_global_order_depends_only_on_seed_and_epoch(lengths, seed, epoch, world_size, part):
    ranks = loaders(Numbers(*lengths), world_size, world_size * part, seed=seed)
    for loader in ranks:
        loader.set_epoch(epoch)
    samples = sum(lengths)
    assert run(ranks) == SampleOrder(lengths, seed, epoch, block=4, window=3).ids(0, samples)
    assert {(loader.epoch, loader.position) for loader in ranks} == {(epoch + 1, 0)}


lives = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(0, 6)), max_size=5)


@given(shards, st.integers(0, 5), lives)
@settings(deadline=None, max_examples=100)
def test_interruptions_and_other_world_sizes_lose_and_repeat_no_sample(lengths, seed, lives):
    dataset = Numbers(*lengths)
    state = Loader(dataset, global_batch=1, seed=seed, block=4, window=3).state_dict()
    seen: list[int] = []
    epoch = 0
    for world_size, part, batches in [*lives, (2, 3, None)]:
        ranks = loaders(dataset, world_size, world_size * part, seed=seed)
        for loader in ranks:
            loader.load_state_dict(state)
        epoch = ranks[0].epoch
        if epoch == 0:
            seen += run(ranks, batches)
        state = ranks[-1].state_dict()
    assert seen == SampleOrder(lengths, seed, 0, block=4, window=3).ids(0, sum(lengths))


@given(st.integers(1, 40), st.integers(1, 4), st.integers(1, 4))
@settings(deadline=None, max_examples=60)
def test_weights_of_all_ranks_count_each_real_sample_once(samples, world_size, part):
    ranks = loaders(Numbers(samples), world_size, world_size * part)
    iterators = [iter(loader) for loader in ranks]
    total, batches = 0.0, 0
    for parts in zip(*iterators, strict=True):
        losses = [(torch.tensor(p) * loader.weights).sum() for p, loader in zip(parts, ranks, strict=True)]
        mean = float(sum(losses)) / world_size  # what DDP makes of the ranks' gradients
        real = min(world_size * part, samples - batches * world_size * part)
        total += mean * real
        batches += 1
    assert batches == len(ranks[0]) and total == pytest.approx(sum(range(samples)), rel=1e-4)


def test_dropped_last_batch_omits_the_end_of_the_order():
    ranks = loaders(Numbers(10), 2, 4, tail="drop")
    assert len(ranks[0]) == 2 and run(ranks) == SampleOrder([10], 0, 0, block=4, window=3).ids(0, 8)


def test_padded_batch_repeats_the_start_of_the_order_and_masks_the_padding():
    loader = Loader(Numbers(10), global_batch=4, collate=list)
    order = SampleOrder([10], 0, 0).ids(0, 10)
    *_, (last, mask) = [(batch, loader.mask.tolist()) for batch in loader]
    assert last == order[8:] + order[:2] and mask == [True, True, False, False]


def test_each_epoch_has_its_own_order_and_advances():
    loader = Loader(Numbers(30), global_batch=10, collate=list)
    first, second = ([id for batch in loader for id in batch] for _ in range(2))
    assert first != second
    loader.set_epoch(0)
    assert [id for batch in loader for id in batch] == first and loader.epoch == 1


def test_order_without_shuffle_is_that_of_the_dataset():
    assert run(loaders(Numbers(5, 6), 1, 4, shuffle=False)) == list(range(11))


def test_set_epoch_after_a_resume_keeps_the_position():
    loader = Loader(Numbers(30), global_batch=10, collate=list)
    next(iter(loader))
    again = Loader(Numbers(30), global_batch=10, collate=list)
    again.load_state_dict(loader.state_dict())
    again.set_epoch(0)
    assert again.position == 10 and len(list(again)) == 2


def test_interrupted_loop_continues_at_its_position():
    loader = Loader(Numbers(30), global_batch=10, collate=list)
    for _ in loader:
        break
    assert len(list(loader)) == 2


def test_checkpoint_of_the_last_batch_resumes_in_the_next_epoch():
    loader = Loader(Numbers(20), global_batch=10, collate=list)
    iterator = iter(loader)
    next(iterator), next(iterator)
    again = Loader(Numbers(20), global_batch=10, collate=list)
    again.load_state_dict(loader.state_dict())
    assert list(again) == [] and (again.epoch, again.position) == (1, 0)


def test_moving_the_loader_within_its_loop_is_rejected():
    loader = Loader(Numbers(30), global_batch=10, collate=list)
    with pytest.raises(DataError, match="moved, or iterated over again, within a loop"):
        for _ in loader:
            loader.set_epoch(3)


def test_torch_random_state_is_unchanged():
    # A resumed run iterates once more than an uninterrupted one: its dropout must not notice.
    torch.manual_seed(1)
    before = torch.get_rng_state()
    list(Loader(Numbers(30), global_batch=10))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.fixture
def data(tmp_path, monkeypatch) -> list[Path]:
    monkeypatch.setenv("SHOAL_INDEX_DIR", str(tmp_path / "cache"))
    samples = ({"__key__": f"{at:03d}", "cls": at} for at in range(50))
    return write_shards(tmp_path / "data", samples, per_shard=12)


def number(sample: dict[str, Any]) -> tuple[int, int]:
    return int(sample["cls"]), sample["__seed__"]


def test_workers_change_neither_order_nor_seeds_and_prefetch_is_not_counted(data):
    def take(workers: int, state: dict[str, Any] | None, batches: int) -> tuple[list[Any], dict[str, Any]]:
        loader = Loader(ShardDataset(data), global_batch=8, seed=3, workers=workers, decode=number, collate=list)
        if state is not None:
            loader.load_state_dict(state)
        seen = []
        for batch in islice(loader, batches):
            seen += [pair for pair, real in zip(batch, loader.mask.tolist(), strict=True) if real]
        state = loader.state_dict()
        loader.close()
        return seen, state

    whole, _ = take(0, None, 99)
    first, state = take(2, None, 2)
    assert state["position"] == 16
    rest, _ = take(1, state, 99)
    assert first + rest == whole and sorted(cls for cls, _ in whole) == list(range(50))
    assert len({seed for _, seed in whole}) == 50


def test_workers_survive_epochs_and_an_abandoned_loop(data):
    loader = Loader(ShardDataset(data), global_batch=10, seed=3, workers=2, decode=worker_and_number, collate=list)
    alone = Loader(ShardDataset(data), global_batch=10, seed=3, decode=worker_and_number, collate=list)
    pids: set[int] = set()
    for epoch in range(3):
        seen: list[int] = []
        while len(seen) < 50:
            for batch in loader:  # left after the second batch, with others under way
                seen += [at for _, at in batch]
                pids |= {pid for pid, _ in batch}
                if len(seen) == 20:
                    break
        alone.set_epoch(epoch)
        assert seen == [at for batch in alone for _, at in batch]
    loader.close()
    assert len(pids) == 2 and os.getpid() not in pids


def worker_and_number(sample: dict[str, Any]) -> tuple[int, int]:
    return os.getpid(), int(sample["cls"])


def test_worker_init_runs_in_each_worker(data, tmp_path):
    def started(worker: int) -> None:
        (tmp_path / f"worker-{worker}").touch()

    loader = Loader(ShardDataset(data), global_batch=10, workers=2, collate=list, worker_init=started)
    list(loader)
    loader.close()
    assert sorted(path.name for path in tmp_path.glob("worker-*")) == ["worker-0", "worker-1"]


@cases("number", "USR1", "USR2", "TERM")
def test_workers_survive_the_signals_of_slurm(number):
    """Sent by another process than the trainer, as slurmstepd does."""
    seen: list[int] = []
    loader = Loader(Numbers(40), global_batch=4, workers=2, prefetch=1, collate=list)
    for step, batch in enumerate(loader):
        if step == 1:
            pids = [str(worker.pid) for worker in loader._batches._iterator._workers]
            subprocess.run(["kill", f"-{number}", *pids], check=True)
        seen += batch
    loader.close()
    assert sorted(seen) == list(range(40))


def test_sample_seeds_do_not_modify_the_dataset():
    kept = [{"x": at} for at in range(4)]
    batch = next(iter(Loader(kept, global_batch=4)))
    assert set(batch) == {"x", "__seed__"} and kept == [{"x": at} for at in range(4)]


def test_any_map_style_dataset_works():
    dataset = torch.utils.data.TensorDataset(torch.arange(6.0), torch.arange(6))
    x, y = next(iter(Loader(dataset, global_batch=6)))
    assert torch.equal(x.long(), y) and sorted(y.tolist()) == list(range(6))


@cases("workers", 0, 1)
def test_sample_that_cannot_be_decoded_is_named(data, workers):
    def decode(sample: dict[str, Any]) -> object:
        return sample["jpg"]

    loader = Loader(ShardDataset(data[:1]), global_batch=2, shuffle=False, workers=workers, decode=decode)
    with pytest.raises(DataError) as caught:
        next(iter(loader))
    loader.close()
    assert (
        f"decode failed on sample '000' of {data[0]}\n"
        "  found: KeyError: 'jpg'; the sample has the fields cls\n"
        "  fix: repair or leave out the sample, or handle it in decode"
    ) in str(caught.value)


def test_killed_worker_is_explained_and_training_can_continue(data, tmp_path):
    def decode(sample: dict[str, Any]) -> int:
        if sample["__key__"] == "020" and not (tmp_path / "killed").exists():
            (tmp_path / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return int(sample["cls"])

    loader = Loader(ShardDataset(data), global_batch=8, shuffle=False, workers=1, decode=decode, collate=list)
    seen: list[int] = []
    with pytest.raises(DataError) as caught:
        for batch in loader:
            seen += batch
    assert str(caught.value).startswith("a data worker died\n  found: DataLoader worker (pid")
    assert "\n  fix: killed: too little memory, ask for more with --mem or" in str(caught.value)
    for batch in loader:
        seen += [at for at, real in zip(batch, loader.mask.tolist(), strict=True) if real]
    loader.close()
    assert seen == list(range(50))


def test_exception_in_collate_is_unchanged(data):
    def collate(batch: list[Any]) -> None:
        raise RuntimeError("shapes differ")

    loader = Loader(ShardDataset(data), global_batch=8, workers=1, collate=collate)
    with pytest.raises(RuntimeError, match="shapes differ") as caught:
        next(iter(loader))
    loader.close()
    assert not isinstance(caught.value, DataError)


refusals: list[tuple[Callable[[], object], str]] = [
    (
        lambda: Loader(Numbers(9), global_batch=10, rank=0, world_size=4),
        "global_batch=10 cannot be shared equally by 4 ranks\n  found: 2.5 samples a rank\n"
        "  fix: use a multiple of 4, such as global_batch=8",
    ),
    (
        lambda: Loader(Numbers(9), global_batch=10, tail="drop"),
        'the dataset gives not one batch of 10\n  found: 9 samples\n  fix: use tail="pad" or a smaller global_batch',
    ),
    (
        lambda: Loader(Numbers(), global_batch=10),
        "the dataset gives not one batch of 10\n  found: 0 samples\n  fix: check the list of shards",
    ),
    (
        lambda: Loader(Numbers(9), global_batch=1, rank=4, world_size=4),
        "rank=4 is not in a world of 4\n  fix: ranks go from 0 to 3",
    ),
    (
        lambda: Loader(Numbers(9), global_batch=1, rank=0),
        "rank and world_size go together\n  found: only one of them\n  fix: give both, or neither",
    ),
    (
        lambda: Loader(Numbers(9), global_batch=1, tail="keep"),  # type: ignore[arg-type]
        'tail=\'keep\' is not known\n  found: neither pad nor drop\n  fix: say tail="pad" or tail="drop"',
    ),
    (
        lambda: Loader(Numbers(9), global_batch=1, seed=1).load_state_dict(
            Loader(Numbers(8), global_batch=1).state_dict()
        ),
        "cannot go on in the epoch: the checkpoint is of another order or of other data\n"
        "  found: seed=1 here, 0 in the checkpoint, samples=9 here, 8 in the checkpoint\n"
        "  fix: start the loader with the checkpoint's values on the same data, or do not load its data state, and "
        "begin a new epoch",
    ),
]


@cases("call, text", *refusals)
def test_invalid_setting_is_rejected_with_the_fix(call, text):
    with pytest.raises(DataError) as caught:
        call()
    assert str(caught.value) == text


def test_position_in_other_shards_of_equal_size_is_rejected(tmp_path: Path) -> None:
    def loader(per_shard: int) -> Loader:
        samples = ({"__key__": str(number), "cls": number} for number in range(6))
        shards = write_shards(tmp_path / str(per_shard), samples, per_shard=per_shard)
        return Loader(ShardDataset(shards), global_batch=2)

    before = loader(2).state_dict()
    with pytest.raises(DataError, match=r"other data\n  found: fingerprint='\S+' here, '\S+' in the checkpoint\n"):
        loader(3).load_state_dict(before)


def test_rank_without_torch_distributed_is_rejected(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DataError) as caught:
        Loader(Numbers(9), global_batch=4)
    assert "found: WORLD_SIZE=4, and torch.distributed is not initialized\n" in str(caught.value)


def test_rank_comes_from_torch_distributed(tmp_path):
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        loader = Loader(Numbers(9), global_batch=4)
        assert (loader.rank, loader.world_size) == (0, 1)
    finally:
        torch.distributed.destroy_process_group()
