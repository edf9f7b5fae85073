"""Layers whose weights are not trained, and kept in fewer bits than float32.

`keep_frozen` gives layers of a model another class; names stay. A product casts the weight to the
dtype in which it computes, from 16 bits or from four, and its backward pass casts the weight again.
So the cast copy of a weight exists only within a product.

Four bits are NF4 by bitsandbytes (QLoRA; Dettmers et al., 2023): a number is one of 16 levels,
times the largest magnitude of its block of 64. A block lies within a row, so a row is quantized
alone: the weights are the same however they are sharded, and FSDP shards them by rows like any
other. The scales stay float32, because one scale for all of them would depend on the whole matrix.

Letters in shapes: N inputs, M outputs of a layer.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from model.lora import INSTALL, hidden

AUTO = "auto"
"""16 bits if the base is stored in 16 bits, so that no number is lost; otherwise float32."""
FLOAT32 = "float32"
DTYPES = {FLOAT32: torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""By `model.frozen_dtype`."""
NF4 = "nf4"
"""Linear layers of the blocks in four bits, and the rest as with AUTO."""
KINDS = (AUTO, *DTYPES, NF4)
BLOCK = 64
"""Numbers that share a scale in four bits."""
PACKED_BYTES = BLOCK // 2 + torch.float32.itemsize
"""Bytes of a block: its levels, and its scale."""
STORAGE = torch.bfloat16
"""The dtype of a packed weight, whose bits are not numbers. FSDP gathers bf16 without a cast, in
float32 runs and in bf16."""

AT_ONCE = 1 << 22
"""Numbers that are quantized at once, which takes several times their memory."""


Cast = Callable[[Tensor, torch.dtype], Tensor]
"""Makes a weight (M, N) of a dtype from a weight as it is kept."""


class FrozenError(ValueError):
    """Frozen weights that a model cannot have: a sentence with the key, the value, the remedy."""


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype of products with x: that of autocast, where it is enabled, or x's own."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, cast: Cast = Tensor.to
) -> Tensor:
    """`F.linear` of x (..., N) with what `cast` makes of a frozen weight (M, N), to (..., M)."""
    dtype = compute_dtype(x)
    if cast is Tensor.to and weight.dtype == dtype:
        return F.linear(x, weight, bias)
    bias = None if bias is None else bias.to(dtype)
    output: Tensor = _CastProduct.apply(x.to(dtype), weight, bias, cast)
    return output


