"""The way into a model: layers of our GPT become ones that compute the same, faster on a CPU.

model/gpt.py is written with torch's layers and knows nothing of this folder. `tune` gives some of
them another class, as FSDP does. Each class extends that of torch or of the GPT by one function
with the same arguments: parameters, their names and everything else stay.
"""

from __future__ import annotations

import sys

from torch import nn

from model.cpu.attention import KERNEL, PRODUCTS, ProductAttention
from model.cpu.dropout import FastDropout
from model.cpu.linear import AmxLinear
from model.gpt import MLP, Attention, Transformer

FASTER: dict[type[nn.Module], type[nn.Module]] = {
    Attention: ProductAttention,
    nn.Linear: AmxLinear,
    nn.Dropout: FastDropout,
}
"""A subclass keeps its own: whoever wrote it changed what it computes."""


def tune(model: nn.Module, attention: str | None = None) -> None:
    """Make a GPT compute with the layers of this folder; every other model stays as it is.

    `attention` is `run.attention`: PRODUCTS, KERNEL, or None for products where they are usually
    faster. Call it once, before the model is compiled or wrapped, and only if a CPU computes it.
    """
    for part in model.modules():
        if not isinstance(part, Attention | MLP | Transformer):
            continue
        # Adapters of peft wrap a layer. Their own layers stay torch's.
        layers = [getattr(child, "base_layer", child) for child in part.children()]
        for layer in (part, *layers):
            faster = FASTER.get(type(layer))
            if faster is not None and not (faster is ProductAttention and attention == KERNEL):
                layer.__class__ = faster
        if isinstance(part, ProductAttention) and attention == PRODUCTS:
            part.longest = sys.maxsize
