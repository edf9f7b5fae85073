"""The optimizer: AdamW with decay for matrices only, or Muon; and what is not trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from config.schema import ConfigError, OptimConfig
from model.causal_lm import LanguageModel
from model.matrices import matrices_of
from snapshot.disk.architecture import layout_of
from snapshot.disk.frozen import KEY, is_frozen
from training.eager_optimizer import EagerAdamW
from training.muon import PARTS, Muon


def make_optimizer(
    model: LanguageModel, optim: OptimConfig, device: torch.device, precision: str
) -> Optimizer:
    """The optimizer that `optim.name` says, over all parameters but the frozen ones.

    `precision` is that of the run, as accelerate names it: in bf16 Muon orthogonalizes in bf16,
    and in float32 otherwise, or rounding would make processes' losses differ from those of one.
    """
    if optim.name == "adamw":
        return adamw(model, optim, device)
    parts_of = {one: parts for one, parts in matrices_of(model).items() if one.requires_grad}
    matrices = [
        {
            "params": [one for one, joined in parts_of.items() if joined == parts],
            "weight_decay": optim.weight_decay,
            PARTS: parts,
        }
        for parts in sorted(set(parts_of.values()))
    ]
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    return Muon(adamw(model, optim, device, frozenset(parts_of)), matrices, dtype)


def adamw(
    model: nn.Module,
    optim: OptimConfig,
    device: torch.device,
    others: frozenset[nn.Parameter] = frozenset(),
) -> AdamW:
    """AdamW (Loshchilov & Hutter, 2019) over all parameters but frozen ones and `others`.

    Matrices and embeddings decay; biases and norms, which are vectors, do not: two groups. One
    fused kernel where torch has it for the device.
    """
    parameters = [one for one in model.parameters() if one.requires_grad and one not in others]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    first, second = optim.betas
    fused = device.type in ("cpu", "cuda", "xpu", "mps")
    return EagerAdamW(groups, lr=optim.learning_rate, betas=(first, second), fused=fused)


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
