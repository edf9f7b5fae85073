"""What a step depends on besides its batch: seeds, learning rate, optimizer, kernels.

Seeds and rate are pure functions of the step, and kernels and sums keep one order. So nothing of
them is saved, and a resumed run equals, bit for bit, one that was not interrupted.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from config.schema import ConfigError, OptimConfig
from model.family import LanguageModel
from model.layout import is_frozen
from optim.optimizers import OPTIMIZERS
from optim.schedules import SCHEDULES
from training.distributed.accelerator import grads_in_buckets
from training.distributed.launcher import on_cpu

KEY = "optim.freeze"


def reseed(seed: int, step: int, process: int) -> None:
    """Seed the global generators, of devices, Python and NumPy, from (seed, step, process).

    The loop calls this at the start of each step, so that dropout does not depend on restarts.
    Step 0 of process 0 seeds the initial weights.
    """
    words = np.random.SeedSequence((seed, step, process)).generate_state(2, np.uint32)
    number = int(words[0]) << 31 | int(words[1]) >> 1
    if torch.accelerator.is_available():
        torch.manual_seed(number)
    else:  # manual_seed would also record a stack trace for each absent device
        torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number % 2**32)


def learning_rate_at(step: int, optim: OptimConfig, max_steps: int) -> float:
    """The learning rate of step 1..max_steps: linear warm-up from 0, then the schedule.

    Step `warmup_steps` has the full rate. At `max_steps` it has fallen to `min_learning_rate`. A
    run shorter than its warm-up ends within it.
    """
    schedule, begin = SCHEDULES[optim.schedule], optim.warmup_steps
    if schedule.is_stable_first:
        begin = max(begin, max_steps - round(optim.decay_fraction * max_steps))
    if step <= optim.warmup_steps:
        return optim.learning_rate * step / optim.warmup_steps
    if step <= begin:
        return optim.learning_rate
    progress = 1.0 if step >= max_steps else (step - begin) / (max_steps - begin)
    most, least = optim.learning_rate, optim.min_learning_rate
    return least + (most - least) * schedule.fall(progress)


def set_learning_rate(optimizer: Optimizer, rate: float) -> None:
    """Use `rate` for the next update, in all groups; times `lr_scale`, in a group that has one."""
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)


def compute_reproducibly(compiled: bool = False) -> None:
    """Choose kernels whose results do not vary from run to run.

    On a CPU all kernels of a GPT are deterministic. On CUDA the backward pass of attention adds up
    in any order by default, and `warn_only=True` only warns of that. cuBLAS needs no
    CUBLAS_WORKSPACE_CONFIG, because torch gives it a workspace for each stream. In a `compiled` run
    inductor otherwise times kernels and takes the fastest, which may be another after a restart.
    """
    if torch.cuda.is_available() and not on_cpu():
        torch.use_deterministic_algorithms(True)
        # A debugging aid that costs time. (mypy does not know this module.)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        if compiled:
            import torch._inductor.config as inductor  # only here: it imports the compiler

            inductor.deterministic = True


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
    zeros = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
    accelerator.backward(model(zeros, zeros))
    optimizer.zero_grad(set_to_none=False)  # they are views of the buckets


def make_optimizer(
    model: LanguageModel, optim: OptimConfig, device: torch.device, precision: str
) -> Optimizer:
    """Build the `optim.name` optimizer (see `optim.optimizers`) over all trainable parameters.

    `precision` is the name that accelerate gives it. Muon orthogonalizes in bf16 if that is bf16,
    otherwise in float32, because rounding would change the losses with the number of processes.
    Raises ConfigError for a group with a rate of its own.
    """
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    optimizer = OPTIMIZERS[optim.name].build(model.layout().parts(), optim, device, dtype)
    for group in optimizer.param_groups:
        if group["lr"] != optim.learning_rate:
            raise ConfigError(
                f"optim.name={optim.name} gives a group the rate {group['lr']}, but each step sets "
                "the rates of all groups, up to optim.learning_rate. Give the group a factor "
                "instead, as its entry lr_scale."
            )
    return optimizer


def freeze(model: LanguageModel, patterns: Sequence[str]) -> None:
    """Exclude the parameters that the patterns match from training.

    Raises ConfigError for a pattern that matches none, and if nothing would be left to train.
    """
    if not patterns:
        return
    layout = model.layout()
    parameters = layout.parameters()
    for pattern in patterns:
        if not any(is_frozen(name, [pattern]) for name in parameters):
            first, *_, last = parameters
            raise ConfigError(
                f"{KEY}: {pattern!r} matches no parameter of the model. Their names run from "
                f"{first} to {last}; * stands for any characters."
            )
    layout.freeze(patterns)
    if not layout.trained():
        raise ConfigError(f"{KEY}={list(patterns)} freezes all parameters. Leave out a pattern.")
