"""What each process has of matrices and sequences, as a trace's page says it."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

import families
from model.context import Context
from model.families import build_model
from model.gpt import GPTConfig
from model.tensor import TensorGroup
from process_groups import Group
from snapshot.disk.model import model_config
from tracing.parts import REST, Shares, held_by, matrices, shares

SIZES = GPTConfig(vocab_size=10, block_size=16, n_layer=2, n_head=4, n_embd=8)
LLAMA = model_config(dict(families.FAMILIES["llama"]), "llama")


def held(config, length: int = 16, tensor: int = 1, context: int = 1, by_heads: bool = False):
    """What each of tensor x context processes says, as JSON has it."""
    found = {}
    for rank in range(tensor * context):
        with torch.device("meta"):
            model = build_model(config)
        if tensor > 1:
            model.share_matrices(TensorGroup(Group(tensor, rank % tensor)))
            model.mark_cuts()
        if context > 1:
            model.share_context(Context(Group(context, rank // tensor), by_heads))
        found[rank] = json.loads(json.dumps(held_by(model, length)))
    return found


def owned(matrix) -> np.ndarray:
    """How many processes have each number of a matrix."""
    counts = np.zeros(matrix.shape, int)
    for block, ranks in matrix.owners.items():
        counts[tuple(slice(*one) for one in block)] += len(ranks)
    return counts


@pytest.mark.parametrize("config", [SIZES, LLAMA], ids=["ours", "llama"])
def test_every_number_has_its_owners(config):
    groups = matrices(held(config, tensor=2))
    assert list(groups) == ["each block", REST]
    found = [one for some in groups.values() for one in some]
    for one in found:
        counts = np.unique(owned(one))
        assert counts.tolist() in ([1], [2]), one.name
    assert {one.name for one in found if owned(one).max() == 2}.isdisjoint(
        {"attn.c_attn", "mlp.c_proj", "wte", "embed_tokens", "mlp.down_proj", "lm_head"}
    )


def test_a_process_has_its_heads_of_query_key_and_value():
    groups = matrices(held(SIZES, tensor=2))
    (attention,) = (one for one in groups["each block"] if one.name == "attn.c_attn")
    assert (attention.shape, attention.joined) == ((24, 8), 3)
    assert attention.owners == {
        ((begin, begin + 4), (0, 8)): [begin // 4 % 2] for begin in range(0, 24, 4)
    }
    (output,) = (one for one in groups["each block"] if one.name == "attn.c_proj")
    assert output.owners == {((0, 8), (0, 4)): [0], ((0, 8), (4, 8)): [1]}


def test_blocks_that_differ_are_shown_one_by_one():
    with torch.device("meta"):
        model = build_model(SIZES)
        model.blocks[1].mlp.c_fc = torch.nn.Linear(8, 4)
    assert list(matrices({0: held_by(model, 16)})) == ["block 0", "block 1", REST]


ALL = (0, 4)
CASES = [
    # Of four chunks a process has one from the beginning and one from the end.
    (
        {"context": 2},
        {(0, 4): [0], (4, 12): [1], (12, 16): [0]},
        {(ALL, (0, 4)): [0], (ALL, (4, 12)): [1], (ALL, (12, 16)): [0]},
    ),
    (
        {"context": 2, "by_heads": True},
        {(0, 4): [0], (4, 12): [1], (12, 16): [0]},
        {((0, 2), (0, 16)): [0], ((2, 4), (0, 16)): [1]},
    ),
    (
        {"tensor": 2},
        {(0, 8): [0], (8, 16): [1]},
        {((0, 2), (0, 16)): [0], ((2, 4), (0, 16)): [1]},
    ),
    # The two that share matrices divide the positions of their half again.
    (
        {"tensor": 2, "context": 2},
        {(0, 4): [0], (12, 16): [1], (4, 8): [2], (8, 12): [3]},
        {
            **{((0, 2), part): [0] for part in ((0, 4), (12, 16))},
            **{((2, 4), part): [1] for part in ((0, 4), (12, 16))},
            ((0, 2), (4, 12)): [2],
            ((2, 4), (4, 12)): [3],
        },
    ),
]


@pytest.mark.parametrize(("sizes", "between", "attention"), CASES)
def test_a_sequence_is_shared_as_the_model_shares_it(sizes, between, attention):
    found = shares(held(SIZES, **sizes), sizes.get("tensor", 1) * sizes.get("context", 1))
    assert found == Shares(16, 4, between, attention)


def test_models_of_transformers_have_all_positions_between_layers():
    found = shares(held(LLAMA, tensor=2), 2)
    assert found.between == {(0, 16): [0, 1]}
    assert found.attention == {((0, 2), (0, 16)): [0], ((2, 4), (0, 16)): [1]}


def test_whole_sequences_are_not_drawn():
    assert shares(held(SIZES), 1) is None
