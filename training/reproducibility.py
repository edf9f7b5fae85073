"""What makes a resumed run equal to one that was not interrupted, bit by bit, without saving it.

Random draws are pure functions of the seed and the place; kernels and sums keep one order.
"""

from __future__ import annotations

import numpy as np
import torch
from accelerate import Accelerator
from torch import nn
from torch.optim import Optimizer

from training.distributed.environment import on_cpu
from training.distributed.launch import grads_in_buckets


def reseed(seed: int, step: int, process: int) -> None:
    """Set the global generators of every device to those of (seed, step, process).

    Called at the start of each step, so that its dropout is the same whether or not the run was
    interrupted before. Step 0 of process 0 is for the initial weights.
    """
    words = np.random.SeedSequence((seed, step, process)).generate_state(2, np.uint32)
    one = int(words[0]) << 31 | int(words[1]) >> 1
    if torch.accelerator.is_available():
        torch.manual_seed(one)
    else:  # the same, without the stack traces that torch keeps for devices which are not there
        torch.default_generator.manual_seed(one)


def compute_reproducibly() -> None:
    """Choose kernels whose results do not vary from run to run.

    On a CPU all that a GPT uses are so. On CUDA the backward pass of attention is not: by default
    it adds up in any order, and with `warn_only=True` it still does and only warns of it. cuBLAS
    needs no CUBLAS_WORKSPACE_CONFIG: torch gives it a workspace of its own for each stream.
    """
    if torch.cuda.is_available() and not on_cpu():
        torch.use_deterministic_algorithms(True)
        # A debugging aid that costs time. (mypy does not know this module.)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def build_gradient_buckets(
    accelerator: Accelerator, model: nn.Module, optimizer: Optimizer, shape: tuple[int, int]
) -> None:
    """Let DDP find its order of gradients before the first step. Every process must call this.

    `shape` is a micro-batch's, (B, T): one that is compiled is compiled for no other.

    DDP rebuilds its buckets after the first backward pass of a process. From three processes on,
    the place of a gradient in its bucket decides the order in which it is summed, so the first
    step after a restart would differ in its last bits from the same step of a run that went on.
    """
    if not grads_in_buckets(model):
        return
    zeros = torch.zeros(shape, dtype=torch.int64, device=accelerator.device)
    accelerator.backward(model(zeros, zeros))
    optimizer.zero_grad(set_to_none=False)
