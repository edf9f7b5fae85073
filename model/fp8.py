"""Linear layers that multiply in fp8, by torchao: what accelerate's backend AO makes of a model.

A layer scales and casts its input, its weight and the gradient of its output to eight bits for each
product. Parameters stay as they are, with their names: FSDP gathers them as it does without fp8.
Like accelerate, this leaves out the first linear layer of a model and the last, its output layer.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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


@dataclass(frozen=True)
class Fp8:
    """What of a model is computed in fp8."""

    recipe: str
    layers: int
    """Linear layers of the blocks in fp8."""
    left: Counter[str]
    """Those in 16 bits, by the reason."""

    def as_words(self) -> str:
        """The line of the header."""
        total = self.layers + self.left.total()
        left = ", ".join(f"{count} ({reason})" for reason, count in self.left.items())
        kept = f"; in 16 bits: {left}" if left else ""
        return f"{self.layers} of {total} linear layers of the blocks, {self.recipe}{kept}"


def convert(model: nn.Module, blocks: nn.Module, recipe: str, emulated: bool) -> Fp8:
    """Have the linear layers of a model's blocks multiply in fp8; see `LanguageModel.use_fp8`."""
    if find_spec("torchao") is None:
        raise Fp8Error(f"mixed_precision: {FP8} needs torchao, which is not installed. {INSTALL}")
    first = next((one for one in model.modules() if isinstance(one, nn.Linear)), None)
    linear = [
        one
        for name, one in blocks.named_modules()
        if isinstance(one, nn.Linear) and not is_adapter(name)
    ]
    reasons = {one: "the first of the model" if one is first else _why_not(one) for one in linear}
    chosen = {one for one, reason in reasons.items() if reason is None}
    left = Counter(reason for reason in reasons.values() if reason is not None)
    if not chosen:
        found = ", ".join(f"{count} ({reason})" for reason, count in left.items()) or "none"
        raise Fp8Error(
            f"mixed_precision: {FP8} computes linear layers of the blocks in fp8, and none of "
            f"these can be: {found}. Set mixed_precision: bf16 in the accelerate config file."
        )
    with _quiet():
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        # Micro-batches of any number of tokens: torchao pads the sum over tokens, as in accelerate.
        # Weights in fp8 between FSDP's processes would be another kind of tensor in the optimizer.
        config = Float8LinearConfig.from_recipe_name(recipe)
        config = replace(config, pad_inner_dim=True, emulate=emulated)
        convert_to_float8_training(
            model, module_filter_fn=lambda module, _: module in chosen, config=config
        )
    for layer in fp8_layers(model):
        layer.register_forward_pre_hook(_cast)
    return Fp8(recipe, len(chosen), left)


def _why_not(layer: nn.Linear) -> str | None:
    """Why a layer stays in 16 bits; None if it does not."""
    if not layer.weight.requires_grad:  # torchao would compute the gradient of the weights
        return "frozen"
    if any(size % MULTIPLE for size in layer.weight.shape):
        return f"a size is not a multiple of {MULTIPLE}"
    return None if type(layer) is nn.Linear else "of another class than torch's"


def fp8_layers(model: nn.Module) -> Iterator[nn.Module]:
    """The layers of a model that multiply in fp8."""
    return (one for one in model.modules() if type(one).__name__ == "Float8Linear")


def _cast(_: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Cast to autocast's dtype. torchao's layer itself asks for that of CUDA alone."""
    x, *more = inputs
    return x.to(compute_dtype(x)), *more


@contextmanager
def _quiet() -> Iterator[None]:
    """Hide what torchao logs while it is imported: its kernels for other devices."""
    manager: Any = logging.root.manager
    before = manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
