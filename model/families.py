"""The families of models, and which one a config.json or `model.family` names.

Those of `FAMILIES` are our own: their sizes are keys of the configuration. Every other model is
built by transformers (`model.causal_lm`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model.causal_lm import CausalLMConfig
from model.family import LanguageModel, ModelConfig
from model.gpt import GPTConfig
from model.layout import Layout
from model.llama import LlamaConfig
from model.lora import add_adapters

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


def layout_without_memory(config: ModelConfig) -> Layout:
    """The layout of a model of these sizes, of which no parameter has memory.

    Raises ModelError and LoraError.
    """
    with torch.device("meta"), uninitialized():
        model = build_model(config)
    return model.layout()


@contextmanager
def uninitialized() -> Iterator[None]:
    """Keep the parameters of modules that are built here as they are allocated.

    Random numbers for a tensor without memory make torch import its compiler, for a second.
    """
    with _WithoutInitialization():
        yield


class _WithoutInitialization(TorchFunctionMode):
    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == nn.init.__name__:
            return kwargs["tensor"]
        return func(*args, **kwargs)
