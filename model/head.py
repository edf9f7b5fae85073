"""The output layer, the loss of its logits, and the loss over a text.

Letters in shapes: B batch, T time (positions), N = B * T, C channels, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.frozen import compute_dtype, product
from model.tensor import moved, summed_gradient

LOGIT_BYTES = 256 << 20
"""Most memory of the float32 logits of a chunk. Smaller products do not fill a GPU."""
ALIGNED = 64
"""CUDA's 16-bit products are fast for a multiple of this number of outputs."""
ROOM = 64
"""A power of two, by which sums over positions are smaller until they are in float32."""
IGNORED = -100
"""A target with this value does not count in the loss (cross_entropy's convention)."""


class Head(nn.Linear):
    """An output layer without a bias: logits, or their loss, in chunks of a large vocabulary.

    One module for both, because FSDP's hooks require that each module is called once.
    """

    casts_weights = True
    mesh: Any = None
    """The processes that share matrices (`model.tensor`): each computes the loss of some positions.
    """

    def forward(self, hidden: Tensor, targets: Tensor | None = None) -> Tensor:
        """Hidden (B, T, C) to logits (B, T, V), or with targets (B, T) to their mean loss.

        That is 0 if no target counts.
        """
        if targets is None:
            return self.logits(hidden)
        hidden, targets = hidden.flatten(0, 1), targets.flatten()
        if self.mesh is None and self.out_features <= self.in_features:
            return mean_loss(self.logits(hidden), targets)
        weight = self.weight if torch.is_grad_enabled() else self.weight.detach()
        if self.mesh is not None:
            return self._shared_loss(hidden, weight, targets)
        summed: Tensor = _SummedLoss.apply(hidden, weight, targets)
        return summed / target_count(targets)

    def _shared_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        """The mean loss, to which each process of the mesh adds that of some of N positions."""
        from torch.distributed.tensor import Partial, Replicate, Shard

        own = [moved(one, self.mesh, Replicate(), Shard(0)) for one in (hidden, targets)]
        summed = _SummedLoss.apply(own[0], summed_gradient(weight, self.mesh), own[1])
        return moved(summed, self.mesh, Partial(), Replicate()) / target_count(targets)

    def logits(self, hidden: Tensor) -> Tensor:
        """Hidden (..., C) to logits (..., V)."""
        multiply = F.linear if self.weight.requires_grad else product
        return multiply(hidden, aligned(hidden, self.weight))[..., : len(self.weight)]


def chunk_rows(vocab_size: int) -> int:
    """The positions whose logits the loss has in memory at once."""
    return max(1, LOGIT_BYTES // (4 * vocab_size))


def chunks(positions: int, rows: int) -> Iterator[slice]:
    """Positions in chunks of so many rows; the last may have fewer. A plan leaves out most."""
    for begin in range(0, positions, rows):
        yield slice(begin, begin + rows)


def aligned(hidden: Tensor, weight: Tensor) -> Tensor:
    """An output layer (V, C) with rows of zeros at its end where CUDA is faster with them."""
    missing = -len(weight) % ALIGNED
    if not missing or hidden.device.type != "cuda" or compute_dtype(hidden) == torch.float32:
        return weight
    return F.pad(weight, (0, 0, 0, missing))


def mean_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """The loss of logits (N, V) and targets (N), in float32; 0 if no target counts.

    torch's cross_entropy computes its logarithms in 16 bits under autocast on CUDA. Of more logits
    than channels `_SummedLoss` computes the same in chunks: a change belongs there as well.
    """
    logarithms = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    summed = F.nll_loss(logarithms, targets, ignore_index=IGNORED, reduction="sum")
    return summed / target_count(targets)


def target_count(targets: Tensor) -> Tensor:
    """How many targets count, by which their summed loss is divided; 1 if none does.

    A micro-batch may have padding alone. Its loss is then 0 and has gradients of 0, where a mean
    would be 0/0, which no weight makes finite again.
    """
    return (targets != IGNORED).sum().clamp(min=1)


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
        total += torch.stack((mean * count, count))
    return total


class _SummedLoss(torch.autograd.Function):
    """The summed loss of hidden (N, C), of whose logits (N, V) only a chunk is in memory.

    The forward pass computes the gradients as well, while it has the logits of a chunk. A backward
    pass would have to compute them again, which takes a fourth matrix product.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        ctx.dtypes = hidden.dtype, weight.dtype
        dtype, outputs = compute_dtype(hidden), len(weight)
        hidden, weight = hidden.to(dtype), aligned(hidden, weight.to(dtype))
        padded = len(weight) - outputs  # their logits are left out
        wants_hidden, wants_weight, _ = ctx.needs_input_grad
        summed = torch.zeros((), device=hidden.device)
        of_hidden = torch.empty_like(hidden) if wants_hidden else None
        of_weight: Tensor | None = None
        for chunk in chunks(len(hidden), chunk_rows(outputs)):
            part, aims = hidden[chunk], targets[chunk]
            counts = (aims != IGNORED).to(dtype)[:, None]
            logits = F.linear(part, weight)[:, :outputs]
            logarithms = F.log_softmax(logits, dim=-1, dtype=torch.float32)
            del logits
            summed += F.nll_loss(logarithms, aims, ignore_index=IGNORED, reduction="sum")
            if not any(ctx.needs_input_grad):
                continue
            # Of the logits: their softmax, minus one at the target; nothing where it is ignored.
            gradient, places = logarithms.exp_(), torch.arange(len(aims), device=aims.device)
            gradient[places, aims.clamp(min=0)] -= (aims != IGNORED).float()
            del logarithms
            gradient = gradient.to(dtype)
            gradient = F.pad(gradient, (0, padded)) if padded else gradient
            if of_hidden is not None:
                of_hidden[chunk] = gradient @ weight * counts
            if wants_weight:
                # A sum over many positions of a frequent token may be too large for fp16.
                more = gradient.mT @ (part * (counts / ROOM))
                of_weight = more.float() if of_weight is None else of_weight.add_(more)
                del more
            del gradient
        ctx.save_for_backward(of_hidden, None if of_weight is None else of_weight[:outputs])
        return summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (of_hidden, of_weight), dtypes = ctx.saved_tensors, ctx.dtypes
        if of_hidden is not None:
            of_hidden = of_hidden.to(dtypes[0]) * grad
        if of_weight is not None:  # in place: it is as large as the weight
            of_weight = of_weight.mul_(ROOM * grad).to(dtypes[1])
        return of_hidden, of_weight, None
