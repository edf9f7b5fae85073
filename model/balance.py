"""The load-balancing loss of a mixture of transformers: how evenly its routers choose experts.

transformers adds it to the loss of a model whose config.json has `output_router_logits`. There it
is a product of two means over a micro-batch (Fedus et al., 2021, equations 4 to 6), so it depends
on how the global batch is divided. Here it is computed of each row, as DeepSeek-V3 does, and rows
weigh as much as their targets: any number of processes has the same. It is transformers' own of a
batch of one row.

Letters in shapes: B rows, T positions, P positions of a process, E experts.
"""

from __future__ import annotations

import sys
from inspect import getsource
from typing import Any

import torch
from torch import Tensor, nn

from model.context import Context
from model.head import IGNORED, target_count
from model.layout import ModelError

NAME = "load_balancing_loss"
"""What metrics.jsonl calls it."""
ENTRY = "output_router_logits"
"""The entry of config.json that adds it to the training loss."""
FUNCTION = "load_balancing_loss_func"
"""transformers' function, of which each architecture has a copy."""
COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
"""What the architectures call the factor of this loss."""


class Balance:
    """Adds up what the routers of a model choose in a forward pass.

    Sums over positions are made where a router is called, so activation checkpointing keeps
    nothing else.
    """

    def __init__(self, coefficient: float, choices: int) -> None:
        """A token has so many `choices` of experts. The loss is multiplied by the coefficient."""
        self.coefficient, self._choices = coefficient, choices
        self._counted: Tensor | None = None
        """1 for each position that counts, 0 for padding, (B, P); None if nothing is measured."""
        self._sums: Tensor | None = None
        self._calls = 0
        self._is_forward = False

    def watch(self, router: nn.Module, index: int) -> None:
        """Count a router's logits (B * P, E), which are at `index` if it returns a tuple."""

        def add(_: nn.Module, __: Any, output: Any) -> None:
            if self._counted is None:
                return
            logits = output[index] if isinstance(output, tuple) else output
            sums = self._summed(logits, self._counted)
            if self._is_forward:  # and not computed again for a backward pass
                self._sums = sums if self._sums is None else self._sums + sums
                self._calls += 1

        router.register_forward_hook(add)

    def begin(self, targets: Tensor | None, context: Context | None) -> None:
        """Begin a forward pass with these targets (B, T) of whole rows; None measures nothing.

        Positions count up to the last one with a target, so padding does not.
        """
        self._targets, self._context, self._counted = targets, context, None
        self._sums, self._calls, self._is_forward = None, 0, True
        if targets is not None:
            counted = (targets != IGNORED).flip(1).cummax(1).values.flip(1)
            self._counted = (counted if context is None else context.own(counted)).float()

    def end(self) -> Tensor:
        """End the forward pass: the loss, whose mean over rows weighs them by their targets.

        If processes share sequences, each of them must call this.
        """
        targets, sums = self._targets, self._sums
        assert targets is not None
        assert sums is not None, "the model has called its routers"
        self._sums, self._is_forward = None, False
        if self._context is not None:
            sums = self._context.sum(sums)
        counts = targets != IGNORED
        places = torch.arange(1, targets.size(1) + 1, device=targets.device)
        positions = (counts * places).amax(1).clamp(min=1) * self._calls
        chosen, probabilities = sums / positions[:, None]  # (B, E) each
        by_row = sums.size(2) * (chosen * probabilities).sum(1)
        return (by_row * counts.sum(1)).sum() / target_count(targets)

    def _summed(self, logits: Tensor, counted: Tensor) -> Tensor:
        """How often each expert is chosen, and the sum of its probabilities: (2, B, E)."""
        probabilities = logits.softmax(-1, dtype=torch.float32).view(*counted.shape, -1)
        best = probabilities.detach().topk(self._choices, dim=-1).indices
        chosen = torch.zeros_like(probabilities).scatter(-1, best, 1.0)
        weights = counted[..., None]
        return torch.stack(((chosen * weights).sum(1), (probabilities * weights).sum(1)))


def balance_of(lm: Any) -> Balance | None:
    """What measures the routers of a model of transformers; None if its loss has no such part.

    None also if it has one that is unknown here, which `refuse_unknown_loss` then refuses.
    """
    if (function := _asked_for(lm)) is None:
        return None
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    routers = _routers(lm)
    coefficient = next((getattr(lm, one) for one in COEFFICIENTS if hasattr(lm, one)), None)
    choices = getattr(lm, "num_experts_per_tok", None)
    is_known = getsource(function) == getsource(load_balancing_loss_func)
    if not is_known or not routers or coefficient is None or choices is None:
        return None
    setattr(lm.config, ENTRY, False)  # transformers would compute its own as well
    balance = Balance(float(coefficient), choices)
    for router, index in routers:
        balance.watch(router, index)
    return balance


def refuse_unknown_loss(lm: Any) -> None:
    """Raise ModelError for a model with a loss that `balance_of` does not know."""
    if _asked_for(lm) is not None:
        raise ModelError(
            f"the load-balancing loss of {lm.config.model_type}, for which its config.json has "
            f"{ENTRY}: true, is not supported. Set the entry to false to train without this loss"
        )


def _asked_for(lm: Any) -> Any:
    """The function by which transformers computes the loss; None if it adds none."""
    asked = getattr(lm.config, ENTRY, False)
    return getattr(sys.modules[type(lm).__module__], FUNCTION, None) if asked else None


def _routers(lm: Any) -> list[tuple[nn.Module, int]]:
    """The modules whose output transformers records as router logits, and its place there."""
    recorder: Any = (lm._can_record_outputs or {}).get("router_logits")
    if (target := getattr(recorder, "target_class", None)) is None:
        return []
    part = f".{recorder.layer_name}." if recorder.layer_name else "."
    return [
        (module, recorder.index)
        for name, module in lm.named_modules()
        if isinstance(module, target) and part in f".{name}."
    ]
