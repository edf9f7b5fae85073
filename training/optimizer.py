"""AdamW with decay for matrices only."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW

from config.schema import OptimConfig


def adamw(model: nn.Module, optim: OptimConfig, device: torch.device) -> AdamW:
    """AdamW (Loshchilov & Hutter, 2019) over all parameters, in two groups.

    Matrices and embeddings decay; biases and norms, which are vectors, do not. One fused kernel
    where torch has it for the device.
    """
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    first, second = optim.betas
    fused = device.type in ("cpu", "cuda", "xpu", "mps")
    return AdamW(groups, lr=optim.learning_rate, betas=(first, second), fused=fused)
