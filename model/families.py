"""The families of models, and which one a config.json or `model.family` names.

Those of `FAMILIES` are our own: their sizes are keys of the configuration. Every other model is
built by transformers (`model.causal_lm`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from model.causal_lm import CausalLMConfig
from model.family import LanguageModel, ModelConfig
from model.gpt import GPTConfig
from model.layout import Layout
from model.llama import LlamaConfig
from model.lora import add_adapters
from model.new_weights import NewWeights, Recording

FAMILIES: dict[str, type[ModelConfig]] = {"gpt2": GPTConfig, "llama": LlamaConfig}
"""By `model.family`."""


def model_config(
    content: dict[str, Any], dropout: float = 0.0, activation_checkpointing: bool | str = False
) -> ModelConfig:
    """The sizes of the model in a config.json, which is untrusted input.

    Raises ModelError for a model that cannot be built here.
    """
    for family in FAMILIES.values():
        if (sizes := family.read(content, dropout, activation_checkpointing)) is not None:
            return sizes
    return CausalLMConfig.read(content, dropout, activation_checkpointing)


def build_model(config: ModelConfig) -> LanguageModel:
    """A model with random weights, on torch's default device; with `config.lora`, with adapters.

    Raises ModelError, and LoraError for adapters that it cannot have.
    """
    model = config.build()
    model.refuse_incomplete()
    if config.lora is not None:
        add_adapters(model.named, model.blocks, config.lora)
    return model


def build_empty(
    config: ModelConfig, complete: Callable[[LanguageModel], object] | None = None
) -> LanguageModel:
    """A model whose parameters have no values yet, and take memory only when they are written.

    `model.new_weights` has what a new model begins with. Buffers, which are constants, have their
    values. `complete` may add parameters, such as adapters. Raises what `build_model` does.
    """
    with (recording := Recording()):
        model = build_model(config)
        if complete is not None:
            complete(model)
    layout = model.layout()
    new = NewWeights(recording, {**layout.parameters(), **layout.adapters()})
    empty: dict[int, nn.Parameter] = {}
    for place, module in model.named_modules():
        for name, one in module.named_parameters(recurse=False):
            if one.is_meta and id(one) not in empty:  # tied parameters stay one
                # empty_like of a tensor without memory imports sympy, for a tenth of a second.
                memory = torch.empty_strided(one.shape, one.stride(), dtype=one.dtype, device="cpu")
                empty[id(one)] = nn.Parameter(memory, one.requires_grad)
            setattr(module, name, empty.get(id(one), one))
        for name, one in module.named_buffers(recurse=False):
            if one.is_meta:
                module._buffers[name] = new.value(one, f"{place}.{name}")
    model.new_weights = new
    return model


def layout_without_memory(config: ModelConfig) -> Layout:
    """The layout of a model of these sizes, of which no parameter has memory.

    Raises ModelError and LoraError.
    """
    with torch.device("meta"), Recording():
        model = build_model(config)
    return model.layout()
