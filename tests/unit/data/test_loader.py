"""Windows of a stream of tokens, and the batches of training and of evaluation."""

from itertools import islice, pairwise

import numpy as np
import pytest
import torch

from data.loader import HeldOutBatches, StepBatches, Windows, window_loader
from data.order import BlockOrder
from data.split import Split
from data.token_file import TokenStream

IGNORED = -100


def counting_windows(tokens, block_size):
    """Token i is i, so that a window shows where it came from."""
    return Windows(TokenStream(np.arange(tokens, dtype=np.uint16)), block_size, IGNORED)


@pytest.mark.parametrize(("start", "length"), [(0, 31), (30, 1), (25, 6), (-1, 2), (99, 1)])
def test_a_window_past_the_end_of_a_part_is_an_index_error(start, length):
    part = TokenStream(np.arange(50), 10, 40)
    assert part.window(5, 25).tolist() == list(range(15, 40))
    with pytest.raises(IndexError, match="stream of 30 tokens"):
        part.window(start, length)


def test_targets_are_the_inputs_shifted_by_one_and_what_is_missing_is_ignored():
    """At the end of a text, and in a row without a window, whose token every vocabulary has."""
    (inputs, targets), _ = counting_windows(12, 8).__getitems__([0, 3, 8, 10, None])
    assert inputs.dtype == targets.dtype == torch.int64
    padding = [[0] * 8, [IGNORED] * 8]
    rows = [list(range(start, 12)) for start in (0, 3, 8, 10)]
    assert inputs.tolist() == [*((row[:-1] + padding[0])[:8] for row in rows), padding[0]]
    assert targets.tolist() == [*((row[1:] + padding[1])[:8] for row in rows), padding[1]]


@pytest.mark.parametrize("length", [2, 5, 8, 9, 16, 17, 34, 101])
@pytest.mark.parametrize(("block_size", "batch"), [(1, 3), (4, 1), (4, 6), (16, 4)])
def test_evaluation_takes_every_held_out_target_once(length, block_size, batch):
    windows = counting_windows(length, block_size)
    batches = HeldOutBatches(windows, None, batch)
    loaded = list(window_loader(windows, batches))
    counted = [t for (_, targets), _ in loaded for t in targets.flatten().tolist() if t != IGNORED]
    assert sorted(counted) == list(range(1, length))
    assert len(loaded) == len(batches)
    assert {tuple(inputs.shape) for (inputs, _), _ in loaded} == {(batch, block_size)}


def test_an_evaluation_spreads_its_blocks_evenly():
    windows = counting_windows(1001, 10)
    every, some = windows.in_order(None), windows.in_order(7)
    assert every == list(range(0, 1000, 10))
    assert len(some) == len(set(some)) == 7
    assert set(some) <= set(every)
    assert {(b - a) // 10 for a, b in pairwise(some)} == {14, 15}
    assert 1000 - some[-1] <= 150  # to the end of the text
    assert windows.in_order(7) == some
    assert windows.in_order(100) == windows.in_order(5000) == every


def test_training_begins_at_its_first_step_and_no_loading_draws_from_the_global_generator():
    windows, order = counting_windows(200, 8), BlockOrder(200, 8, seed=1)
    before = torch.get_rng_state()
    training = window_loader(windows, StepBatches(order, Split(4, 1, 2), first_step=3))
    inputs = torch.cat([inputs for (inputs, _), _ in islice(training, 6)])
    next(iter(window_loader(windows, HeldOutBatches(windows, None, 2))))
    assert inputs[:, 0].tolist() == order.items(2 * 4, 12)
    assert torch.equal(torch.get_rng_state(), before)
