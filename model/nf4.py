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
from collections.abc import Iterator
from importlib.util import find_spec

import torch
from torch import Tensor, nn

from model.lora import hidden
from model.products import cast_product

LEVELS, BLOCK = "nf4", 64
SCALE_BYTES = 4
PACKED_BYTES = BLOCK // 2 + SCALE_BYTES
"""Of a block."""
STORAGE = torch.bfloat16
"""The dtype of a packed weight, whose bits are no numbers. FSDP gathers bf16 without a cast, in
float32 runs and in bf16."""
AT_ONCE = 1 << 22
"""Numbers that are quantized at once, which takes several times their memory."""


class Nf4Linear(nn.Linear):
    """`nn.Linear` whose weight is packed, (M, N / 64 * 18) numbers of `STORAGE`."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., N) to outputs (..., M)."""
        return cast_product(x, self.weight, self.bias, dequantize)

    @property
    def full_shape(self) -> tuple[int, int]:
        """(M, N)."""
        return self.out_features, self.in_features


def full_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters; a packed weight as one of its full shape that has no memory."""
    shapes = {one.weight: one.full_shape for one in model.modules() if isinstance(one, Nf4Linear)}
    for name, parameter in model.named_parameters():
        if (shape := shapes.get(parameter)) is not None:
            parameter = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        yield name, parameter


def quantizable(model: nn.Module) -> Iterator[nn.Linear]:
    """The layers that are torch's own, not trained, and have rows of whole blocks."""
    for layer in model.modules():
        if type(layer) is not nn.Linear or layer.weight.requires_grad:
            continue
        if layer.in_features % BLOCK == 0:
            yield layer


def quantize_layer(layer: nn.Linear, filled: bool) -> None:
    """Make the layer an `Nf4Linear`, without values unless it is `filled` with some."""
    weight = layer.weight.detach()
    shape = (len(weight), packed_width(weight.size(1)))
    values = torch.empty(shape, dtype=STORAGE, device=weight.device)
    if filled:
        values.copy_(quantize(weight))
    layer.weight = nn.Parameter(values, requires_grad=False)
    layer.__class__ = Nf4Linear


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


def is_installed() -> bool:
    return find_spec("bitsandbytes") is not None


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
