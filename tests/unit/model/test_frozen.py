"""Frozen weights in 16 bits: losses and gradients are those of float32 weights, bit for bit."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import families
from model.causal_lm import CausalLMConfig
from model.families import build_model
from model.frozen import DTYPES, casts_weights, keep_frozen
from model.gpt import GPTConfig
from model.lora import Lora
from model.products import product

LORA = Lora(rank=2, alpha=4, dropout=0.1)
ROWS, TIME = 2, 12
AUTOCAST = {"no": None, "bf16": torch.bfloat16, "fp16": torch.float16}
OURS = {
    "our gpt2": GPTConfig(320, TIME, n_layer=2, n_head=2, n_embd=32, lora=LORA),
}
KINDS = {
    name: content
    for name, content in {**families.FAMILIES, **families.OTHERS}.items()
    if content["model_type"] != "gpt2"  # transformers' own has no linear layers
}


def adapted(name, checkpointing=False):
    """A model whose matrices are numbers of bf16, with adapters that change what it computes."""
    torch.manual_seed(1)
    if name in OURS:
        model = build_model(OURS[name])
    else:
        content = CausalLMConfig.read(KINDS[name], activation_checkpointing=checkpointing)
        model = build_model(type(content)(**{**vars(content), "lora": LORA}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.normal_(std=0.1)
            else:
                parameter.copy_(parameter.bfloat16())
    return model


def computed(model, precision):
    """Loss and gradients of a micro-batch."""
    dtype = AUTOCAST[precision]
    ids = torch.randint(320, (ROWS, TIME), generator=torch.Generator().manual_seed(2))
    torch.manual_seed(3)  # dropout
    with nullcontext() if dtype is None else torch.autocast("cpu", dtype):
        loss = model(ids, ids)
    loss.backward()
    return [loss.detach(), *(one.grad for one in model.parameters() if one.requires_grad)]


def bytes_of(model):
    return sum(one.nbytes for one in model.parameters() if not one.requires_grad)


@pytest.mark.parametrize("precision", AUTOCAST)
@pytest.mark.parametrize("name", [*OURS, *KINDS])
def test_bits_are_those_of_float32_weights(name, precision):
    model = adapted(name)
    expected = computed(copy.deepcopy(model), precision)
    before = bytes_of(model)
    keep_frozen(model, "bf16")
    found = computed(model, precision)
    assert all(map(torch.equal, expected, found))
    assert bytes_of(model) < before


def test_tied_layers_share_one_weight_and_vectors_stay():
    model = adapted("our gpt2")
    keep_frozen(model, "fp16")
    assert model.lm_head.weight is model.transformer.wte.weight
    dtypes = {one.dim(): one.dtype for one in model.parameters() if not one.requires_grad}
    assert dtypes == {1: torch.float32, 2: torch.float16}
    assert {one.dtype for one in model.parameters() if one.requires_grad} == {torch.float32}


def test_a_layer_that_somebody_changed_keeps_float32():
    class Mine(nn.Linear):
        def forward(self, x):
            return x @ self.weight.T

    model = adapted("our gpt2")
    block = model.transformer.h[0]
    block.mlp.c_fc = Mine(32, 128).requires_grad_(False)
    keep_frozen(model, "bf16")
    assert block.mlp.c_fc.weight.dtype == torch.float32
    assert not casts_weights(block.mlp.c_fc)


@pytest.mark.parametrize("kind", DTYPES)
def test_a_product_keeps_no_cast_copy_for_the_backward_pass(kind):
    weight = torch.randn(8, 4).to(DTYPES[kind])
    x, bias = torch.randn(2, 3, 4, requires_grad=True), torch.randn(8, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        output = product(x, weight, bias)
    assert {one.untyped_storage().data_ptr() for one in kept} <= {
        weight.untyped_storage().data_ptr(),
        x.untyped_storage().data_ptr(),
    }
    output.sum().backward()
    other, same = (one.detach().clone().requires_grad_() for one in (x, bias))
    nn.functional.linear(other, weight.float(), same).sum().backward()
    assert x.grad.equal(other.grad)
    assert bias.grad.equal(same.grad)
