"""Four-bit weights: what is multiplied is what they dequantize to, however they are sharded."""

from __future__ import annotations

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import families
import runs
from model.causal_lm import CausalLMConfig
from model.families import build_model
from model.family import parameter_count
from model.frozen import NF4, FrozenError, keep_frozen
from model.gpt import GPT, GPTConfig
from model.lora import Lora
from model.nf4 import dequantize, load_kernels, quantize
from model.recompute import WAYS

pytest.importorskip("bitsandbytes")
WIDE = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
FROM_THE_HUB = """
import os, sys, types
from model.families import build_model
from model.gpt import GPTConfig
from model.lora import Lora
from model.nf4 import load_kernels
build_model(GPTConfig(31, 8, 1, 2, 8, lora=Lora(2, 4)))
assert "bitsandbytes" not in sys.modules  # peft would import it
sys.modules["kernels"] = kernels = types.ModuleType("kernels")
kernels.get_kernel = lambda *_, **__: os._exit(9)
load_kernels()
assert "bitsandbytes" in sys.modules
assert sys.modules["kernels"] is kernels
"""
DTYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def a_model(recompute=False):
    """A Llama with adapters that change what it computes."""
    torch.manual_seed(1)
    sizes = {**families.FAMILIES["llama"], **WIDE}
    content = CausalLMConfig.read(sizes, activation_checkpointing=recompute)
    model = build_model(CausalLMConfig(**{**vars(content), "lora": Lora(2, 4)}))
    for parameter in model.parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.1)
    return model


def test_levels_are_those_of_the_paper():
    """The nearest of 16 quantiles of a normal distribution, times the block's largest number."""
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
    for dtype in DTYPES.values():
        assert dequantize(quantize(rows), dtype).equal(expected.to(dtype))


def test_rows_are_quantized_alone():
    """So a shard of a weight is what the whole weight has there."""
    rows = torch.randn(7, 192).bfloat16()
    assert quantize(rows[2:5]).view(torch.int16).equal(quantize(rows).view(torch.int16)[2:5])
    assert quantize(rows.float()).view(torch.int16).equal(quantize(rows).view(torch.int16))


@pytest.mark.parametrize("precision", DTYPES)
def test_losses_and_gradients_are_those_of_dequantized_weights(precision):
    model = a_model()
    reference = copy.deepcopy(model)
    keep_frozen(model, NF4, "bf16")
    quantized = {name for name, one in model.named_modules() if getattr(one, "is_packed", False)}
    assert len(quantized) == 14  # seven layers in each of two blocks
    for name in quantized:
        layer = reference.get_submodule(name)
        layer.weight.data = dequantize(model.get_submodule(name).weight, DTYPES[precision]).float()
    for embedding in (reference.get_input_embeddings(), reference.get_output_embeddings()):
        embedding.weight.data = embedding.weight.data.bfloat16().float()
    ids = torch.randint(320, (2, 12))
    found = []
    for one in (reference, model):
        with torch.autocast("cpu", DTYPES[precision], enabled=precision != "no"):
            loss = one(ids, ids)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in one.parameters() if p.requires_grad)])
    assert all(map(torch.equal, *found))


@pytest.mark.parametrize("recompute", [way for way in WAYS if way])
@pytest.mark.parametrize("kind", ["bf16", NF4])
def test_what_is_recomputed_has_the_same_bits(kind, recompute):
    ids, found = torch.randint(320, (2, 12)), []
    for way in (False, recompute):
        model = a_model(way)
        keep_frozen(model, kind, "bf16")
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(ids, ids)
        loss.backward()
        found.append([loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)])
    assert all(map(torch.equal, *found))


def test_bytes_names_and_counts_are_those_of_the_model():
    model = a_model()
    shapes = {name: one.shape for name, one in model.layout().parameters().items()}
    count, cost = parameter_count(model), model.flops_per_token(8)
    before = sum(one.nbytes for one in model.blocks.parameters() if not one.requires_grad)
    keep_frozen(model, NF4, "bf16")
    assert {name: one.shape for name, one in model.layout().parameters().items()} == shapes
    assert (parameter_count(model), model.flops_per_token(8)) == (count, cost)
    packed = [one.weight for one in model.blocks.modules() if getattr(one, "is_packed", False)]
    assert 64 * sum(one.nbytes for one in packed) == 36 * sum(map(size, model.blocks.modules()))
    after = sum(one.nbytes for one in model.blocks.parameters() if not one.requires_grad)
    assert after < before / 6


def size(module):
    return module.out_features * module.in_features if getattr(module, "is_packed", False) else 0


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
