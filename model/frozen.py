"""Layers whose weights are not trained, and kept in fewer bits than float32.

`keep_frozen` gives layers of a model another class, as `model.cpu.layers.tune` does; names and
shapes stay. A product casts the weight to the dtype in which it computes, and its backward pass
casts the weight again. So the cast copy of a weight exists only within a product.

Letters in shapes: N inputs, M outputs of a layer.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

AUTO = "auto"
"""16 bits if the base is stored in 16 bits, so that no number is lost; otherwise float32."""
FLOAT32 = "float32"
DTYPES = {FLOAT32: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `model.frozen_dtype`."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x: that of autocast, where it is enabled, or x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear` of x (..., N) with a weight (M, N) of any dtype, which is not trained."""
    if weight.dtype == compute_dtype(x):
        return F.linear(x, weight, bias)
    output: Tensor = _CastProduct.apply(x, weight, bias)
    return output


class _CastProduct(torch.autograd.Function):
    """Keeps the weight as it is for the backward pass. autograd would keep the cast copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        dtype = compute_dtype(x)
        ctx.save_for_backward(weight)
        ctx.dtypes = x.dtype, None if bias is None else bias.dtype
        return F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None]:
        (weight,), (of_x, of_bias) = ctx.saved_tensors, ctx.dtypes
        wants_x, _, wants_bias = ctx.needs_input_grad
        return (
            (grad @ weight.to(grad.dtype)).to(of_x) if wants_x else None,
            None,
            grad.flatten(0, -2).sum(0).to(of_bias) if wants_bias else None,
        )


class FrozenLinear(nn.Linear):
    """`nn.Linear` whose weight has another dtype than its input."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., N) to outputs (..., M)."""
        return product(x, self.weight, self.bias)


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


def keep_frozen(model: nn.Module, kind: str, filled: bool = True) -> None:
    """Keep the matrices that are not trained in a dtype of `DTYPES`, by its name.

    Vectors, such as biases and the weights of norms, stay float32, as do matrices of modules that
    cannot multiply them otherwise. Call this before the model is compiled or wrapped. Where they
    are not `filled` with values yet, none are read, because that would take memory.
    """
    dtype = DTYPES[kind]
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
