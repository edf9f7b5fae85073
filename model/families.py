"""The families of models, and which one a config.json names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from model.causal_lm import CausalLMConfig
from model.family import LanguageModel, ModelConfig
from model.gpt import GPTConfig
from model.layout import Layout, ModelError
from model.lora import add_adapters
from model.new_weights import WithoutMemory

FAMILIES: tuple[type[ModelConfig], ...] = (GPTConfig, CausalLMConfig)
"""The first that reads a config.json builds its model. The last, of transformers, reads any."""
ARCHITECTURES = {one.name: one for one in Path(__file__).with_name("architectures").iterdir()}
"""By the name of a preset of `model=`, the folder with the config.json that it trains.

The vocabulary, the context and the end of a text are null there: they are those of the run.
"""


def model_config(
    content: dict[str, Any], dropout: float = 0.0, activation_checkpointing: bool = False
) -> ModelConfig:
    """The sizes of the model in a config.json, which is untrusted input.

    Raises ModelError for a model that cannot be built here.
    """
    read = (one.read(content, dropout) for one in FAMILIES)
    sizes = next(sizes for sizes in read if sizes is not None)
    return replace(sizes, activation_checkpointing=activation_checkpointing)


def build_model(config: ModelConfig) -> LanguageModel:
    """A model with random weights, on torch's default device; with `config.lora`, with adapters.

    Its own config names the layers that have adapters. Raises ModelError, and LoraError for
    adapters that it cannot have.
    """
    model = config.build()
    if config.lora is not None:
        lora = add_adapters(model.named, model.blocks, config.lora)
        model.config = replace(config, lora=lora)
    return model


def build_without_memory(config: ModelConfig) -> LanguageModel:
    """A model of which the constants alone have memory and values. Raises as `build_model` does."""
    with WithoutMemory():
        return build_model(config)


def build_empty(config: ModelConfig) -> LanguageModel:
    """A model whose parameters have no values yet, and take memory only when they are written.

    Buffers, which are constants, have their values. Raises what `build_model` does, and ModelError
    for a buffer that is no constant.
    """
    model = build_without_memory(config)
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
                raise ModelError(f"cannot be built: its buffer {place}.{name} is no constant")
    return model


def layout_without_memory(config: ModelConfig) -> Layout:
    """The layout of a model of these sizes, of which no parameter has memory.

    Raises ModelError and LoraError.
    """
    with torch.device("meta"):
        return build_without_memory(config).layout()
