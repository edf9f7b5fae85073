"""The held-out loss: one number, the same whatever the number of processes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from accelerate import Accelerator
from accelerate.data_loader import DataLoaderShard
from accelerate.utils import send_to_device
from torch import Tensor, nn

from model.evaluation import summed_loss
from training.distributed.strategy import is_compiled


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


def first_window(accelerator: Accelerator, loader: DataLoaderShard, micro_batch: int) -> Any:
    """The batch of the first held-out window, on the device; the same on every process.

    A compiled model is compiled for the shape of a micro-batch, which the batch then has.
    """
    windows = loader.dataset
    items = list(windows.in_order(1))
    if is_compiled(accelerator):
        items += [windows.nothing] * (micro_batch - 1)
    return send_to_device(windows.__getitems__(items), accelerator.device)
