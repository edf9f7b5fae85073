"""The order of training blocks: a pure function of (seed, epoch, position)."""

import time

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import StepBatches
from data.order import BlockOrder, permuted
from data.split import Split

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4096, 4097, 10007]


@pytest.mark.parametrize("size", SIZES)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
@settings(max_examples=10, deadline=None)
def test_every_size_is_permuted_one_to_one_by_any_keys(size, words):
    image = permuted(np.arange(size), size, np.array(words, dtype=np.uint64))
    assert sorted(image.tolist()) == list(range(size))


@given(st.integers(1, 12), st.integers(1, 400), st.integers(0, 2**32), st.integers(0, 40))
@settings(max_examples=150, deadline=None)
def test_every_epoch_has_each_block_once_inside_the_text(block_size, more, seed, epoch):
    tokens = block_size + more
    order = BlockOrder(tokens, block_size, seed)
    count = order.blocks_per_epoch
    starts = np.sort(order.items(epoch * count, count))
    assert (np.diff(starts) == block_size).all()  # each once, side by side
    assert 0 <= starts[0] < block_size
    assert starts[-1] + block_size + 1 <= tokens  # with the token after the last block
    assert count >= max(1, (tokens - 1) // block_size - 1)  # at most one block is left out
    assert order.epoch_of(epoch * count) == order.epoch_of((epoch + 1) * count - 1) == epoch


def test_epochs_and_seeds_differ_in_order_and_offset():
    order = BlockOrder(1000 * 16, 16, seed=5)
    count = order.blocks_per_epoch
    epochs = [np.array(order.items(epoch * count, count)) for epoch in range(6)]
    epochs.append(np.array(BlockOrder(1000 * 16, 16, seed=6).items(0, count)))
    assert len({tuple((epoch // 16).tolist()) for epoch in epochs}) == 7
    assert len({int(epoch[0] % 16) for epoch in epochs}) > 2
    assert all(len(set((epoch % 16).tolist())) == 1 for epoch in epochs)
    for epoch in epochs:  # it moves nearly everything: one fixed point is expected
        assert (epoch // 16 == np.arange(count)).sum() < 10
        assert abs(np.corrcoef(epoch, np.arange(count))[0, 1]) < 0.1


def test_the_order_never_changes_between_versions():
    """A resumed run continues the order that it began: these numbers are a promise."""
    order = BlockOrder(1000, 8, seed=1)
    assert order.items(0, 6) == [217, 593, 537, 425, 369, 785]
    assert order.items(1_000_000, 6) == [410, 770, 418, 578, 90, 186]


@given(st.integers(9, 200), st.integers(0, 300), st.integers(1, 60))
@settings(max_examples=50, deadline=None)
def test_a_range_is_its_sequences_one_by_one_across_epochs(tokens, first, count):
    order = BlockOrder(tokens, 8, seed=2)
    single = [order.items(sequence, 1)[0] for sequence in range(first, first + count)]
    assert order.items(first, count) == single


def test_starting_late_costs_what_starting_at_once_costs():
    batch, block_size = 16, 64
    order = BlockOrder(block_size * ((1 << 20) + 1), block_size, seed=1)

    def seconds(first_step, steps=100):
        began = time.perf_counter()
        batches = iter(StepBatches(order, Split(batch), first_step))
        for _ in range(steps):
            next(batches)
        return time.perf_counter() - began

    pairs = [(seconds(1), seconds(1_000_000)) for _ in range(15)]  # interleaved, least noise wins
    early, late = (min(times) for times in zip(*pairs, strict=True))
    assert late / early <= 1.2


@pytest.mark.parametrize("processes", [1, 2, 4])
@pytest.mark.parametrize("micro_batches", [1, 2, 3])
def test_a_step_takes_the_same_sequences_however_it_is_split(processes, micro_batches):
    global_batch, first_step = 24, 5
    order = BlockOrder(8 * 101, 8, seed=4)  # 100 blocks: a step crosses an epoch's end
    split = Split(global_batch, processes, micro_batches)
    shards = [
        iter(BatchSamplerShard(StepBatches(order, split, first_step), processes, rank, True))
        for rank in range(processes)
    ]
    for step in range(first_step, first_step + 7):
        parts = [next(shard) for _ in range(micro_batches) for shard in shards]
        assert {len(part) for part in parts} == {global_batch // micro_batches // processes}
        expected = order.items((step - 1) * global_batch, global_batch)
        assert [start for part in parts for start in part] == expected
