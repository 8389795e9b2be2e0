"""The global order: a permutation that depends on seed and epoch alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from shoal.train.data.order import SampleOrder, rank_share

lengths = st.lists(st.integers(0, 60), max_size=8)
blocks = st.integers(1, 20)
windows = st.integers(1, 5)


@given(lengths, st.integers(), st.integers(0, 99), blocks, windows, st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_sample_occurs_exactly_once(lengths, seed, epoch, block, window, shuffle):
    order = SampleOrder(lengths, seed, epoch, block=block, window=window, shuffle=shuffle)
    ids = order.ids(0, len(order))
    assert sorted(ids) == list(range(sum(lengths)))
    assert shuffle or ids == sorted(ids)


@given(lengths.filter(any), st.integers(0, 9), blocks, windows, st.data())
@settings(deadline=None, max_examples=60)
def test_any_slice_equals_the_slice_of_the_whole(lengths, seed, block, window, data):
    whole = SampleOrder(lengths, seed, 0, block=block, window=window)
    ids = whole.ids(0, len(whole))
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    assert SampleOrder(lengths, seed, 0, block=block, window=window).ids(start, stop) == ids[start:stop]


@given(st.integers(0, 500), st.integers(1, 6), st.integers(1, 6))
def test_rank_shares_form_the_global_batch(start, part, world_size):
    parts = [range(*rank_share(start, part * world_size, rank, world_size)) for rank in range(world_size)]
    assert [at for positions in parts for at in positions] == list(range(start, start + part * world_size))
    assert {len(positions) for positions in parts} == {part}


def test_order_wraps_around_at_its_end():
    order = SampleOrder([3], 0, 0)
    assert order.ids(1, 8) == (order.ids(0, 3) * 3)[1:8]


def test_seeds_and_epochs_give_different_orders():
    orders = {tuple(SampleOrder([400], seed, epoch).ids(0, 400)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16


def test_order_is_stable_across_releases():
    # A run that is resumed after an upgrade must go on in the order in which it began.
    order = SampleOrder([5, 4, 3], seed=7, epoch=2, block=2, window=2)
    assert order.ids(0, 12) == [5, 2, 1, 6, 9, 7, 8, 0, 11, 10, 4, 3]
    assert order.seeds([0, 11]) == [5728700923670144263, 3832291074651665841]


def test_reading_stays_within_a_window_of_blocks():
    order = SampleOrder([1000] * 4, 1, 0, block=100, window=4)
    for start in range(0, 4000, 400):
        assert len({id // 100 for id in order.ids(start, start + 400)}) == 4


def test_neighbours_of_a_sample_change_between_epochs():
    def neighbours(epoch: int) -> set[int]:
        ids = SampleOrder([4096], 3, epoch, block=64, window=4).ids(0, 4096)
        at = ids.index(0) // 256 * 256
        return set(ids[at : at + 256])

    assert len(neighbours(0) & neighbours(1)) < 256


def test_each_sample_has_its_own_seed_in_each_epoch():
    seeds = [seed for epoch in range(3) for seed in SampleOrder([1000], 5, epoch).seeds(range(1000))]
    assert len(set(seeds)) == 3000 and all(0 <= seed < 2**63 for seed in seeds)


def test_first_positions_are_uniform():
    # 2000 orders of 8 samples: each sample leads about 250 of them (standard deviation 15).
    leads = [SampleOrder([8], seed, 0).ids(0, 1)[0] for seed in range(2000)]
    assert all(abs(leads.count(id) - 250) < 75 for id in range(8))
