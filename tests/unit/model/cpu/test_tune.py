"""The layers that a CPU computes instead of those of model/gpt.py; nothing else changes."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import model.cpu.layers
from model.cpu.layers import (
    KERNEL,
    MATMUL_ATTENTION_LENGTH,
    PRODUCTS,
    AmxLinear,
    FastDropout,
    matmul_attention,
    tune,
)
from model.gpt import GPT, Attention, GPTConfig
from model.lora import Lora, add_adapters

V = 31


def small_gpt(**changes):
    torch.manual_seed(0)
    return GPT(GPTConfig(vocab_size=V, block_size=16, n_layer=2, n_head=2, n_embd=16, **changes))


@pytest.fixture
def by_products(monkeypatch):
    """The queries of all attention that is computed by products."""
    taken = []

    def noted(query, *rest, **options):
        taken.append(query)
        return matmul_attention(query, *rest, **options)

    monkeypatch.setattr(model.cpu.layers, "matmul_attention", noted)
    return taken


@pytest.fixture
def every_width(monkeypatch):
    """Linear layers of any size are replaced, as wide ones are on a processor with AMX."""
    monkeypatch.setattr(model.cpu.layers, "LEAST_FEATURES", 1)
    monkeypatch.setattr(model.cpu.layers, "has_amx", lambda: True)


@pytest.mark.parametrize(("dtype", "nearly"), [(torch.float32, 1e-6), (torch.bfloat16, 0.03)])
@pytest.mark.parametrize("time", [2, 64, 300, MATMUL_ATTENTION_LENGTH])
def test_attention_by_scores_is_torchs_own(dtype, nearly, time):
    generator = torch.Generator().manual_seed(3)
    parts = [torch.randn(2, 3, time, 8, generator=generator).requires_grad_() for _ in range(3)]
    upstream = torch.randn(2, 3, time, 8, generator=generator)
    results = []
    for attend in (matmul_attention, F.scaled_dot_product_attention):
        low = dtype if attend is matmul_attention else torch.float64
        mixed = attend(*(part.to(low) for part in parts), dropout_p=0.0, is_causal=True)
        results.append((mixed.float(), *torch.autograd.grad(mixed.float(), parts, upstream)))

    assert results[0][0].dtype == torch.float32
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=nearly, atol=nearly)


@pytest.mark.parametrize(
    ("way", "time", "expected"),
    [
        (None, MATMUL_ATTENTION_LENGTH, True),
        (None, MATMUL_ATTENTION_LENGTH + 1, False),
        (PRODUCTS, MATMUL_ATTENTION_LENGTH + 1, True),
        (KERNEL, 8, False),
        (None, 1, False),
        (PRODUCTS, 1, False),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_by_products_where_asked_for_or_faster(
    by_products, dtype, way, time, expected
):
    attention = Attention(GPTConfig(V, time, 1, 2, 16), 0).to(dtype)
    tune(attention, way)
    attention(torch.zeros(1, time, 16, dtype=dtype))
    assert bool(by_products) == expected


@pytest.mark.parametrize("options", [{"attn_mask": True}, {"scale": 0.5}, {"is_causal": False}])
def test_what_products_do_not_compute_is_left_to_torch(by_products, options):
    """As where somebody changes the model's call."""
    query, key, value = torch.randn(3, 2, 2, 8, 4)
    attention = Attention(GPTConfig(V, 8, 1, 2, 8), 0)
    tune(attention, PRODUCTS)
    if "attn_mask" in options:
        options = {"attn_mask": torch.ones(8, 8).tril(2).bool()}
    asked = {"is_causal": "attn_mask" not in options, **options}
    expected = F.scaled_dot_product_attention(query, key, value, **asked)
    assert torch.equal(attention.attend(query, key, value, **asked), expected)
    assert not by_products


def test_parameters_names_and_what_somebody_else_wrote_stay(every_width):
    class Rotated(Attention):
        pass

    class Scaled(nn.Linear):
        pass

    model = small_gpt(dropout=0.1)
    model.blocks[0].attn.__class__ = Rotated
    model.blocks[1].mlp.c_fc.__class__ = Scaled
    before = dict(model.named_parameters())
    tune(model)
    after = dict(model.named_parameters())
    assert list(before) == list(after)
    assert all(before[name] is after[name] for name in before)
    assert type(model.blocks[0].attn) is Rotated
    assert type(model.blocks[1].mlp.c_fc) is Scaled
    kinds = {type(model.blocks[0].mlp.c_fc), type(model.blocks[0].attn.resid_dropout)}
    assert kinds == {AmxLinear, FastDropout}
    assert type(copy.deepcopy(model).blocks[1].attn) is type(model.blocks[1].attn)


def test_only_the_layers_of_our_gpt_change(every_width):
    other = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))
    tune(other)
    assert [type(layer) for layer in other] == [nn.Linear, nn.Dropout]
    adapted = small_gpt()
    add_adapters(adapted, adapted.blocks, Lora(2, 4, ("c_attn",), 0.1))
    tune(adapted)
    layer = adapted.blocks[0].attn.c_attn
    assert type(layer.base_layer) is AmxLinear
    assert type(layer.lora_dropout["default"]) is nn.Dropout
    assert type(layer.lora_A["default"]) is nn.Linear


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_blocks_have_the_same_gradients(dropout):
    ids = torch.randint(V, (2, 16), generator=torch.Generator().manual_seed(5))
    found = []
    for checkpointing in (False, True):
        model = small_gpt(dropout=dropout, activation_checkpointing=checkpointing)
        tune(model)
        torch.manual_seed(7)
        model(ids, ids).backward()
        found.append([parameter.grad for parameter in model.parameters()])
    assert all(map(torch.equal, *found))