class _CastProduct(torch.autograd.Function):
    """Keeps the weight as it is for the backward pass. autograd would keep the cast copy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cast: Cast) -> Tensor:
        ctx.save_for_backward(weight)
        ctx.cast = cast
        return F.linear(x, cast(weight, x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        (weight,), (wants_x, _, wants_bias, _) = ctx.saved_tensors, ctx.needs_input_grad
        of_x = grad @ ctx.cast(weight, grad.dtype) if wants_x else None
        return of_x, None, grad.flatten(0, -2).sum(0) if wants_bias else None, None


class FrozenLinear(nn.Linear):
    """`nn.Linear` whose weight has another dtype than its input, or is packed in four bits."""

    is_packed = False
    """Whether the weight is (M, N / 64 * 18) numbers of `STORAGE`."""

    def forward(self, x: Tensor) -> Tensor:
        """Inputs (..., N) to outputs (..., M)."""
        return product(x, self.weight, self.bias, dequantize if self.is_packed else Tensor.to)


def keep_frozen(model: Any, kind: str, stored_as: str = FLOAT32, filled: bool = True) -> None:
    """Keep the matrices of a `LanguageModel` that are not trained as one of `KINDS` says.

    Vectors, such as biases and the weights of norms, stay float32, as do matrices of modules that
    cannot multiply them otherwise. AUTO is the dtype in which the base is stored. Call this before
    the model is compiled or wrapped. Where the weights are not `filled` with values yet, none are
    read, because that would take memory. Raises FrozenError where NF4 is not possible.
    """
    if kind == NF4:
        quantize_blocks(model, filled)
    cast_frozen(model, DTYPES.get(kind, DTYPES[stored_as]), filled)


def casts_weights(module: nn.Module) -> bool:
    """Whether the module takes frozen weights of any dtype.

    A subclass of torch's layers keeps float32 unless it has `casts_weights`: whoever wrote it may
    use its weights otherwise. Models cast what an embedding returns to float32.
    """
    return type(module) in (nn.Linear, nn.Embedding) or getattr(module, "casts_weights", False)


def cast_frozen(model: nn.Module, dtype: torch.dtype, filled: bool) -> None:
    """Keep frozen matrices in a dtype, as far as their modules can multiply it."""
    owners: dict[nn.Parameter, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            owners.setdefault(parameter, []).append((module, name))
    for parameter, places in owners.items():
        if parameter.requires_grad or parameter.dim() < 2 or parameter.dtype == dtype:
            continue
        if not all(casts_weights(module) for module, _ in places):
            continue
        values = parameter.detach()
        values = values.to(dtype) if filled else torch.empty_like(values, dtype=dtype)
        kept = nn.Parameter(values, requires_grad=False)
        for module, name in places:  # tied layers share it
            setattr(module, name, kept)
            if type(module) is nn.Linear:
                module.__class__ = FrozenLinear


def quantize_blocks(model: Any, filled: bool) -> None:
    """Quantize frozen linear layers of a model's blocks: torch's own, with rows of whole blocks.

    Raises FrozenError if there are none.
    """
    refuse_without_kernels()
    layers = [
        one
        for one in model.blocks.modules()
        if type(one) is nn.Linear and not one.weight.requires_grad and one.in_features % BLOCK == 0
    ]
    if not layers:
        raise FrozenError(
            f"model.frozen_dtype={NF4}: no frozen linear layer of the blocks has a multiple of "
            f"{BLOCK} inputs. Leave it out."
        )
    load_kernels()
    for layer in layers:
        weight = layer.weight.detach()
        shape = (len(weight), packed_width(weight.size(1)))
        values = torch.empty(shape, dtype=STORAGE, device=weight.device)
        if filled:
            values.copy_(quantize(weight))
        layer.weight = nn.Parameter(values, requires_grad=False)
        layer.__class__, layer.is_packed = FrozenLinear, True  # type: ignore[assignment]


def packed_layers(model: nn.Module) -> Iterator[tuple[str, FrozenLinear]]:
    """The layers whose weights are packed in four bits, by name."""
    for name, one in model.named_modules():
        if isinstance(one, FrozenLinear) and one.is_packed:
            yield name, one


def full_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Names and parameters; a packed weight as one of its full shape that has no memory."""
    layers = {layer.weight: layer for _, layer in packed_layers(model)}
    for name, parameter in model.named_parameters():
        if (layer := layers.get(parameter)) is not None:
            shape = (layer.out_features, layer.in_features)
            parameter = nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)
        yield name, parameter


def packed_width(inputs: int) -> int:
    """Columns of a packed weight of so many inputs."""
    return inputs // BLOCK * PACKED_BYTES // STORAGE.itemsize


def quantize(rows: Tensor) -> Tensor:
    """Rows of a weight (M, N), packed. Each holds its levels, then its scales.

    This is computed on the CPU, so that it is a function of the base's bytes.
    """
    load_kernels()
    inputs = rows.size(1)
    packed = torch.empty(len(rows), packed_width(inputs), dtype=STORAGE)
    at_once = max(1, AT_ONCE // inputs)
    for part, of_part in zip(rows.split(at_once), packed.split(at_once), strict=True):
        found = part.cpu().float().contiguous()
        levels, scales = torch.ops.bitsandbytes.quantize_4bit(found, BLOCK, NF4, torch.uint8)
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
        levels, scales.flatten(), BLOCK, NF4, (len(packed), inputs), dtype
    )
    return weight


def refuse_without_kernels() -> None:
    """Raise FrozenError where bitsandbytes is not installed."""
    if find_spec("bitsandbytes") is None:
        sentence = f"model.frozen_dtype={NF4} needs bitsandbytes, which is not installed. {INSTALL}"
        raise FrozenError(sentence)


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
