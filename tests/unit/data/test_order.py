"""The order of training blocks: a pure function of (seed, epoch, position)."""

import time

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st

from data.loader import StepBatches
from data.order import ROUNDS, BlockOrder, permuted
from data.split import Split

SIZES = [1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 63, 64, 65, 255, 256, 257, 1000, 4096, 4097, 10007]


def keys_of(number):
    return np.random.default_rng(number).integers(0, 1 << 64, size=ROUNDS, dtype=np.uint64)


@pytest.mark.parametrize("size", SIZES)
@given(st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6))
@settings(max_examples=10, deadline=None)
def test_every_size_is_permuted_one_to_one_by_any_keys(size, words):
    image = permuted(np.arange(size), size, np.array(words, dtype=np.uint64))
    assert sorted(image.tolist()) == list(range(size))


def test_a_permutation_moves_nearly_everything():
    image = permuted(np.arange(1000), 1000, keys_of(0))

    assert (image == np.arange(1000)).sum() < 10  # one fixed point is expected
    assert abs(np.corrcoef(image, np.arange(1000))[0, 1]) < 0.1


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
    assert order.epoch_of(epoch * count) == epoch
    assert order.epoch_of(epoch * count + count - 1) == epoch


def test_epochs_differ_in_order_and_offset():
    order = BlockOrder(1000 * 16, 16, seed=5)
    count = order.blocks_per_epoch
    epochs = [np.array(order.items(epoch * count, count)) for epoch in range(6)]

    assert len({tuple((epoch // 16).tolist()) for epoch in epochs}) == 6
    assert len({int(epoch[0] % 16) for epoch in epochs}) > 2
    assert all(len(set((epoch % 16).tolist())) == 1 for epoch in epochs)


def test_the_order_depends_on_seed_and_sequence_alone():
    first = BlockOrder(5000, 8, seed=7)
    expected = first.items(0, 2000)
    np.random.seed(0)  # the global generator must play no part
    second = BlockOrder(5000, 8, seed=7)
    second.items(123456, 10)

    assert second.items(0, 2000) == expected
    assert BlockOrder(5000, 8, seed=8).items(0, 2000) != expected


def test_the_order_never_changes_between_versions():
    """A resumed run goes on with the order it began: these numbers are a promise."""
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
    global_batch, first_step, steps = 24, 5, 7
    order = BlockOrder(8 * 101, 8, seed=4)  # 100 blocks: a step crosses an epoch's end
    expected = [
        order.items((step - 1) * global_batch, global_batch)
        for step in range(first_step, first_step + steps)
    ]
    batch = global_batch // micro_batches
    shards = [
        iter(
            BatchSamplerShard(
                StepBatches(order, Split(global_batch, processes, micro_batches), first_step),
                num_processes=processes,
                process_index=rank,
                split_batches=True,
            )
        )
        for rank in range(processes)
    ]

    seen = []
    for _ in range(steps):
        pieces = [[next(shard) for shard in shards] for _ in range(micro_batches)]
        assert {len(piece) for row in pieces for piece in row} == {batch // processes}
        seen.append([start for row in pieces for piece in row for start in piece])

    assert seen == expected
