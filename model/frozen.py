"""Layers whose weights are not trained, and kept in fewer bits than float32.

`keep_frozen` gives layers of a model another class; names stay. A product casts the weight to the
dtype in which it computes, from 16 bits or from four, and its backward pass casts the weight again.
So the cast copy of a weight exists only within a product.

Letters in shapes: N inputs, M outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from model.lora import INSTALL
from model.nf4 import BLOCK, STORAGE, dequantize, load_kernels, packed_width, quantize
from model.products import product

AUTO = "auto"
"""16 bits if the base is stored in 16 bits, so that no number is lost; otherwise float32."""
FLOAT32 = "float32"
DTYPES = {FLOAT32: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `model.frozen_dtype`."""
NF4 = "nf4"
"""Linear layers of the blocks in four bits, and the rest as with AUTO."""
KINDS = (AUTO, *DTYPES, NF4)


class FrozenError(ValueError):
    """Frozen weights that a model cannot have: a sentence with the key, the value, the remedy."""


class FrozenLinear(nn.Linear):
    """`nn.Linear` whose weight has another dtype than its input, or is packed in four bits."""

    is_packed = False
    """Whether the weight is (M, N / 64 * 18) numbers of `model.nf4.STORAGE`."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., N) to outputs (..., M)."""
        return product(x, self.weight, self.bias, dequantize if self.is_packed else None)


class FrozenEmbedding(nn.Embedding):
    """`nn.Embedding` that returns float32, as one of float32 weights does."""

    def forward(self, ids: Tensor) -> Tensor:
        """Token ids (...) to vectors (..., channels)."""
        return super().forward(ids).float()


LAYERS: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: FrozenLinear,
    nn.Embedding: FrozenEmbedding,
}
"""A subclass of torch's layers keeps its own class, and float32 unless it has `casts_weights`:
whoever wrote it may use its weights otherwise."""


def casts_weights(module: nn.Module) -> bool:
    """Whether the module, or its class in `LAYERS`, takes frozen weights of any dtype."""
    return type(module) in LAYERS or getattr(module, "casts_weights", False)


def keep_frozen(model: Any, kind: str, stored_as: str = FLOAT32, filled: bool = True) -> None:
    """Keep the matrices of a `LanguageModel` that are not trained as one of `KINDS` says.

    Vectors, such as biases and the weights of norms, stay float32, as do matrices of modules that
    cannot multiply them otherwise. AUTO is the dtype in which the base is stored. Call this before
    the model is compiled or wrapped. Where the weights are not `filled` with values yet, none are
    read, because that would take memory. Raises FrozenError where NF4 is not possible.
    """
    if kind == NF4:
        quantize_blocks(model, filled)
    cast_frozen(model, DTYPES.get(kind, DTYPES[stored_as]), filled)


def refuse_without_kernels() -> None:
    """Raise FrozenError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        sentence = f"model.frozen_dtype={NF4} needs bitsandbytes, which is not installed. {INSTALL}"
        raise FrozenError(sentence)


def quantize_blocks(model: Any, filled: bool) -> None:
    """Quantize frozen linear layers of a model's blocks: torch's own, with rows of whole blocks.

    Raises FrozenError if there are none.
    """
    refuse_without_kernels()
    layers = [
        one
        for one in model.blocks.modules()
        if type(one) is nn.Linear and not one.weight.requires_grad and one.in_features % BLOCK == 0
    ]
    if not layers:
        raise FrozenError(
            f"model.frozen_dtype={NF4}: no frozen linear layer of the blocks has a multiple of 64 "
            "inputs. Leave it out."
        )
    load_kernels()
    for layer in layers:
        weight = layer.weight.detach()
        shape = (len(weight), packed_width(weight.size(1)))
        values = torch.empty(shape, dtype=STORAGE, device=weight.device)
        if filled:
            values.copy_(quantize(weight))
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.__class__, layer.is_packed = FrozenLinear, True  # type: ignore[assignment]


def packed_layers(model: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """The layers whose weights are packed in four bits, by name."""
    for name, one in model.named_modules():
        if isinstance(one, FrozenLinear) and one.is_packed:
            yield name, one


def full_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters; a packed weight as one of its full shape that has no memory."""
    layers = {layer.weight: layer for _, layer in packed_layers(model)}
    for name, parameter in model.named_parameters():
        if (layer := layers.get(parameter)) is not None:
            shape = (layer.out_features, layer.in_features)
            parameter = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        yield name, parameter


def cast_frozen(model: nn.Module, dtype: torch.dtype, filled: bool) -> None:
    """Keep frozen matrices in a dtype, as far as their modules can multiply it."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    for parameter, places in owners.items():
        if parameter.requires_grad or parameter.dim() < 2 or parameter.dtype == dtype:
            continue
        if not all(casts_weights(module) for module, _ in places):
            continue
        values = parameter.detach()
        values = values.to(dtype) if filled else torch.empty_like(values, dtype=dtype)
        kept = nn.Parameter(values, requires_grad=False)
        for module, name in places:  # tied layers share it
            setattr(module, name, kept)
            module.__class__ = LAYERS.get(type(module), type(module))


def gather_in_16_bits(model: nn.Module) -> None:
    """Return what a 16-bit embedding returns under FSDP in mixed precision: 16 bits."""
    for module in model.modules():
        if type(module) is FrozenEmbedding:
            module.__class__ = nn.Embedding  # type: ignore[assignment]
