"""Every matrix product of a bf16 run is in bf16: forward, backward, experts and attention."""

from __future__ import annotations

import pytest
import torch

from families import FAMILIES, OTHERS
from model.attention import LONGEST_PRODUCTS
from model.causal_lm import CausalLMConfig
from model.gpt import GPTConfig
from product_dtypes import products_of_step

IDS = torch.arange(64).view(2, 32)
IN_FLOAT32 = {"falcon": {("bmm", "float32")}}
"""Falcon shares one head of keys, for which torch has no fused attention: it multiplies in float32
whatever the dtype."""


def others(model: torch.nn.Module) -> set[tuple[str, str]]:
    """The products of a step that are not of bf16 numbers alone."""
    products = products_of_step(model.train(), IDS)
    assert products.by_dtype()["bfloat16"] >= 25
    return {one for one in products.counts if one[1] != "bfloat16"}


@pytest.mark.parametrize("family", [*FAMILIES, *OTHERS])
def test_products_of_transformers_models_are_bf16(family):
    model = CausalLMConfig.read({**FAMILIES, **OTHERS}[family]).build()
    assert others(model) == IN_FLOAT32.get(family, set())


@pytest.mark.parametrize("longest", [LONGEST_PRODUCTS, 0])
@pytest.mark.parametrize("vocabulary", [64, 320])  # logits at once, and in chunks
def test_products_of_our_model_are_bf16(monkeypatch, longest, vocabulary):
    monkeypatch.setattr("model.attention.LONGEST_PRODUCTS", longest)
    model = GPTConfig(vocabulary, 48, 2, 4, 64).build()
    assert others(model) == set()


def test_a_product_in_float32_is_seen():
    model = GPTConfig(64, 48, 2, 4, 64).build()
    layer = model.blocks[0].mlp.c_proj
    forward = layer.forward

    def in_float32(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            return forward(x.float())

    layer.forward = in_float32
    assert ("addmm", "float32") in others(model)
