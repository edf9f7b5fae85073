"""Frozen weights in 16 and four bits: products are those of what they are cast to, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import families
import runs
from model.causal_lm import CausalLMConfig
from model.families import build_model
from model.family import parameter_count
from model.frozen import (
    NF4,
    FrozenError,
    casts_weights,
    dequantize,
    keep_frozen,
    load_kernels,
    packed_layers,
    quantize,
)
from model.gpt import GPT, GPTConfig
from model.lora import Lora

LORA = Lora(rank=2, alpha=4, dropout=0.1)
ROWS, TIME = 2, 12
PRECISIONS = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
KINDS = {
    "our gpt2": GPTConfig(320, TIME, n_layer=2, n_head=2, n_embd=32),
    "wide": CausalLMConfig.read({**families.FAMILIES["llama"], **WIDE}),
    **{
        name: CausalLMConfig.read(content)
        for name, content in {**families.FAMILIES, **families.OTHERS}.items()
        if content["model_type"] != "gpt2"  # transformers' own has no linear layers
    },
}
FROM_THE_HUB = """
import os, sys, types
from model.families import build_model
from model.frozen import load_kernels
from model.gpt import GPTConfig
from model.lora import Lora
build_model(GPTConfig(31, 8, 1, 2, 8, lora=Lora(2, 4)))
assert "bitsandbytes" not in sys.modules  # peft would import it
sys.modules["kernels"] = kernels = types.ModuleType("kernels")
kernels.get_kernel = lambda *_, **__: os._exit(9)
load_kernels()
assert "bitsandbytes" in sys.modules
assert sys.modules["kernels"] is kernels
"""


def adapted(name, recompute=False, lora=LORA):
    """A model whose matrices are numbers of bf16, with adapters that change what it computes."""
    torch.manual_seed(1)
    sizes = replace(KINDS[name], lora=lora, activation_checkpointing=recompute)
    model = build_model(sizes).train()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
            else:
                parameter.copy_(parameter.bfloat16())
    return model


def computed(model, precision):
    """Loss and gradients of a micro-batch."""
    ids = torch.randint(320, (ROWS, TIME), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)  # dropout
    with torch.autocast("cpu", PRECISIONS[precision], enabled=precision != "no"):
        loss = model(ids, ids)
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.requires_grad)]


def bytes_of(model):
    return sum(one.nbytes for one in model.parameters() if not one.requires_grad)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", KINDS)
def test_bits_are_those_of_float32_weights(name, precision):
    model = adapted(name)
    expected = computed(copy.deepcopy(model), precision)
    before = bytes_of(model)
    keep_frozen(model, "bf16")
    found = computed(model, precision)
    assert all(map(torch.equal, expected, found))
    assert bytes_of(model) < before


class Mine(nn.Linear):
    """A layer that somebody changed."""

    def forward(self, x):
        return x @ self.weight.T


def test_tied_layers_share_one_weight_and_vectors_and_changed_layers_stay():
    model = adapted("our gpt2")
    changed = model.transformer.h[0].mlp.c_fc = Mine(32, 128).requires_grad_(False)
    keep_frozen(model, "fp16")
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not casts_weights(changed)
    for one in model.parameters():
        is_cast = one.dim() == 2 and not one.requires_grad and one is not changed.weight
        assert one.dtype == (torch.float16 if is_cast else torch.float32)


def test_levels_are_those_of_the_paper_and_rows_are_quantized_alone():
    """The nearest of 16 quantiles of a normal distribution, times the block's largest number.

    So a shard of a weight is what the whole weight has there.
    """
    load_kernels()
    from bitsandbytes.functional import get_4bit_type

    levels = get_4bit_type("nf4", device="cpu")
    assert torch.allclose(
        levels[[0, 1, 7, 8, 15]], torch.tensor([-1, -0.6962, 0, 0.0796, 1]), atol=1e-4
    )
    rows = torch.randn(5, 128)
    blocks = rows.view(5, 2, 64)
    scales = blocks.abs().amax(-1, keepdim=True)
    nearest = ((blocks / scales)[..., None] - levels).abs().argmin(-1)
    expected = (levels[nearest] * scales).view(5, 128)
    packed = quantize(rows)
    for dtype in PRECISIONS.values():
        assert dequantize(packed, dtype).equal(expected.to(dtype))
    assert quantize(rows[2:4]).view(torch.int16).equal(packed.view(torch.int16)[2:4])


@pytest.mark.parametrize("precision", PRECISIONS)
def test_losses_and_gradients_are_those_of_dequantized_weights(precision):
    model = adapted("wide")
    reference = copy.deepcopy(model)
    keep_frozen(model, NF4, "bf16")
    quantized = dict(packed_layers(model))
    assert len(quantized) == 14  # seven layers in each of two blocks
    for name, layer in quantized.items():
        weight = dequantize(layer.weight, PRECISIONS[precision]).float()
        reference.get_submodule(name).weight.data = weight
    assert all(map(torch.equal, computed(reference, precision), computed(model, precision)))


def test_bytes_names_and_counts_are_those_of_the_model():
    model = adapted("wide")
    shapes = {name: one.shape for name, one in model.layout().parameters().items()}
    count, cost = parameter_count(model), model.flops_per_token(8)
    keep_frozen(model, NF4, "bf16")
    assert {name: one.shape for name, one in model.layout().parameters().items()} == shapes
    assert (parameter_count(model), model.flops_per_token(8)) == (count, cost)
    layers = [layer for _, layer in packed_layers(model)]
    numbers = sum(one.in_features * one.out_features for one in layers)
    assert 64 * sum(one.weight.nbytes for one in layers) == 36 * numbers  # 36 bytes of each block


def test_a_model_without_such_layers_is_refused():
    model = GPT(GPTConfig(31, 8, 1, 2, 8)).requires_grad_(False)
    with pytest.raises(FrozenError, match="no frozen linear layer of the blocks has a multiple"):
        keep_frozen(model, NF4)


@pytest.mark.slow
def test_nothing_is_downloaded_by_the_import():
    """bitsandbytes gets code of the Hub from `kernels`, where that is installed."""
    result = subprocess.run(
        [sys.executable, "-c", FROM_THE_HUB], cwd=runs.ROOT, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    assert not result.stderr
