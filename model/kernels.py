"""The kernels of attention on CUDA devices, by the names of `run.attention`.

Only that key chooses one, for our models and those of transformers: a config.json never does.
"""

from __future__ import annotations

import torch

KERNEL, VARLEN = "kernel", "varlen"
"""torch's own choice, and its variable-length kernel, which takes documents in a row unmasked."""
SIXTEEN_BITS = ("bf16", "fp16")
"""Precisions, by accelerate's names."""
LARGEST_HEAD, HEAD_MULTIPLE = 256, 8
"""Channels of a head that the variable-length kernel takes: at most, and in multiples of what."""
OLDEST_MAJOR = 8
"""The major number of the compute capability from which on a GPU has it."""


def why_no_varlen(
    precision: str,
    dropout: float,
    head_size: int | None = None,
    device: torch.device | None = None,
) -> str | None:
    """Why a run, its device or heads of so many channels cannot use varlen: a sentence's end."""
    can = precision in SIXTEEN_BITS and not dropout
    if head_size is not None:
        can = can and head_size % HEAD_MULTIPLE == 0 and 0 < head_size <= LARGEST_HEAD
    if device is not None:
        can = can and torch.cuda.get_device_capability(device)[0] >= OLDEST_MAJOR
    if can:
        return None
    return (
        f"needs mixed_precision: bf16 or fp16, model.dropout=0, heads of {HEAD_MULTIPLE} to "
        f"{LARGEST_HEAD} channels in multiples of {HEAD_MULTIPLE}, and a GPU of compute capability "
        f"{OLDEST_MAJOR}.0; the run has mixed_precision: {precision}, model.dropout={dropout} and "
        f"heads of {head_size or 'any number of'} channels. Use run.attention={KERNEL}"
    )
