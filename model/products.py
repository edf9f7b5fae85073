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
    x: Tensor, weight: Tensor, bias: Tensor | None = None, cast: Cast | None = None
) -> Tensor:
    """`F.linear` of x (..., N) with what `cast` makes of a frozen weight (M, N), to (..., M).

    Without it, the weight is cast to the dtype of the product, if it has another one.
    """
    if cast is None and weight.dtype == compute_dtype(x):
        return F.linear(x, weight, bias)
    output: Tensor = _CastProduct.apply(x, weight, bias, cast or Tensor.to)
    return output


class _CastProduct(torch.autograd.Function):
    """Keeps the weight as it is for the backward pass. autograd would keep the cast copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cast: Cast) -> Tensor:
        dtype = compute_dtype(x)
        ctx.save_for_backward(weight)
        ctx.cast, ctx.dtypes = cast, (x.dtype, None if bias is None else bias.dtype)
        bias = None if bias is None else bias.to(dtype)
        return F.linear(x.to(dtype), cast(weight, dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (weight,), (of_x, of_bias) = ctx.saved_tensors, ctx.dtypes
        wants_x, _, wants_bias, _ = ctx.needs_input_grad
        return (
            (grad @ ctx.cast(weight, grad.dtype)).to(of_x) if wants_x else None,
            None,
            grad.flatten(0, -2).sum(0).to(of_bias) if wants_bias else None,
            None,
        )
