"""AdamW with decay for matrices only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW

from config.schema import ConfigError, OptimConfig
from model.causal_lm import LanguageModel
from snapshot.disk.architecture import layout_of
from snapshot.disk.frozen import KEY, is_frozen


def adamw(model: nn.Module, optim: OptimConfig, device: torch.device) -> AdamW:
    """AdamW (Loshchilov & Hutter, 2019) over all parameters but the frozen ones, in two groups.

    Matrices and embeddings decay; biases and norms, which are vectors, do not. One fused kernel
    where torch has it for the device.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    first, second = optim.betas
    fused = device.type in ("cpu", "cuda", "xpu", "mps")
    return AdamW(groups, lr=optim.learning_rate, betas=(first, second), fused=fused)


def freeze(model: LanguageModel, patterns: Sequence[str]) -> None:
    """Exclude the parameters that the patterns match from training.

    Raises ConfigError for a pattern that matches none, and if nothing would be left to train.
    """
    if not patterns:
        return
    layout = layout_of(model)
    parameters = layout.parameters()
    for pattern in patterns:
        if not any(is_frozen(name, [pattern]) for name in parameters):
            first, *_, last = parameters
            raise ConfigError(
                f"{KEY}: {pattern!r} matches no parameter of the model. Their names run from "
                f"{first} to {last}; * stands for any characters."
            )
    layout.freeze(patterns)
    if not layout.trained():
        raise ConfigError(
            f"{KEY}={list(patterns)} leaves nothing to train. Leave a part of it out."
        )
