"""Which model a config.json describes, our GPT or one of transformers; the layout of its files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from model.causal_lm import (
    CausalLM,
    LanguageModel,
    ModelConfig,
    UnknownArchitecture,
    build_model,
    causal_lm_config,
)
from model.gpt import ACTIVATIONS, GPTConfig
from model.gpt2_layout import GPT2Layout, gpt2_config, gpt_shape
from model.layout import Layout, ModelError
from model.lora import LoraError
from snapshot.errors import SnapshotError

OWN_VALUES: dict[str, tuple[Any, ...]] = {
    "activation_function": tuple(ACTIVATIONS),
    "layer_norm_epsilon": (1e-5,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "reorder_and_upcast_attn": (False,),
    "add_cross_attention": (False,),
    "tie_word_embeddings": (True,),
}
"""Entries of a GPT-2's config.json that decide its computation, with the values of model/gpt.py."""
LARGEST_NUMBER = 2**31
LARGEST_SIZE = 2**24
MOST_LAYERS = 20_000
COUNTS = ("layer", "expert")
"""Parts of the names of entries that count modules."""


def is_own(content: dict[str, Any]) -> bool:
    """Whether model/gpt.py computes what this config.json describes."""
    if content.get("model_type") != GPTConfig.family:
        return False
    width = content.get("n_embd")
    inner = content.get("n_inner")
    return (inner is None or (isinstance(width, int) and inner == 4 * width)) and all(
        content.get(name, values[0]) in values for name, values in OWN_VALUES.items()
    )


def model_config(
    content: Any, where: str, dropout: float = 0.0, activation_checkpointing: bool = False
) -> ModelConfig:
    """The sizes of the model in a config.json, which is untrusted input.

    `where` names it in messages. Raises SnapshotError for a model that cannot be built here.
    """
    if not isinstance(content, dict):
        raise SnapshotError(f"{where} is not the configuration of a model")
    if is_own(content):
        shape = gpt_shape({"activation_function": "gelu_new", **content})
        sizes = [size for size in shape.values() if isinstance(size, int)]
        if not all(1 <= size <= LARGEST_SIZE for size in sizes) or shape["n_layer"] > MOST_LAYERS:
            raise SnapshotError(f"{where} has sizes that no model has")
        if shape["n_embd"] % shape["n_head"]:
            raise SnapshotError(f"{where} has an n_embd that is not a multiple of its n_head")
        return GPTConfig(
            **shape, dropout=dropout, activation_checkpointing=activation_checkpointing
        )
    for name, number in _numbers(content):
        counts = any(part in name for part in COUNTS)
        if abs(number) > LARGEST_NUMBER or (counts and number > MOST_LAYERS):
            raise SnapshotError(f"{where} has {name}={number:g}, which no model has")
    try:
        return causal_lm_config(content, dropout, activation_checkpointing)
    except UnknownArchitecture as error:
        raise SnapshotError(f"{where} cannot be used: {error}") from error


def config_json(config: ModelConfig) -> dict[str, Any]:
    """The config.json of a model, as transformers reads it."""
    return gpt2_config(vars(config)) if isinstance(config, GPTConfig) else config.content


def layout_of(model: LanguageModel) -> Layout:
    """The layout of a model."""
    if isinstance(model, CausalLM):
        from model.transformers_layout import TransformersLayout

        return TransformersLayout(model)
    return GPT2Layout(model)


def layout_for(config: ModelConfig) -> Layout:
    """The layout of a model of these sizes, of which no parameter has memory.

    Raises SnapshotError for sizes that contradict each other.
    """
    try:
        with torch.device("meta"), _Uninitialized():
            return layout_of(build_model(config))
    except UnknownArchitecture as error:
        raise SnapshotError(f"its config.json cannot be used: {error}") from error
    except LoraError as error:
        raise SnapshotError(str(error).rstrip(".")) from error


def check_described(layout: Layout) -> None:
    """Raise SnapshotError where the config.json of a snapshot would describe another model."""
    try:
        layout.refuse_undescribed()
    except ModelError as error:
        raise SnapshotError(str(error)) from error


class _Uninitialized(TorchFunctionMode):
    """Modules that are built here keep their parameters as they are allocated.

    Random numbers for a tensor without memory make torch import its compiler, for a second.
    """

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


def _numbers(content: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """Every number in a JSON value, with the name of the entry that holds it."""
    if isinstance(content, dict):
        for key, value in content.items():
            yield from _numbers(value, str(key))
    elif isinstance(content, list):
        for value in content:
            yield from _numbers(value, name)
    elif isinstance(content, int | float) and not isinstance(content, bool):
        yield name, content
