"""Frozen weights in four bits for adapters (QLoRA; Dettmers et al., 2023): NF4 by bitsandbytes.

A number is one of 16 levels, times the largest magnitude of its block of 64. A block lies within a
row, so a row is quantized alone: the weights are the same however they are sharded, and FSDP shards
them by rows like any other. The scales stay float32, because one scale for all of them would depend
on the whole matrix. Quantization is computed on the CPU: it is a function of the base's bytes.

Letters in shapes: N inputs, M outputs of a layer.
"""

from __future__ import annotations

import logging
import sys

import torch
from torch import Tensor

from model.lora import hidden

LEVELS, BLOCK = "nf4", 64
SCALE_BYTES = 4
PACKED_BYTES = BLOCK // 2 + SCALE_BYTES
"""Of a block."""
STORAGE = torch.bfloat16
"""The dtype of a packed weight, whose bits are no numbers. FSDP gathers bf16 without a cast, in
float32 runs and in bf16."""
AT_ONCE = 1 << 22
"""Numbers that are quantized at once, which takes several times their memory."""


def packed_width(inputs: int) -> int:
    """Columns of a packed weight of so many inputs."""
    return inputs // BLOCK * PACKED_BYTES // STORAGE.itemsize


def quantize(rows: Tensor) -> Tensor:
    """Rows of a weight (M, N), packed, on the CPU. Each holds its levels, then its scales."""
    load_kernels()
    inputs = rows.size(1)
    packed = torch.empty(len(rows), packed_width(inputs), dtype=STORAGE)
    for part, of_part in zip(
        rows.split(max(1, AT_ONCE // inputs)), packed.split(max(1, AT_ONCE // inputs)), strict=True
    ):
        found = part.cpu().float().contiguous()
        levels, scales = torch.ops.bitsandbytes.quantize_4bit(found, BLOCK, LEVELS, torch.uint8)
        content = of_part.view(torch.uint8)
        content[:, : inputs // 2] = levels.view(len(part), -1)
        content[:, inputs // 2 :] = scales.view(len(part), -1).view(torch.uint8)
    return packed


def dequantize(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """The weight (M, N) of packed rows, in `dtype`, on their device."""
    content = packed.view(torch.uint8)
    inputs = content.size(1) // PACKED_BYTES * BLOCK
    levels = content[:, : inputs // 2].contiguous()
    scales = content[:, inputs // 2 :].contiguous().view(torch.float32)
    weight: Tensor = torch.ops.bitsandbytes.dequantize_4bit(
        levels, scales.flatten(), BLOCK, LEVELS, (len(packed), inputs), dtype
    )
    return weight


def load_kernels() -> None:
    """Import bitsandbytes, which registers its kernels with torch.

    On a CPU with bf16 instructions, version 0.50 downloads another kernel from the Hub while it is
    imported, if the package `kernels` is installed. What is downloaded must not be executed.
    """
    if "bitsandbytes" in sys.modules:
        return
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")  # it warns that it did not
    level = logger.level
    logger.setLevel(logging.ERROR)
    with hidden("kernels"):
        import bitsandbytes  # noqa: F401
    logger.setLevel(level)
