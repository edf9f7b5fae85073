"""Rows of documents: none beyond its end, every target once an epoch, and each of equal weight."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import families
from data.documents import Documents, best_fit
from data.loader import DocumentRows, HeldOutBatches, window_loader
from data.token_file import TokenStream
from model.causal_lm import PACKING
from model.families import build_model
from model.head import IGNORED
from snapshot.disk.folder import read_json
from snapshot.disk.load import restore_weights
from snapshot.disk.model import model_config

LENGTHS = st.lists(st.integers(2, 17), min_size=1, max_size=40)
CONVERSATIONS = [5, 9, 3, 12, 7, 2, 10]
"""Tokens of each; every second one is a target."""


def text_of(lengths) -> Documents:
    """Documents of which every token is its own position in the text, and all may be targets."""
    ends = np.cumsum(lengths)
    targets = np.stack([ends - lengths + 1, ends], 1).ravel()
    return Documents(TokenStream(np.arange(ends[-1])), ends, targets)


def conversations(lengths=CONVERSATIONS, seed=0) -> Documents:
    ends = np.cumsum(lengths)
    tokens = np.random.default_rng(seed).integers(300, size=ends[-1])
    flags = np.concatenate([np.arange(length) % 2 for length in lengths])
    targets = np.flatnonzero(np.diff(flags, prepend=0, append=0))
    return Documents(TokenStream(tokens), ends, targets)


@settings(deadline=None)
@given(lengths=st.lists(st.integers(1, 50), max_size=200), capacity=st.integers(50, 80))
def test_every_piece_is_in_one_row_and_no_row_is_too_long(lengths, capacity):
    sizes = np.array(lengths, dtype=np.int64)
    rows = best_fit(sizes, capacity)
    used = np.bincount(rows, weights=sizes) if len(rows) else np.zeros(0)
    assert (used <= capacity).all()
    assert (used > 0).all()
    # Of two rows that are half empty, one would have gone into the other.
    assert (used * 2 <= capacity).sum() <= 1


@settings(deadline=None, max_examples=50)
@given(lengths=LENGTHS, block_size=st.integers(16, 20), pack=st.booleans())
def test_every_target_is_there_once_and_follows_its_input(lengths, block_size, pack):
    text = text_of(lengths)
    rows = DocumentRows(text, block_size, IGNORED, pack)
    firsts = np.concatenate(([0], text.ends[:-1])).tolist()
    expected = [token for token in range(text.ends[-1]) if token not in firsts]
    (inputs, targets, *positions), _ = rows.__getitems__(rows.in_order(None))
    used = targets != IGNORED
    assert sorted(targets[used].tolist()) == expected
    assert (inputs[used] + 1 == targets[used]).all()
    assert rows.target_count == len(expected)
    assert rows.targets.tolist() == used.sum(1).tolist()
    if pack:
        begins = (positions[0] == 0) & used
        assert begins.sum() == len(lengths)
    else:
        assert not positions


def test_positions_begin_again_with_documents_and_padding():
    rows = DocumentRows(text_of([4, 3]), 8, IGNORED, pack=True)
    (inputs, targets, positions), _ = rows.__getitems__(rows.in_order(None))
    assert inputs.tolist() == [[0, 1, 2, 4, 5, 0, 0, 0]]
    assert targets.tolist() == [[1, 2, 3, 5, 6, IGNORED, IGNORED, IGNORED]]
    assert positions.tolist() == [[0, 1, 2, 0, 1, 0, 1, 2]]


@pytest.mark.parametrize("pack", [False, True])
def test_the_order_is_a_function_of_seed_and_position(pack):
    rows = DocumentRows(conversations(CONVERSATIONS * 9), 12, IGNORED, pack)
    order = rows.order(seed=3, global_batch_size=4)
    every = [row for row, _ in order.items(0, 4 * len(rows))]
    for epoch in range(4):
        assert sorted(every[epoch * len(rows) : (epoch + 1) * len(rows)]) == list(range(len(rows)))
    assert [row for row, _ in order.items(40, 8)] == every[40:48]
    assert order.epoch_of(len(rows)) == 1
    other = rows.order(seed=4, global_batch_size=4)
    assert [row for row, _ in other.items(0, 4 * len(rows))] != every


def test_an_evaluation_takes_each_row_once():
    rows = DocumentRows(conversations(), 12, IGNORED, pack=False)
    batches = HeldOutBatches(rows, None, 4)
    found = [targets for (_, targets), _ in window_loader(rows, batches)]
    assert len(found) == 2
    assert sum(int((one != IGNORED).sum()) for one in found) == rows.target_count
    assert (found[1][3] == IGNORED).all()
    assert len(rows.in_order(3)) == 3


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    root = tmp_path_factory.mktemp("bases")
    return {name: families.make(name, root / name.replace(" ", "-")) for name in families.FAMILIES}


def model_of(folder):
    path = folder / "config.json"
    model = build_model(model_config(read_json(path), str(path))).eval()
    restore_weights(folder, model)
    return model


@pytest.mark.parametrize("family", families.FAMILIES)
@torch.no_grad()
def test_a_packed_batch_has_the_loss_of_its_conversations(bases, family):
    model = model_of(bases[family])
    assert model.config.can_pack
    text = conversations()
    rows = DocumentRows(text, 24, IGNORED, pack=True)
    assert len(rows) == 2 < len(CONVERSATIONS)
    batch, _ = rows.__getitems__(rows.in_order(None))
    found = model(*batch).item()
    alone = DocumentRows(text, 24, IGNORED, pack=False)
    total = 0.0
    for item in alone.in_order(None):
        (inputs, targets), _ = alone.__getitems__([item])
        used = int(text.ends[item[0]] - (text.ends[item[0] - 1] if item[0] else 0)) - 1
        count = int((targets != IGNORED).sum())
        total += model(inputs[:, :used], targets[:, :used]).item() * count
    assert found == pytest.approx(total / alone.target_count, abs=1e-5)


SMALL = {**families.ROTARY, "pad_token_id": None}
GPT2_SMALL = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_inner": 48, "vocab_size": 320}
BY_DISTANCE = {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 320}


@pytest.mark.parametrize("family", PACKING)
@torch.no_grad()
def test_no_document_sees_its_neighbour(family):
    """In each family that packs: what comes before in the row changes nothing."""
    torch.manual_seed(0)
    sizes = GPT2_SMALL if family == "gpt2" else SMALL
    model = build_model(model_config({**sizes, "model_type": family}, family)).eval()
    assert model.config.can_pack
    positions = torch.cat([torch.arange(9), torch.arange(7)])[None]
    first, other, second = (torch.randint(300, (1, size)) for size in (9, 9, 7))
    alone = model(second)
    for before in (first, other):
        packed = model(torch.cat([before, second], 1), positions=positions)[:, 9:]
        assert (packed - alone).abs().max() < 1e-5


UNABLE = {
    "mamba": {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4},
    "bloom": {"model_type": "bloom", **BY_DISTANCE},
    "opt, whose mask ignores positions": {"model_type": "opt", **SMALL},
    "a rotation that grows with the batch": {
        "model_type": "llama",
        **SMALL,
        "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0},
    },
}


@pytest.mark.parametrize("name", UNABLE)
def test_a_model_that_mixes_documents_gets_one_a_row(name):
    with torch.device("meta"):
        model = build_model(model_config({**UNABLE[name], "vocab_size": 320}, name))
    assert not model.config.can_pack
