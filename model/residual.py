"""The residual stream: what every block reads, and adds its outputs to, in float32 or in bf16.

In bf16 the stream, its gradient, and what norms keep of it for the backward pass take half the
memory and traffic. Norms of it are computed in float32 with float32 weights: in 16 bits, the sums
over all positions that are the gradients of their weights lose most of their digits.

Letters in shapes: C channels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from model.products import compute_dtype

RESIDUAL_DTYPES = ("float32", "bf16")


def residual(embedded: Tensor, in_bf16: bool) -> Tensor:
    """What the stream begins with: float32, or the dtype of autocast, where that is enabled.

    Embeddings have 16 bits if FSDP gathers their weights so.
    """
    return embedded.to(compute_dtype(embedded.float())) if in_bf16 else embedded.float()


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
    """`F.layer_norm` of x (..., C) in 16 bits, computed in float32, and in 16 bits again."""
    normed: Tensor = _LayerNorm.apply(x, weight, bias, epsilon)
    return normed


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`F.rms_norm` of x (..., C) in 16 bits, computed in float32, and in 16 bits again."""
    normed: Tensor = _RMSNorm.apply(x, weight, epsilon)
    return normed


class _LayerNorm(torch.autograd.Function):
    """Keeps x as it is for the backward pass. autograd would keep its float32 copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        normed, mean, scale = torch.native_layer_norm(
            x.float(), weight.shape, weight.float(), bias.float(), epsilon
        )
        ctx.save_for_backward(x, weight, bias, mean, scale)
        return normed.to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale = ctx.saved_tensors
        inputs = (x, weight, bias)
        gradients = torch.ops.aten.native_layer_norm_backward(
            *(grad.float(), x.float(), weight.shape, mean, scale, weight.float(), bias.float()),
            list(ctx.needs_input_grad[:3]),
        )
        found = zip(gradients, inputs, strict=True)
        return *(None if one is None else one.to(of.dtype) for one, of in found), None


class _RMSNorm(torch.autograd.Function):
    """The same for the root of the mean square. torch has its fused kernel for CUDA alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        whole = x.float()
        scale = (whole.square().mean(-1, keepdim=True) + epsilon).rsqrt()
        ctx.save_for_backward(x, weight, scale)
        return (whole * scale * weight.float()).to(x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        wants_x, wants_weight, _ = ctx.needs_input_grad
        whole, normed = grad.float(), x.float() * scale
        of_weight = (whole * normed).flatten(0, -2).sum(0).to(weight.dtype)
        whole = whole * weight.float()
        of_x = (whole - normed * (whole * normed).mean(-1, keepdim=True)) * scale
        return of_x.to(x.dtype) if wants_x else None, of_weight if wants_weight else None, None
