"""Linear layers that multiply in fp8, by torchao: what accelerate's backend AO makes of a model.

A layer scales and casts its input, its weight and the gradient of its output to eight bits for each
product. Parameters stay as they are, with their names: FSDP gathers them as it does without fp8.
Like accelerate, this leaves out the first linear layer of a model and the last, its output layer.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

from torch import Tensor, nn

from model.lora import INSTALL, is_adapter
from model.products import compute_dtype

FP8 = "fp8"
"""accelerate's name of the precision."""
TENSORWISE = "tensorwise"
RECIPES = (TENSORWISE, "rowwise", "rowwise_with_gw_hp")
"""torchao's recipes, of which TENSORWISE is accelerate's. With the last, the gradient of the
weights stays in 16 bits."""
MULTIPLE = 16
"""Tensor cores multiply in fp8 matrices whose sizes are multiples of it."""


class Fp8Error(ValueError):
    """A model that cannot compute in fp8: a sentence with the entry, the value, the remedy."""


def use_fp8(model: Any, recipe: str, emulated: bool) -> None:
    """Have linear layers of the blocks of a `LanguageModel` multiply in fp8.

    `recipe` is one of `RECIPES`; `emulated` computes on any device, slowly. Call this after layers
    are frozen, and before the model is compiled or wrapped. Raises Fp8Error where torchao is not
    installed, and if no layer can.
    """
    if find_spec("torchao") is None:
        raise Fp8Error(f"mixed_precision: {FP8} needs torchao, which is not installed. {INSTALL}")
    first = next((one for one in model.modules() if isinstance(one, nn.Linear)), None)
    chosen = {
        one
        for name, one in model.blocks.named_modules()
        if one is not first and not is_adapter(name) and _can_convert(one)
    }
    if not chosen:
        raise Fp8Error(
            f"mixed_precision: {FP8} computes linear layers of the blocks in fp8, without the "
            f"first of the model, frozen ones and sizes that are not multiples of {MULTIPLE}. None "
            "is left. Set mixed_precision: bf16 in the accelerate config file."
        )
    manager: Any = logging.root.manager
    before = manager.disable
    logging.disable(logging.WARNING)  # torchao tells which kernels for other devices do not load
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    finally:
        logging.disable(before)
    # Micro-batches of any number of tokens: torchao pads the sum over tokens, as in accelerate.
    # Weights in fp8 between FSDP's processes would be another kind of tensor in the optimizer.
    config = Float8LinearConfig.from_recipe_name(recipe)
    config = replace(config, pad_inner_dim=True, emulate=emulated)
    convert_to_float8_training(
        model, module_filter_fn=lambda module, _: module in chosen, config=config
    )
    for layer in fp8_layers(model):
        layer.register_forward_pre_hook(_cast)


def _can_convert(layer: nn.Module) -> bool:
    """Whether torchao has a layer in its place, which computes the gradient of its weights."""
    if type(layer) is not nn.Linear or not layer.weight.requires_grad:
        return False
    return not any(size % MULTIPLE for size in layer.weight.shape)


def fp8_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model that multiply in fp8."""
    return (one for one in model.modules() if type(one).__name__ == "Float8Linear")


def _cast(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype. torchao's layer itself asks for that of CUDA alone."""
    x, *more = inputs
    return x.to(compute_dtype(x)), *more
