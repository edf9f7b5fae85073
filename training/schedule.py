"""The learning rate: a pure function of the step, so there is no scheduler to save."""

from __future__ import annotations

from torch.optim import Optimizer

from config.schema import ConfigError, OptimConfig
from optim.schedules import SCHEDULES, Schedule


def schedule_of(optim: OptimConfig) -> Schedule:
    """The schedule that `optim.schedule` names. Raises ConfigError for an unknown name."""
    if optim.schedule not in SCHEDULES:
        raise ConfigError(f"optim.schedule={optim.schedule} must be {' or '.join(SCHEDULES)}.")
    return SCHEDULES[optim.schedule]


def learning_rate_at(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The rate of step 1..max_steps: linear warm-up from 0, then as the schedule has it.

    Step `warmup_steps` has the full rate. After `last_full_step` it falls, down to
    `min_learning_rate` at `max_steps`. A run shorter than its warm-up ends within it.
    """
    schedule = schedule_of(optim)
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    begin = last_full_step(optim, max_steps)
    if step <= begin:
        return optim.learning_rate
    progress = 1.0 if step >= max_steps else (step - begin) / (max_steps - begin)
    most, least = optim.learning_rate, optim.min_learning_rate
    return least + (most - least) * schedule.fall(progress)


def last_full_step(optim: OptimConfig, max_steps: int) -> int:
    """The step after which the rate falls."""
    if not schedule_of(optim).is_stable_first:
        return optim.warmup_steps
    return max(optim.warmup_steps, max_steps - round(optim.decay_fraction * max_steps))


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use `rate` for the next update, in all groups."""
    for group in optimizer.param_groups:
        group["lr"] = rate
