"""Processes that share each sequence compute the loss and the gradients of one that has it all."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F

from model.causal_lm import PACKING
from model.context import Context
from model.documents import packed_rows
from process_groups import Group, assert_equal_losses_and_gradients, measured


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, processes):
    """Of four processes, each of two heads of keys is in two."""
    content = measured("contexts.py", tmp_path, processes)
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
        context.to_heads(whole.chunk(size, dim=2)[context.rank])
    for rank, context in enumerate(contexts):
        context._exchanged = lambda _, rank=rank: torch.stack([sent[n][rank] for n in range(size)])
        (own,) = context.to_heads(whole.chunk(size, dim=2)[rank])
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


def by_document(query, key, value, bounds, key_bounds, longest, longest_key, **options):
    """What torch's varlen_attn computes: the last query of a document sees all of its keys."""
    assert bounds.equal(key_bounds)
    mixed = []
    for begin, end in pairwise(bounds.tolist()):
        assert 0 < end - begin <= min(longest, longest_key)
        places = torch.arange(end - begin)
        distance = places[:, None] - places
        window, _ = options["window_size"]
        mask = (distance >= 0) & ((distance <= window) | (window < 0))
        one, *others = (part[begin:end].transpose(0, 1)[None] for part in (query, key, value))
        found = F.scaled_dot_product_attention(
            one, *others, attn_mask=mask, enable_gqa=options["enable_gqa"]
        )
        mixed.append(found[0].transpose(0, 1))
    return torch.cat(mixed)


@pytest.mark.parametrize("window", [None, 5])
def test_documents_without_a_mask_are_attended_to_alike(monkeypatch, window):
    monkeypatch.setattr("model.documents.SIXTEEN_BITS", (torch.float32,))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_document)
    lengths = [[48], [12, 36], [7, 1, 20, 20], [1] * 48]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    query, key, value = (torch.randn(4, heads, 48, 8) for heads in (4, 2, 2))
    masked, other = (
        packed_rows(positions, varlen).attend(query, key, value, window=window)
        for varlen in (False, True)
    )
    torch.testing.assert_close(masked, other)
