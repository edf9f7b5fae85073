"""The learning rate: a pure function of the step, so there is no scheduler to save."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from config.schema import OptimConfig


def learning_rate_at(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The rate of step 1..max_steps: linear warm-up from 0, then a cosine to `min_learning_rate`.

    Step `warmup_steps` has the full rate and `max_steps` the lowest (half a cosine as in SGDR,
    Loshchilov & Hutter, 2017). A run shorter than its warm-up ends within it.
    """
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    if step >= max_steps:
        return optim.min_learning_rate
    progress = (step - optim.warmup_steps) / (max_steps - optim.warmup_steps)
    above = optim.learning_rate - optim.min_learning_rate
    return optim.min_learning_rate + above * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use `rate` for the next update, in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
