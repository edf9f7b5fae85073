"""The held-out loss: one number, the same whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from accelerate import Accelerator
from torch import Tensor, nn

from model.evaluation import summed_loss


def held_out_loss(
    accelerator: Accelerator, model: nn.Module, batches: Iterable[tuple[Sequence[Tensor], float]]
) -> float:
    """Mean loss in nats over all targets in `batches` of all processes; every process calls this.

    The model computes the loss as in training, so it needs no more memory. Sums and counts are
    reduced in float64 and divided once, so uneven shares have the right weight. Dropout is off.
    """
    model.eval()
    total = summed_loss(model, batches, accelerator.device)
    model.train()
    loss_sum, count = accelerator.reduce(total, "sum").tolist()
    return loss_sum / count
