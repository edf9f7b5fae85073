"""Windows of a masked text: those of the packed one, with the places where documents begin."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import streams
from data.columns import MASKED, PACKED
from data.errors import DataError
from data.loader import HeldOutBatches, StepBatches, window_loader, windows_of
from data.split import Split
from data.token_file import TokenStream, positions_of
from model.head import IGNORED

BLOCK, BATCH = 16, 4


def begins_again(inputs: torch.Tensor, end: int) -> torch.Tensor:
    """Positions (B, T) of rows whose documents each end with the token `end`."""
    found = torch.zeros_like(inputs)
    for row in range(len(inputs)):
        for place in range(1, inputs.size(1)):
            ended = inputs[row, place - 1] == end
            found[row, place] = 0 if ended else found[row, place - 1] + 1
    return found


@settings(deadline=None, max_examples=50)
@given(st.lists(st.integers(1, 20), min_size=1, max_size=30), st.data())
def test_positions_begin_again_after_each_end(lengths, data):
    ends = np.cumsum(lengths)
    stream = TokenStream(np.arange(ends[-1]), ends=ends)
    first = data.draw(st.integers(0, int(ends[-1]) - 1))
    length = data.draw(st.integers(1, int(ends[-1]) - first))
    begins = [0, *ends.tolist()]
    expected = [
        place - max(first, max(begin for begin in begins if begin <= place))
        for place in range(first, first + length)
    ]
    for text, start in ((stream, first), (TokenStream(stream.tokens, first, ends=ends), 0)):
        tokens, begins = text.block(start, length)
        assert tokens.tolist() == list(range(first, first + length))
        assert positions_of(length, begins[begins < length]).tolist() == expected


def test_a_prepared_text_has_the_same_windows_with_positions(prepare, tmp_path):
    source = tmp_path / "rows.jsonl"
    texts = [f'{{"text": "{"ab" * (number % 9)}"}}\n' for number in range(200)]
    source.write_text("".join(texts))
    both = {}
    for documents in (PACKED, MASKED):
        corpus = prepare(source, tokenizer="bpe:260", documents=documents)
        windows = windows_of(corpus.train, BLOCK, IGNORED, pack=True)
        batches = StepBatches(windows.order(1, BATCH), Split(BATCH), first_step=1)
        held_out = windows_of(corpus.held_out, BLOCK, IGNORED, pack=True)
        loaders = (
            window_loader(windows, batches),
            window_loader(held_out, HeldOutBatches(held_out, None, BATCH)),
        )
        both[documents] = corpus, [next(iter(loader)) for loader in loaders]
    corpus, batches = both[MASKED]
    end = corpus.tokenizer.end_of_text
    for (packed, share), (masked, its_share) in zip(both[PACKED][1], batches, strict=True):
        assert share == its_share == 1.0
        assert packed[0].equal(masked[0])
        assert packed[1].equal(masked[1])
        assert len(packed) == 2
        assert masked[2].equal(begins_again(masked[0], end))
        assert (masked[2][:, 1:] == 0).any()
    assert corpus.info.fingerprint != both[PACKED][0].info.fingerprint


def test_blocks_of_a_stream_say_where_rows_begin(tmp_path):
    source = streams.lines_folder(tmp_path / "rows", "a")
    corpora = [
        streams.corpus(tmp_path / "cache", source, documents=documents, window_bytes=1500)
        for documents in (PACKED, MASKED)
    ]
    end, found = corpora[0].tokenizer.end_of_text, []
    for corpus in corpora:
        windows = windows_of(corpus.train, BLOCK, IGNORED, pack=True)
        batches = StepBatches(windows.order(0, BATCH), Split(BATCH), first_step=1)
        loader = iter(window_loader(windows, batches))
        found.append([next(loader)[0] for _ in range(60)])  # across windows and epochs
    for packed, masked in zip(*found, strict=True):
        assert packed[0].equal(masked[0])
        assert packed[1].equal(masked[1])
        assert masked[2].equal(begins_again(masked[0], end))
    held_out = windows_of(corpora[1].held_out, BLOCK, IGNORED, pack=True)
    (inputs, _, positions), _ = held_out.__getitems__(held_out.in_order(None)[:8])
    assert positions.equal(begins_again(inputs, end))


def test_a_model_that_mixes_documents_is_refused(tmp_path):
    stream = TokenStream(np.arange(90), ends=np.array([40, 90]))
    text = streams.corpus(
        tmp_path, streams.lines_folder(tmp_path / "rows", "a"), documents=MASKED
    ).train
    for masked in (stream, text):
        with pytest.raises(DataError, match=r"data\.documents=masked needs a model that keeps"):
            windows_of(masked, BLOCK, IGNORED, pack=False)
