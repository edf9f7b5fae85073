"""Processes that share each sequence compute the loss and the gradients of one that has it all."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F

from model.causal_lm import PACKING
from model.context import Context, SharedRows
from model.families import FAMILIES
from process_groups import Group, assert_equal_losses_and_gradients, measured


@pytest.mark.thorough
@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_family_has_the_loss_and_gradients_of_one_process(tmp_path, processes):
    content = measured("contexts.py", tmp_path, processes)
    assert len(content) == (2 if processes == 2 else 1) * (len(FAMILIES) + len(PACKING))
    # transformers computes gemma2's scores itself, in no function that can be replaced.
    without = [name.removesuffix(" by heads") for name, kinds in content.items() if not kinds]
    assert set(without) == {"their gemma2"}
    assert_equal_losses_and_gradients(content)


def test_each_position_belongs_to_one_process_and_work_is_equal():
    places = torch.arange(48)[None]
    for size in (1, 2, 3, 4):
        own = [Context(Group(size, rank)).own(places)[0] for rank in range(size)]
        assert torch.cat(own).sort().values.equal(places[0])
        assert len({int((part + 1).sum()) for part in own}) == 1  # keys that its queries see


def by_document(query, key, value, bounds, key_bounds, longest, longest_key, **options):
    """What torch's varlen_attn computes: the last query of a document sees all of its keys."""
    mixed = []
    for (begin, end), (first, last) in zip(
        pairwise(bounds.tolist()), pairwise(key_bounds.tolist()), strict=True
    ):
        assert 0 < end - begin <= longest
        assert end - begin <= last - first <= longest_key
        places = torch.arange(last - first)
        distance = places[begin - end :, None] - places
        window, _ = options["window_size"]
        mask = (distance >= 0) & ((distance <= window) | (window < 0))
        one, *others = (
            part[at].transpose(0, 1)[None]
            for part, at in (
                (query, slice(begin, end)),
                (key, slice(first, last)),
                (value, slice(first, last)),
            )
        )
        found = F.scaled_dot_product_attention(
            one, *others, attn_mask=mask, enable_gqa=options["enable_gqa"]
        )
        mixed.append(found[0].transpose(0, 1))
    return torch.cat(mixed)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("by_heads", [False, True])
def test_documents_without_a_mask_are_attended_to_alike(monkeypatch, by_heads, window):
    monkeypatch.setattr("model.context.SIXTEEN_BITS", (torch.float32,))
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", by_document)
    lengths = [[48], [12, 36], [7, 1, 20, 20], [1] * 48]  # some begin where a chunk does
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    query, key, value = (torch.randn(4, heads, 48, 8) for heads in (4, 2, 2))
    for rank in range(2):
        found = []
        for varlen in (False, True):
            context = Context(Group(2, rank), by_heads)
            context.varlen = varlen
            rows = SharedRows(context, 48, positions)
            found.append(
                [
                    rows._attend(query[:, :, one], key, value, one, 0.0, None, window)
                    for one in context.stretches(48)
                ]
            )
        for masked, other in zip(*found, strict=True):
            torch.testing.assert_close(masked, other)
