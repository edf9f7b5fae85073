"""Linear layers whose backward pass is fast in bf16 on a processor with AMX.

There, oneDNN takes about twice as long for a product whose first factor is transposed, as in the
gradient of a weight, and torch first copies the bias to every row of a layer's output.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

LEAST_FEATURES = 384
"""Of inputs and outputs: in smaller layers the copy takes longer than it saves (RESULTS.md)."""


class AmxLinear(nn.Linear):
    """`nn.Linear`, with a bias by `linear` in training under bf16 autocast where there is AMX."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., in_features) to outputs (..., out_features)."""
        if (
            self.bias is not None
            and min(self.weight.shape) >= LEAST_FEATURES
            and torch.is_grad_enabled()
            and torch.is_autocast_enabled("cpu")
            and torch.get_autocast_dtype("cpu") == torch.bfloat16
            and has_amx()
            and not torch.compiler.is_compiling()  # the compiler computes it in its own way
        ):
            return linear(x, self.weight, self.bias)
        return super().forward(x)


@cache
def has_amx() -> bool:
    """Whether the processor multiplies matrices of bf16 in tiles, and oneDNN uses them."""
    return torch.backends.mkldnn.is_available() and bool(
        torch.cpu.get_capabilities().get("amx_bf16")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """`F.linear` in bf16 on a CPU: x (..., N), weight (M, N) and bias (M) to (..., M)."""
    output: Tensor = _Linear.apply(x, weight, bias)
    return output


class _Linear(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        output: Tensor = torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")
        return output

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows = grad.flatten(0, -2)
        return (
            grad @ weight if of_x else None,
            _product_of_transposed(rows, x.flatten(0, -2)) if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


def _product_of_transposed(left: Tensor, right: Tensor) -> Tensor:
    """left.mT @ right, for left (K, M) and right (K, N), with a copy of the narrower transposed."""
    if left.size(1) <= right.size(1):
        return left.mT.contiguous() @ right
    return (right.mT.contiguous() @ left).mT.contiguous()
