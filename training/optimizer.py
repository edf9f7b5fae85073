"""The optimizer of a run, which its snapshots can hold; and what is not trained."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.optim import Optimizer

from config.schema import ConfigError, OptimConfig
from model.causal_lm import LanguageModel
from model.layout import is_frozen
from optim.optimizers import OPTIMIZERS
from snapshot.disk.architecture import layout_of

KEY = "optim.freeze"


def make_optimizer(
    model: LanguageModel, optim: OptimConfig, device: torch.device, precision: str
) -> Optimizer:
    """Build the `optim.name` optimizer (see `optim.optimizers`) over all trainable parameters.

    `precision` is that of the run, as accelerate names it: in bf16 Muon orthogonalizes in bf16,
    and in float32 otherwise, or rounding would make processes' losses differ from those of one.
    At the first update it raises ConfigError for a parameter that has no gradient.
    """
    layout = layout_of(model)
    parts = layout.parts()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    optimizer = OPTIMIZERS[optim.name](parts, optim, device, dtype)
    named = {one: name for name, one in layout.trained().items()}
    names = [[named[one] for one in group["params"]] for group in optimizer.param_groups]
    optimizer.register_step_pre_hook(lambda *_: _refuse_without_gradient(optimizer, names))
    return optimizer


def _refuse_without_gradient(optimizer: Optimizer, names: list[list[str]]) -> None:
    """Raise ConfigError for a parameter that the loss does not depend on.

    An optimizer keeps nothing of it, so no snapshot would be whole. FSDP replaces the parameters:
    they are recognised by their places in the groups.
    """
    for group, of_group in zip(optimizer.param_groups, names, strict=True):
        for parameter, name in zip(group["params"], of_group, strict=True):
            if parameter.grad is None:
                raise ConfigError(
                    f"{name} has no gradient: the loss does not depend on it. Use it in the "
                    f"forward pass, or freeze it: {KEY}=['{name}']."
                )


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
        raise ConfigError(f"{KEY}={list(patterns)} freezes all parameters. Leave out a pattern.")
