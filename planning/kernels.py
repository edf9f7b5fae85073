"""Replacements for a trace on fake CPU tensors: GPU kernels, and code that reads tensor values."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import model.attention
import model.head


def without_moving() -> AbstractContextManager[Any]:
    """Have peft leave adapters on their device: the parameters of a fake module cannot be moved."""
    return patch.object(nn.Module, "to", lambda module, *_, **__: module)


@contextmanager
def transformers_without_values(packed: bool) -> Iterator[None]:
    """Have models of transformers compute with tensors that have no values.

    `packed`: whether rows have several documents, which transformers sees in their positions. The
    fake of torch's grouped_mm has bf16 alone; transformers' own saves the same tensors.
    """
    from transformers import masking_utils
    from transformers.integrations import moe

    def documents(position_ids: Tensor) -> Tensor | None:
        return position_ids if packed else None

    with (
        patch.object(masking_utils, "find_packed_sequence_indices", documents),
        patch.object(moe, "_can_use_grouped_mm", lambda *_: False),
    ):
        yield


def few_chunks() -> AbstractContextManager[Any]:
    """Have the loss compute its first two chunks and the last: the others are like the second."""
    original = model.head.chunks

    def chunks(positions: int, rows: int) -> Iterator[slice]:
        every = [*original(positions, rows)]
        yield from [*every[:2], *every[2:][-1:]]

    return patch.object(model.head, "chunks", chunks)


@contextmanager
def cuda_kernels() -> Iterator[None]:
    """Replace operations for which CUDA saves other tensors for the backward pass than a CPU.

    Dropout is one kernel with a mask of one byte a number. Attention is fused even with dropout,
    whose mask is generated again. Functions are replaced, because a dispatch mode is not active in
    recomputation.
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

    fused: dict[str, Any] = {
        "dropout": fused_dropout,
        "scaled_dot_product_attention": fused_attention,
    }
    with patch.multiple(F, **fused), patch.object(model.attention, "LONGEST_PRODUCTS", 0):
        yield
