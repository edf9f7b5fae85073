"""What a step keeps of each block for its backward pass; the rest of the block is computed again.

Every way computes the same bits: what is computed again gets the generator's state of its first
time, so dropout has the same masks.

Letters in shapes: B batch, T time (positions), C channels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch.utils.checkpoint import (
    CheckpointPolicy,
    SelectiveCheckpointContext,
    checkpoint,
    create_selective_checkpoint_contexts,
)

SELECTIVE = "selective"
WAYS: tuple[bool | str, ...] = (False, True, SELECTIVE)
"""The values of `model.activation_checkpointing`."""
Recompute = Callable[..., Any]
"""Computes block(x, *context) and keeps less of it. x (B, T, C) is the block's input."""

PRODUCTS = ("aten::mm", "aten::addmm", "aten::_scaled_mm", "aten::_grouped_mm")
ATTENTION = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)
"""Operations that take nearly all of a block's time. A CPU's attention by products is not among
them: its scores would need T times T numbers for each head."""


def recompute_of(way: bool | str, dropout: float) -> Recompute | None:
    """How a block calls its own computation in training; None for a plain call.

    The compiler of a single block has to see which of its results are kept.
    """
    if way != SELECTIVE:
        return _whole if way is True else None
    # Attention with dropout advances the generator. If it were not computed again, dropout after
    # it would get other masks.
    kept = PRODUCTS if dropout else (*PRODUCTS, *ATTENTION)
    return partial(_selective, kept)


def _whole(block: Recompute, x: Any, *context: Any) -> Any:
    """Keep the block's input."""
    return checkpoint(block, x, *context, use_reentrant=False)


def _selective(kept: tuple[str, ...], block: Recompute, x: Any, *context: Any) -> Any:
    """Keep the results of these operations as well: nothing expensive is computed again."""

    def policy(_: SelectiveCheckpointContext, operation: Any, *__: Any, **___: Any) -> Any:
        is_kept = getattr(operation, "_schema", None) is not None and operation._schema.name in kept
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(block, x, *context, use_reentrant=False, context_fn=contexts)
