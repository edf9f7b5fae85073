"""Makes a resumed run equal, bit by bit, to one that was not interrupted, without saved generators.

Random draws are pure functions of seed and step; kernels and sums keep one order.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from training.distributed.environment import on_cpu
from training.distributed.strategy import grads_in_buckets


def reseed(seed: int, step: int, process: int) -> None:
    """Seed the global generators of every device from (seed, step, process).

    The loop calls this at the start of each step, so that dropout does not depend on restarts.
    Step 0 of process 0 is for the initial weights.
    """
    words = np.random.SeedSequence((seed, step, process)).generate_state(2, np.uint32)
    one = int(words[0]) << 31 | int(words[1]) >> 1
    if torch.accelerator.is_available():
        torch.manual_seed(one)
    else:  # the same, without the stack traces that torch records for absent devices
        torch.default_generator.manual_seed(one)


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
