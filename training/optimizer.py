"""The optimizer of a run, and which parameters it leaves frozen."""

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

    `precision` is the name that accelerate gives it. Muon orthogonalizes in bf16 if that is bf16,
    otherwise in float32, because rounding would change the losses with the number of processes.
    The first update raises ConfigError for a parameter that has no gradient.
    """
    layout = layout_of(model)
    parts = layout.parts()
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    optimizer = OPTIMIZERS[optim.name](parts, optim, device, dtype)
    name_of = {parameter: name for name, parameter in layout.trained().items()}
    names = [[name_of[entry] for entry in group["params"]] for group in optimizer.param_groups]

    checked = False

    def check_first_update(*_: object) -> None:
        nonlocal checked
        if not checked:
            _refuse_without_gradient(optimizer, names)
            checked = True

    optimizer.register_step_pre_hook(check_first_update)
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
