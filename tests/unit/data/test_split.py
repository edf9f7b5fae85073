"""The division of a step: any number of processes takes any global batch, and no target is lost."""

from __future__ import annotations

from itertools import islice

import numpy as np
import pytest
import torch
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given, settings
from hypothesis import strategies as st

import streams
from data.columns import MASKED, PACKED
from data.documents import Documents
from data.loader import DocumentRows, StepBatches, Windows, window_loader
from data.split import Split
from data.token_file import TokenStream

IGNORED, BLOCK, BATCH = -100, 8, 7


@pytest.mark.parametrize(
    ("sequences", "micro", "parts", "micro_batch", "accumulation", "padding"),
    [
        # Sizes that divide: the micro-batch that is asked for.
        (12, None, 1, 12, 1, 0),
        (12, 3, 2, 3, 2, 0),
        (480, 12, 4, 12, 10, 0),
        # Others: smaller micro-batches, where that saves padding.
        (12, 5, 1, 4, 3, 0),
        (16, 4, 3, 3, 2, 2),
        (12, None, 5, 3, 1, 3),
        (31, 16, 1, 16, 2, 1),
        # Fewer sequences than processes.
        (3, None, 4, 1, 1, 1),
        (1, 8, 5, 1, 1, 4),
    ],
)
def test_a_step_is_divided_with_little_padding(
    sequences, micro, parts, micro_batch, accumulation, padding
):
    split = Split.of(sequences, micro, parts)
    assert (split.micro_batch, split.accumulation) == (micro_batch, accumulation)
    assert (split.padding, split.rows) == (padding, sequences + padding)


@given(st.integers(1, 300), st.none() | st.integers(1, 40), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_parts_differ_by_one_sequence_and_have_each_once(sequences, micro, parts):
    split = Split.of(sequences, micro, parts)
    items = list(range(sequences))

    batches = list(split.micro_batches(items))

    assert [one for batch in batches for one in batch if one is not None] == items
    assert [len(batch) for batch in batches] == [split.global_micro_batch] * split.accumulation
    size = split.micro_batch
    assert micro is None or size <= micro
    counts = [
        sum(one is not None for one in batch[at : at + size])
        for batch in batches
        for at in range(0, len(batch), size)
    ]
    assert max(counts) == size
    assert max(counts) - min(counts) <= 1
    if sequences % (parts * (micro or 1)) == 0:
        assert split.padding == 0
        assert size == (micro or sequences // parts)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """By name, what a run trains on: made anew for each process, as a stream is read once."""
    tokens = TokenStream(np.arange(700, dtype=np.uint16))
    lengths = np.array([9, 5, 6, 3, 2, 9, 7, 4, 8, 2])
    ends = np.cumsum(lengths)
    conversations = Documents(tokens, ends, np.stack([ends - lengths + 1, ends], 1).ravel())
    folder = tmp_path_factory.mktemp("text")
    source = streams.parquet_folder(folder / "a", "a")

    def streamed(masks: bool):
        corpus = streams.corpus(folder / str(masks), source, documents=MASKED if masks else PACKED)
        return Windows(corpus.train, BLOCK, IGNORED)

    return {
        "windows": lambda: Windows(tokens, BLOCK, IGNORED),
        "rows": lambda: DocumentRows(conversations, BLOCK, IGNORED, False),
        "packed": lambda: DocumentRows(conversations, BLOCK, IGNORED, True),
        "stream": lambda: streamed(False),
        "masked stream": lambda: streamed(True),
    }


def means_of(texts, name: str, split: Split, steps: int = 3) -> list[float]:
    """By step, the mean as a run computes it; the loss is the number of the target itself."""
    means = [0.0] * steps
    for rank in range(split.parts):
        windows = texts[name]()
        batches = StepBatches(windows.order(1, split.sequences), split, first_step=1)
        loader = window_loader(windows, batches)
        shard = BatchSamplerShard(batches, split.parts, rank, split_batches=True)
        count = steps * split.accumulation
        for number, items in enumerate(islice(shard, count)):
            (inputs, targets, *positions), share = loader.collate_fn(windows.__getitems__(items))
            assert inputs.shape == targets.shape == (split.micro_batch, BLOCK)
            counted = targets[targets != IGNORED].double()
            loss = counted.sum().item() / max(1, len(counted))
            step, _ = divmod(number, split.accumulation)
            means[step] += loss * share / split.accumulation / split.parts
            if positions:  # padding is one document
                padded = (targets == IGNORED).all(1)
                assert (positions[0][padded] == torch.arange(BLOCK)).all()
    return means


@pytest.mark.parametrize("split", [(1, 3), (3, 1), (2, 2), (5, 1), (9, 1)], ids=str)
@pytest.mark.parametrize("name", ["windows", "rows", "packed", "stream", "masked stream"])
def test_every_target_of_a_step_weighs_the_same(texts, name, split):
    expected = means_of(texts, name, Split(BATCH))
    assert means_of(texts, name, Split(BATCH, *split)) == pytest.approx(expected, rel=1e-12)


def test_equal_parts_have_the_share_that_they_had():
    """To the bit: 1 for windows."""
    windows = Windows(TokenStream(np.arange(700)), BLOCK, IGNORED)
    batches = StepBatches(windows.order(1, 12), Split(12, 1, 4), first_step=1)
    assert [share for _, share in islice(window_loader(windows, batches), 8)] == [1.0] * 8
