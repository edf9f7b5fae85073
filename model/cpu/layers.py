"""Layers that compute the same as torch's, faster on a CPU; `tune` is the way into a model.

Models are written with torch's layers and know nothing of this folder. `tune` gives some of them
another class, as FSDP does. Each class extends that of the layer by one function with the same
arguments: parameters, their names and everything else stay.

Letters in shapes: B batch, H heads, T positions, D channels of a head.
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.documents import Rows
from model.family import Attend, Part
from model.frozen import FrozenLinear

WAYS = PRODUCTS, KERNEL = "products", "kernel"
MATMUL_ATTENTION_LENGTH = 512
"""The longest sequence for which products are used unless they are requested: they keep T * T
weights for the backward pass."""
QUERY_CHUNK_BYTES = 512
"""Divided by the bytes of a number, the queries of one matrix product: 128 in float32."""
LEVELS = 2**16
"""The probabilities of dropout on a CPU are multiples of 1 / LEVELS."""
LEAST_FEATURES = 384
"""Of inputs and outputs: in smaller layers the copy takes longer than it saves (RESULTS.md)."""


def dropout(x: Tensor, probability: float) -> Tensor:
    """`F.dropout` in training: zeros with `probability`, and the rest scaled to the same mean.

    On a CPU the probability is rounded to a multiple of 1 / LEVELS. The mask is a function of the
    state of torch's default generator, as that of `F.dropout` is, but it is another one.
    """
    dropped = round(probability * LEVELS)
    if dropped in (0, LEVELS):
        return F.dropout(x, probability)
    words = torch.empty((x.numel() + 3) // 4, dtype=torch.int64)
    numbers = words.random_(-(2**63), None).view(torch.int16)[: x.numel()].view(x.shape)
    kept = (numbers >= dropped - LEVELS // 2).to(x.dtype)
    return x * kept.mul_(LEVELS / (LEVELS - dropped))


class FastDropout(nn.Dropout):
    """`nn.Dropout` by `dropout`."""

    def forward(self, x: Tensor) -> Tensor:
        """Returns x, in training with dropout; of the same shape and type."""
        return dropout(x, self.p) if self.training else x


def matmul_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = True
) -> Tensor:
    """Causal `F.scaled_dot_product_attention` as matrix products.

    Queries, keys, values and the result are each (B, H, T, D). Each chunk of queries is multiplied
    only with the keys that it may attend to.
    """
    assert is_causal
    batch, heads, time, size = query.shape
    chunk = max(1, QUERY_CHUNK_BYTES // query.element_size())
    flat = (batch * heads, time, size)
    rows, keys, values = query.reshape(flat), key.reshape(flat), value.reshape(flat)
    mixed = []
    for begin in range(0, time, chunk):
        part = rows[:, begin : begin + chunk]
        end = begin + part.size(1)
        mask = query.new_full((end - begin, end), -math.inf).triu(begin + 1)
        past = keys[:, :end].transpose(1, 2)
        scores = torch.baddbmm(mask, part, past, alpha=size**-0.5)  # (B * H, chunk, end)
        weights = scores.softmax(dim=-1)
        if dropout_p:
            weights = dropout(weights, dropout_p)
        mixed.append(torch.bmm(weights, values[:, :end]))
    return torch.cat(mixed, dim=1).view(batch, heads, time, size)


@cache
def attends_as_torch() -> bool:
    """Whether `Attend` computes what products do. It does not where somebody has changed it."""
    numbers = torch.arange(48, dtype=torch.float32).view(3, 1, 2, 4, 2).sin()  # draws nothing
    with torch.no_grad():
        own = Attend()(*numbers, is_causal=True)
        return torch.allclose(own, matmul_attention(*numbers), atol=1e-5)


class ProductAttend(Attend):
    """Attention by products where they are faster."""

    longest = MATMUL_ATTENTION_LENGTH
    """Positions. Longer sequences are left to torch's kernel."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        rows: Rows | None = None,
        **options: Any,
    ) -> Tensor:
        """As `Attend`, which computes whatever products do not."""
        causal = options.get("is_causal") and options.keys() <= {"is_causal", "dropout_p"}
        if rows is None and causal and query.size(2) <= self.longest:
            return matmul_attention(query, key, value, **options)
        return super().forward(query, key, value, rows, **options)


class AmxLinear(nn.Linear):
    """`nn.Linear` with a bias, by `linear` in training under bf16 autocast."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., in_features) to outputs (..., out_features)."""
        if (
            torch.is_grad_enabled()
            and torch.is_autocast_enabled("cpu")
            and torch.get_autocast_dtype("cpu") == torch.bfloat16
            and not torch.compiler.is_compiling()  # the compiler computes it in its own way
        ):
            return linear(x, self.weight, self.bias)
        return super().forward(x)


class FrozenAmxLinear(AmxLinear, FrozenLinear):
    """The same for a weight that is kept in other bits; whatever AMX leaves is `FrozenLinear`'s."""


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


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    Attend: ProductAttend,
    nn.Linear: AmxLinear,
    FrozenLinear: FrozenAmxLinear,
    nn.Dropout: FastDropout,
}
"""A subclass keeps its own: whoever wrote it changed what it computes."""


def tune(model: nn.Module, attention: str | None = None) -> None:
    """Make a model of our own compute with the layers of this folder; any other stays as it is.

    `attention` is `run.attention`: PRODUCTS, KERNEL, or None for products where they are usually
    faster. Call it once, before the model is compiled or wrapped, and only if a CPU computes it.
    """
    for part in model.modules():
        if not isinstance(part, Part):
            continue
        for child in part.children():
            # Adapters of peft wrap a layer. Their own layers stay torch's.
            layer = getattr(child, "base_layer", child)
            faster = FASTER.get(type(layer))
            if faster is not None and _is_faster(layer, attention):
                layer.__class__ = faster
            if isinstance(layer, ProductAttend) and attention == PRODUCTS:
                layer.longest = sys.maxsize


def _is_faster(layer: nn.Module, attention: str | None) -> bool:
    """Whether the layer's class in `FASTER` is faster for its sizes, here."""
    if isinstance(layer, nn.Linear):
        is_wide = min(layer.weight.shape) >= LEAST_FEATURES
        return layer.bias is not None and is_wide and has_amx()
    if isinstance(layer, nn.Dropout):
        return layer.p > 0
    return attention != KERNEL
