"""Every random draw is a pure function of the seed and the place: nothing has to be saved."""

from __future__ import annotations

import numpy as np
import torch


def reseed(seed: int, step: int, process: int) -> None:
    """Set the global generators of every device to those of (seed, step, process).

    Called at the start of each step, so that its dropout is the same whether or not the run was
    interrupted before. Step 0 of process 0 is for the initial weights.
    """
    words = np.random.SeedSequence((seed, step, process)).generate_state(2, np.uint32)
    torch.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)


def compute_reproducibly() -> None:
    """Choose kernels whose results do not vary from run to run.

    On a CPU all that a GPT uses are so. On CUDA the backward of flash attention is not by default;
    torch then warns of what has no reproducible kernel instead of failing.
    """
    if torch.cuda.is_available():
        torch.use_deterministic_algorithms(True, warn_only=True)
        # A debugging aid that costs time. (mypy does not know this module.)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
