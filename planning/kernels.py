"""Replacements for a trace on fake CPU tensors: GPU kernels, and code that reads tensor values."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

import model.documents
import model.head
import model.recompute


@contextlib.contextmanager
def without_moving() -> Iterator[None]:
    """Have peft leave adapters on their device: the parameters of a fake module cannot be moved."""
    original = nn.Module.to
    nn.Module.to = lambda module, *_, **__: module  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.to = original  # type: ignore[method-assign]


@contextlib.contextmanager
def offloading(note: Callable[[Tensor], None]) -> Iterator[None]:
    """Have offloaded activations copied, as from a GPU; `note` gets each copy."""
    original = model.recompute.save_on_cpu

    def copies(**_: Any) -> saved_tensors_hooks:
        def pack(tensor: Tensor) -> Tensor:
            note(copy := torch.empty_like(tensor))
            return copy

        return saved_tensors_hooks(pack, torch.empty_like)

    model.recompute.save_on_cpu = copies  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        model.recompute.save_on_cpu = original  # type: ignore[misc]


@contextlib.contextmanager
def few_chunks() -> Iterator[None]:
    """Have the loss compute its first two chunks and the last: the others are like the second."""
    original = model.head.chunks

    def chunks(positions: int, rows: int) -> Iterator[slice]:
        every = [*original(positions, rows)]
        yield from [*every[:2], *every[2:][-1:]]

    model.head.chunks = chunks
    try:
        yield
    finally:
        model.head.chunks = original


@contextlib.contextmanager
def cuda_kernels() -> Iterator[None]:
    """Replace operations for which CUDA saves other tensors for the backward pass than a CPU.

    Dropout is one kernel with a mask of one byte a number. Attention is fused even with dropout,
    whose mask is generated again. The float32 logarithms of fp16's logits need no copy of these.
    Functions are replaced, because a dispatch mode is not active in recomputation.
    """
    attention: Any = F.scaled_dot_product_attention

    def fused_attention(*args: Tensor, dropout_p: float = 0.0, **options: Any) -> Tensor:
        mixed: Tensor = attention(*args, **options)
        return mixed

    def fused_dropout(
        x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Tensor:
        dropped: Tensor = torch.native_dropout(x, p, training)[0] if training and p > 0 else x
        return dropped

    log_softmax: Any = F.log_softmax

    def fused_log_softmax(*args: Any, **options: Any) -> Tensor:
        if args[0].dtype == torch.float16 and options.get("dtype") == torch.float32:
            return torch._log_softmax(args[0], options["dim"], True)
        logarithms: Tensor = log_softmax(*args, **options)
        return logarithms

    replacements: dict[tuple[Any, str], Any] = {
        (F, "scaled_dot_product_attention"): fused_attention,
        (F, "dropout"): fused_dropout,
        (F, "log_softmax"): fused_log_softmax,
        # How many documents there are is a value; a few bytes for each do not matter.
        (model.documents, "_bounds"): lambda begins: begins.new_zeros(2, dtype=torch.int32),
    }
    originals = {(module, name): getattr(module, name) for module, name in replacements}
    try:
        for (module, name), function in replacements.items():
            setattr(module, name, function)
        yield
    finally:
        for (module, name), function in originals.items():
            setattr(module, name, function)
