"""The learning rate: a pure function of the step, so there is no scheduler to save."""

from __future__ import annotations

import math

from torch.optim import Optimizer

from config.schema import OptimConfig


def learning_rate_at(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The rate of step 1..max_steps: linear warm-up from 0, then down to `min_learning_rate`.

    Step `warmup_steps` has the full rate and `max_steps` the lowest. Between them it falls along
    half a cosine (SGDR, Loshchilov & Hutter, 2017), or with wsd it is stable first (MiniCPM, Hu et
    al., 2024) and falls as 1 - sqrt at the end (Hägele et al., 2024). A run shorter than its
    warm-up ends within it.
    """
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    begin = last_full_step(optim, max_steps)
    if step <= begin:
        return optim.learning_rate
    if step >= max_steps:
        return optim.min_learning_rate
    progress = (step - begin) / (max_steps - begin)
    falling = 0.5 * (1.0 + math.cos(math.pi * progress))
    if optim.schedule == "wsd":
        falling = 1.0 - math.sqrt(progress)
    return optim.min_learning_rate + (optim.learning_rate - optim.min_learning_rate) * falling


def last_full_step(optim: OptimConfig, max_steps: int) -> int:
    """The step after which the rate falls."""
    if optim.schedule == "cosine":
        return optim.warmup_steps
    return max(optim.warmup_steps, max_steps - round(optim.decay_fraction * max_steps))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use `rate` for the next update, in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
