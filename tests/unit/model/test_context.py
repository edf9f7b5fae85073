"""Processes that share each sequence compute the loss and the gradients of one that has it all."""

from __future__ import annotations

import pytest
import torch

from model.causal_lm import PACKING
from model.context import Context
from process_groups import Group, assert_equal_losses_and_gradients, measured


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, processes):
    """Of four processes, each of two heads of keys is in two."""
    content = measured("contexts", tmp_path, processes)
    assert content.keys() == {"gpt2", *(f"their {one}" for one in PACKING)}
    # transformers computes gemma2's scores itself, in no function that can be replaced.
    assert [name for name, kinds in content.items() if not kinds] == ["their gemma2"]
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
