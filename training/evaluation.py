"""The held-out loss: one number, the same whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from model.gpt import IGNORED


@torch.no_grad()
def held_out_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Mean loss in nats over all targets in `batches` of all processes; every process calls this.

    The model computes the loss as in training, so it needs no more memory. Sums and counts are
    reduced in float64 and divided once, so uneven shares have the right weight. Dropout is off.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss sum, targets
    if accelerator.device.type == "mps":
        total = total.float()  # has no float64
    for inputs, targets in batches:
        count = (targets != IGNORED).sum().to(total.dtype)
        mean = model(inputs, targets).to(total.dtype)
        # A process that has only padding rows computes a mean of 0/0.
        total += torch.stack((torch.where(count > 0, mean * count, 0.0), count))
    model.train()
    loss_sum, count = accelerator.reduce(total, "sum").tolist()
    return loss_sum / count
