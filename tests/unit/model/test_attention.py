"""Attention: products of matrices on a CPU, and the mask of documents in a plan."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import model.attention
from model.attention import LONGEST_PRODUCTS, attend_by_products
from model.gpt import Attention, GPTConfig
from planning.fake_trace import Shape, traced_update
from shared_models import sizes


@pytest.mark.parametrize("name", ["gpt2", pytest.param("their qwen3", marks=pytest.mark.slow)])
def test_a_plan_has_the_mask_of_documents(name):
    time = 256
    config = replace(sizes(name), block_size=time)
    peaks = [
        traced_update(config, 2, Shape("cuda", "bf16", packed=packed)).totals().sum(1).max()
        for packed in (False, True)
    ]
    assert peaks[1] - peaks[0] > 0.9 * 2 * time * time * 2  # two rows of bf16 numbers


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
@pytest.mark.parametrize("time", [2, 300, LONGEST_PRODUCTS])
def test_attention_by_products_is_torchs_own(dtype, nearly, time):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 3, time, 8, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 3, time, 8, generator=generator)
    ours = attend_by_products(*(part.to(dtype) for part in parts)).float()
    theirs = F.scaled_dot_product_attention(*(part.double() for part in parts), is_causal=True)
    results = [(one, *torch.autograd.grad(one, parts, upstream)) for one in (ours, theirs.float())]
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other, rtol=nearly, atol=nearly)


@pytest.mark.parametrize(
    ("time", "device", "expected"),
    [
        (LONGEST_PRODUCTS, "cpu", True),
        (LONGEST_PRODUCTS + 1, "cpu", False),
        (1, "cpu", False),  # one position sees all
        (8, "meta", False),
    ],
)
def test_attention_is_by_products_where_they_are_faster(by_products, time, device, expected):
    attention = Attention(GPTConfig(31, time, 1, 2, 16), 0).to(device)
    attention(torch.zeros(1, time, 16, device=device))
    assert bool(by_products) == expected
