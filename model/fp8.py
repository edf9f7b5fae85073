"""Linear layers that multiply in fp8, by torchao: those that accelerate's backend AO converts.

A layer scales and casts its input, its weight and the gradient of its output to eight bits for each
product. Parameters stay as they are, with their names: FSDP gathers them as it does without fp8.
Like accelerate, this leaves out the first linear layer of a model and the last, its output layer.
"""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

from torch import nn

from model.lora import INSTALL, is_adapter

FP8 = "fp8"
"""accelerate's name of the precision."""
MULTIPLE = 16
"""Tensor cores multiply in fp8 matrices whose sizes are multiples of it."""


class Fp8Error(ValueError):
    """A model that cannot compute in fp8: a sentence with the entry, the value, the remedy."""


def use_fp8(model: Any, emulated: bool) -> None:
    """Have linear layers of the blocks of a `LanguageModel` multiply in fp8.

    `emulated` computes on any device, slowly. Call this after layers are frozen, and before the
    model is compiled or wrapped. Raises Fp8Error where torchao is not installed, and if no layer
    can.
    """
    if find_spec("torchao") is None:
        raise Fp8Error(f"mixed_precision: {FP8} needs torchao, which is not installed. {INSTALL}")
    first = next((one for one in model.modules() if isinstance(one, nn.Linear)), None)
    converted = [
        one
        for name, one in model.blocks.named_modules()
        if type(one) is nn.Linear and one is not first and not is_adapter(name)
        if one.weight.requires_grad and not any(size % MULTIPLE for size in one.weight.shape)
    ]
    if not converted:
        raise Fp8Error(
            f"mixed_precision: {FP8} computes linear layers of the blocks in fp8, without the "
            f"first of the model, frozen ones and sizes that are not multiples of {MULTIPLE}. None "
            "is left. Set mixed_precision: bf16 in the accelerate config file."
        )
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)  # torchao tells which kernels for other devices do not load
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    finally:
        logging.disable(before)
    # Micro-batches of any number of tokens: torchao pads the sum over tokens, as in accelerate.
    # Weights in fp8 between FSDP's processes would be another kind of tensor in the optimizer.
    config = Float8LinearConfig(pad_inner_dim=True, emulate=emulated)
    convert_to_float8_training(
        model, module_filter_fn=lambda module, _: module in converted, config=config
    )
