"""The load-balancing loss of a mixture of transformers: how evenly its routers choose experts.

transformers adds it to the loss of a model whose config.json has `output_router_logits`. There it
is a product of two means over a micro-batch (Fedus et al., 2021, equations 4 to 6), so it depends
on how the global batch is divided. Here its function gets each row alone, as in DeepSeek-V3, and
rows weigh as much as their targets: any number of processes has the same loss.

Letters in shapes: B rows, T positions, L layers, E experts.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from model.head import IGNORED, Head, target_count
from model.layout import ModelError

ENTRY = "output_router_logits"
"""The entry of config.json that adds it to the training loss."""


def adds_balance(lm: Any) -> bool:
    """Whether transformers adds this loss to that of the targets."""
    return bool(getattr(lm.config, ENTRY, False)) and _function_of(lm) is not None


def refuse_unknown_loss(lm: Any) -> None:
    """Raise ModelError for a model with this loss that is not among the measured families."""
    if not isinstance(lm.get_output_embeddings(), Head):
        raise ModelError(
            f"the load-balancing loss of {lm.config.model_type}, for which its config.json has "
            f"{ENTRY}: true, is not supported. Set the entry to false to train without this loss"
        )


def balancing_loss(lm: Any, logits: Sequence[Tensor], targets: Tensor) -> Tensor:
    """The mean over rows of what transformers computes of one, weighted by their targets (B, T).

    `logits` are those of the routers, (B * T, E) each. Positions count up to the last one with a
    target, so padding does not.
    """
    by_row = torch.stack([*logits]).unflatten(1, (len(targets), -1))  # (L, B, T, E)
    counts = targets != IGNORED
    within = counts.flip(1).cummax(1).values.flip(1)
    within[:, 0] = True  # a row without targets has no weight, and its loss must be finite
    function = _function_of(lm)
    losses = [
        function(tuple(by_row[:, row]), lm.num_experts, lm.num_experts_per_tok, within[row])
        for row in range(len(targets))
    ]
    return (torch.stack(losses) * counts.sum(1)).sum() / target_count(targets)


def _function_of(lm: Any) -> Any:
    return getattr(sys.modules[type(lm).__module__], "load_balancing_loss_func", None)
