"""The output layer, the loss of its logits, and the loss over a text.

Letters in shapes: B batch, T time (positions), N = B * T, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.products import product

LOGIT_CHUNKS = 4
"""Number of chunks in which the loss computes logits, if there are more of them than channels."""
ROOM = 64
"""A power of two, by which sums over positions are smaller until they are in float32."""
IGNORED = -100
"""A target with this value does not count in the loss (cross_entropy's convention)."""


class Head(nn.Linear):
    """The output layer: logits, or their loss, computed in chunks if the vocabulary is large.

    One module for both, because FSDP's hooks require that each module is called once.
    """

    casts_weights = True

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Hidden (B, T, C) to logits (B, T, V), or with targets (B, T) to their mean loss."""
        if targets is None:
            return self.logits(hidden)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.out_features <= self.in_features:
            return mean_loss(self.logits(hidden), targets)
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
        summed: Tensor = _SummedLoss.apply(hidden, weight, targets)
        return summed / (targets != IGNORED).sum()

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden (..., C) to logits (..., V)."""
        if self.weight.requires_grad:
            return F.linear(hidden, self.weight)
        return product(hidden, self.weight)


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of logits (N, V) and targets (N), in float32.

    torch's cross_entropy computes its logarithms in 16 bits under autocast on CUDA.
    """
    logarithms = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    return F.nll_loss(logarithms, targets, ignore_index=IGNORED)


@torch.no_grad()
def summed_loss(
    model: nn.Module, batches: Iterable[tuple[Sequence[Tensor], float]], device: torch.device
) -> Tensor:
    """The loss in nats, summed over all targets in `batches`, and the number of targets: (2,).

    The batches are those of a loader: inputs, targets and perhaps positions, with their share.

    The model computes the loss as in training, so it needs no more memory. The caller turns dropout
    off. The sums are float64, or float32 where the device has no float64.
    """
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros(2, dtype=dtype, device=device)
    for batch, _ in batches:
        count = (batch[1] != IGNORED).sum().to(total.dtype)
        mean = model(*batch).to(total.dtype)
        # A batch that has only padding rows has a mean of 0/0.
        total += torch.stack((torch.where(count > 0, mean * count, 0.0), count))
    return total


class _SummedLoss(torch.autograd.Function):
    """The summed loss of hidden (N, C), of whose logits (N, V) only a chunk is in memory.

    The forward pass computes the gradients as well, while it has the logits of a chunk. A backward
    pass would have to compute them again, which takes a fourth matrix product.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        kind = hidden.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
        hidden, weight = hidden.to(dtype), weight.to(dtype)
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        summed = torch.zeros((), device=hidden.device)
        of_hidden: list[Tensor] = []
        of_weight = torch.zeros_like(weight, dtype=torch.float32) if wants_weight else None
        for part, aims in zip(hidden.chunk(LOGIT_CHUNKS), targets.chunk(LOGIT_CHUNKS), strict=True):
            logarithms = F.log_softmax(F.linear(part, weight), dim=-1, dtype=torch.float32)
            summed += F.nll_loss(logarithms, aims, ignore_index=IGNORED, reduction="sum")
            if not (wants_hidden or wants_weight):
                continue
            # Of the logits: their softmax, minus one at the target; nothing where it is ignored.
            gradient, counts = logarithms.exp_(), (aims != IGNORED).to(dtype)[:, None]
            gradient[torch.arange(len(aims), device=aims.device), aims.clamp(min=0)] -= 1.0
            del logarithms
            gradient = gradient.to(dtype)
            if wants_hidden:
                of_hidden.append(gradient @ weight * counts)
            if of_weight is not None:
                # A sum over many positions of a frequent token may be too large for fp16.
                of_weight += gradient.mT @ (part * (counts / ROOM))
            del gradient
        ctx.save_for_backward(torch.cat(of_hidden) if wants_hidden else None, of_weight)
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (of_hidden, of_weight), (of_first, of_second) = ctx.saved_tensors, ctx.dtypes
        if of_hidden is not None:
            of_hidden = of_hidden.to(of_first) * grad
        if of_weight is not None:  # in place: it is as large as the weight
            of_weight = of_weight.mul_(ROOM * grad).to(of_second)
        return of_hidden, of_weight, None
