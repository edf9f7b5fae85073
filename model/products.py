"""Products with weights that are not trained, and kept in another dtype than they are used in.

Letters in shapes: N inputs, M outputs of a layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

Cast = Callable[[Tensor, torch.dtype], Tensor]
"""Makes a weight (M, N) of a dtype from a weight as it is kept."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x: that of autocast, where it is enabled, or x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, cast: Cast = Tensor.to
) -> Tensor:
    """`F.linear` of x (..., N) with what `cast` makes of a frozen weight (M, N), to (..., M)."""
    dtype = compute_dtype(x)
    if cast is Tensor.to and weight.dtype == dtype:
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.to(dtype)
    output: Tensor = _CastProduct.apply(x.to(dtype), weight, bias, cast)
    return output


class _CastProduct(torch.autograd.Function):
    """Keeps the weight as it is for the backward pass. autograd would keep the cast copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cast: Cast) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.cast = cast
        return F.linear(x, cast(weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (weight,), (wants_x, _, wants_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        of_x = grad @ ctx.cast(weight, grad.dtype) if wants_x else None
        return of_x, None, grad.flatten(0, -2).sum(0) if wants_bias else None, None
