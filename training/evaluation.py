"""The held-out loss: one number, the same whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import Tensor, nn

from model.gpt import IGNORED


@torch.no_grad()
def held_out_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]]
) -> float:
    """Mean loss in nats over every target that `batches` hold on all processes.

    Every process must call this. Sums and counts are added up in float64 and divided once, so
    uneven shares cannot weigh differently. Dropout is off meanwhile.
    """
    model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=accelerator.device)  # loss sum, targets
    if accelerator.device.type == "mps":
        total = total.float()  # has no float64
    for inputs, targets in batches:
        logits = model(inputs)
        summed = F.cross_entropy(
            logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum"
        )
        total += torch.stack((summed, (targets != IGNORED).sum())).to(total.dtype)
    model.train()
    loss_sum, count = accelerator.reduce(total, "sum").tolist()
    return loss_sum / count
