"""Which parameters of a model are matrices that a block multiplies with."""

from __future__ import annotations

from typing import cast

from torch import nn

from model.causal_lm import LanguageModel
from model.gpt import GPT

JOINED = {"c_attn": 3}
"""Layers of our GPT whose weight joins several matrices by rows: query, key and value."""


def matrices_of(model: LanguageModel) -> dict[nn.Parameter, int]:
    """The weights of the linear layers in the blocks, and how many matrices each one joins.

    Embeddings and the output layer are not among them, nor are stacked experts.
    """
    joined = JOINED if isinstance(model, GPT) else {}
    return {
        cast(nn.Parameter, layer.weight): joined.get(name.rpartition(".")[2], 1)
        for name, layer in model.blocks.named_modules()
        if isinstance(layer, nn.Linear)
    }
