"""Attention of our models on a CPU, by matrix products or by torch's kernel."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import model.attention
from model.attention import LONGEST_PRODUCTS, attend, attend_by_products
from model.gpt import Attention, GPTConfig

V = 31


@pytest.fixture
def by_products(monkeypatch):
    """The queries of all attention that is computed by products."""
    taken = []

    def noted(query, *rest):
        taken.append(query)
        return attend_by_products(query, *rest)

    monkeypatch.setattr(model.attention, "attend_by_products", noted)
    return taken


@pytest.mark.parametrize(("dtype", "nearly"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("time", [2, 64, 300, LONGEST_PRODUCTS])
def test_attention_by_scores_is_torchs_own(dtype, nearly, time):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 3, time, 8, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 3, time, 8, generator=generator)
    ours = attend_by_products(*(part.to(dtype) for part in parts)).float()
    theirs = F.scaled_dot_product_attention(*(part.double() for part in parts), is_causal=True)
    results = [(one, *torch.autograd.grad(one, parts, upstream)) for one in (ours, theirs.float())]

    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=nearly, atol=nearly)


def test_dropout_drops_and_scales_the_weights():
    """Values that are units show the weights themselves."""
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 3, 16, 16)
    value = torch.eye(16).expand(4, 3, 16, 16)
    exact = attend_by_products(query, key, value)
    dropped = attend_by_products(query, key, value, 0.25)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], exact[kept] / 0.75)
    assert kept[exact > 0].float().mean() == pytest.approx(0.75, abs=0.05)


@pytest.mark.parametrize(
    ("time", "expected"),
    [(LONGEST_PRODUCTS, True), (LONGEST_PRODUCTS + 1, False), (1, False)],  # one position sees all
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_by_products_where_they_are_faster(by_products, dtype, time, expected):
    attention = Attention(GPTConfig(V, time, 1, 2, 16), 0).to(dtype)
    attention(torch.zeros(1, time, 16, dtype=dtype))
    assert bool(by_products) == expected


def test_another_device_has_torchs_kernel(by_products):
    query, key, value = torch.empty(3, 2, 2, 8, 4, device="meta")
    attend(query, key, value)
    assert not by_products
