"""Processes that share sequences or matrices compute what one process computes that has all."""

from __future__ import annotations

import pytest
import torch

import families
from model.causal_lm import PACKING
from model.context import Context
from model.families import build_model
from process_groups import Group, assert_equal_losses_and_gradients, measured
from snapshot.disk.model import model_config

CANNOT = {
    # Gemma has sliding windows.
    "contexts": ["their gemma2", "their gemma3_text"],
    # transformers has no plan for its GPT-2 classes; experts, and layers all of whose outputs a
    # process needs, are not cut.
    "tensors": ["their gpt2", "their mixtral", "their olmo2", "their phi3"],
}


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("shared", CANNOT)
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, shared, processes):
    """Of four processes that share sequences, each of two heads of keys is in two."""
    content = measured(shared, tmp_path, processes)
    assert content.keys() == {"gpt2", *(f"their {one}" for one in PACKING)}
    assert [name for name, kinds in content.items() if not kinds] == CANNOT[shared]
    assert_equal_losses_and_gradients(content)


def test_each_position_belongs_to_one_process_in_order():
    places = torch.arange(48)[None]
    for size in (1, 2, 3, 4):
        own = [Context(Group(size, rank)).own(places)[0] for rank in range(size)]
        assert torch.cat(own).equal(places[0])
        assert len({len(part) for part in own}) == 1


def test_heads_are_exchanged_for_positions_and_back():
    """As an all-to-all of two processes, of numbers that name their head and position."""
    batch, heads, time, size = 2, 4, 6, 2
    whole = torch.arange(batch * heads * time).view(batch, heads, time, 1).expand(-1, -1, -1, 3)
    contexts = [Context(Group(size, rank)) for rank in range(size)]
    sent = {}
    for context in contexts:
        context._exchanged = lambda one, rank=context.rank: sent.setdefault(rank, one)
        context.to_heads(*[whole.chunk(size, dim=2)[context.rank]] * 3)
    for rank, context in enumerate(contexts):
        context._exchanged = lambda _, rank=rank: torch.stack([sent[n][rank] for n in range(size)])
        for own in context.to_heads(*[whole.chunk(size, dim=2)[rank]] * 3):
            assert own.equal(whole.chunk(size, dim=1)[rank])
    sent = {}
    for context in contexts:
        context._exchanged = lambda one, rank=context.rank: sent.setdefault(rank, one)
        context.to_positions(whole.chunk(size, dim=1)[context.rank])
    for rank, context in enumerate(contexts):
        context._exchanged = lambda _, rank=rank: torch.stack([sent[n][rank] for n in range(size)])
        assert context.to_positions(whole.chunk(size, dim=1)[rank]).equal(
            whole.chunk(size, dim=2)[rank]
        )


@pytest.mark.parametrize("family", ["qwen3_moe", "phi", "gpt_oss", "bloom", "arcee"])
def test_only_measured_families_are_shared(family):
    """Others may have a norm of heads that is not in their plan, or experts."""
    small = {**families.ROTARY, "num_local_experts": 4, "pad_token_id": None}
    assert build_model(model_config({**small, "model_type": family}, family)).tensor_plan == {}
