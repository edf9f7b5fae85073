"""What a step depends on besides its batch, as pure functions: nothing of it is ever saved.

Seeds and the learning rate follow from the step, and kernels and sums keep one order. So a resumed
run equals, bit by bit, one that was not interrupted.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from config.schema import ConfigError, OptimConfig
from optim.schedules import SCHEDULES, Schedule
from training.distributed.environment import on_cpu
from training.distributed.strategy import grads_in_buckets


def reseed(seed: int, step: int, process: int) -> None:
    """Seed the global generators of every device from (seed, step, process).

    The loop calls this at the start of each step, so that dropout does not depend on restarts.
    Step 0 of process 0 seeds the initial weights.
    """
    words = np.random.SeedSequence((seed, step, process)).generate_state(2, np.uint32)
    number = int(words[0]) << 31 | int(words[1]) >> 1
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # manual_seed would also record a stack trace for each absent device
        torch.default_generator.manual_seed(number)


def schedule_of(optim: OptimConfig) -> Schedule:
    """The schedule that `optim.schedule` names. Raises ConfigError for an unknown name."""
    if optim.schedule not in SCHEDULES:
        raise ConfigError(f"optim.schedule={optim.schedule} must be {' or '.join(SCHEDULES)}.")
    return SCHEDULES[optim.schedule]


def learning_rate_at(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The learning rate of step 1..max_steps: linear warm-up from 0, then the schedule.

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


def compute_reproducibly() -> None:
    """Choose kernels whose results do not vary from run to run.

    On a CPU all kernels of a GPT are deterministic. On CUDA the backward pass of attention adds up
    in any order by default, and `warn_only=True` only warns of that. cuBLAS needs no
    CUBLAS_WORKSPACE_CONFIG, because torch gives it a workspace for each stream.
    """
    if torch.cuda.is_available() and not on_cpu():
        torch.use_deterministic_algorithms(True)
        # A debugging aid that costs time. (mypy does not know this module.)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_gradient_buckets(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, shape: tuple[int, int]
) -> None:
    """Let DDP order its gradients before the first step. Every process must call this.

    `shape` (B, T) is that of a micro-batch: a compiled model is compiled for this shape only.

    DDP rebuilds its buckets after the first backward pass of a process. With three or more
    processes, the place of a gradient in its bucket decides the order of its sum. So the first step
    after a restart would differ in its last bits from the same step of an uninterrupted run.
    """
    if not grads_in_buckets(model):
        return
    one_pass(accelerator, model, optimizer, shape)


def one_pass(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, shape: tuple[int, int]
) -> None:
    """A forward and a backward pass whose gradients are discarded. Every process must call this."""
    zeros = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
    accelerator.backward(model(zeros, zeros))
    optimizer.zero_grad(set_to_none=not grads_in_buckets(model))
