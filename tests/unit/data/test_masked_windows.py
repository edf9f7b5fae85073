"""Windows of a masked text: those of the packed one, with the places where documents begin."""

from __future__ import annotations

from itertools import islice

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
    positions = torch.zeros_like(inputs)
    for row in range(len(inputs)):
        for place in range(1, inputs.size(1)):
            ended = inputs[row, place - 1] == end
            positions[row, place] = 0 if ended else positions[row, place - 1] + 1
    return positions


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


@pytest.fixture
def corpora(request, prepare, tmp_path):
    """A text, packed and masked; of a stream, windows and epochs are shorter than the run."""

    def corpus_of(documents: str):
        if request.param == "prepared":
            return prepare(folder / "part-0.jsonl", tokenizer="bpe:260", documents=documents)
        options = {"documents": documents, "window_bytes": 1500, "held_out_bytes": 100_000}
        return streams.corpus(tmp_path / "cache", folder, **options)

    folder = streams.lines_folder(tmp_path / "rows", "a", rows=80)
    return [corpus_of(documents) for documents in (PACKED, MASKED)]


@pytest.mark.parametrize("corpora", ["prepared", "streamed"], indirect=True)
def test_a_masked_text_has_the_windows_of_the_packed_one_with_positions(corpora):
    batches = []
    for corpus in corpora:
        train = windows_of(corpus.train, BLOCK, IGNORED, pack=True)
        steps = window_loader(train, StepBatches(train.order(1, BATCH), Split(BATCH), 1))
        held_out = windows_of(corpus.held_out, BLOCK, IGNORED, pack=True)
        evaluation = window_loader(held_out, HeldOutBatches(held_out, 8, BATCH))
        batches.append([*islice(steps, 120), *evaluation])
    end = corpora[0].tokenizer.end_of_text
    for (packed, share), (masked, its_share) in zip(*batches, strict=True):
        assert share == its_share == 1.0
        assert len(packed) == 2
        assert masked[0].equal(packed[0])
        assert masked[1].equal(packed[1])
        assert masked[2].equal(begins_again(masked[0], end))
    assert any((masked[2][:, 1:] == 0).any() for masked, _ in batches[1])


@pytest.mark.parametrize("corpora", ["prepared", "streamed"], indirect=True)
def test_a_model_that_mixes_documents_is_refused(corpora):
    with pytest.raises(DataError, match=r"data\.documents=masked needs a model that keeps"):
        windows_of(corpora[1].train, BLOCK, IGNORED, pack=False)


@pytest.mark.parametrize("corpora", ["prepared"], indirect=True)
def test_a_prepared_text_that_is_masked_has_a_fingerprint_of_its_own(corpora):
    packed, masked = (corpus.info.fingerprint for corpus in corpora)
    assert packed != masked
