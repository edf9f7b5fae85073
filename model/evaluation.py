"""The loss of a model over windows of text, as sums that can be reduced over processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from model.head import IGNORED


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
