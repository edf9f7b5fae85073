"""Muon: orthogonalized updates for the matrices of the blocks, AdamW for all other parameters.

Letters in shapes: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from model.sharded import gather_full, is_sharded, local_part, local_slices
from optim.eager import EagerOptimizer

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that moves all singular values to about 1 (Jordan et al., 2024).
"""
ITERATIONS = 4
"""Five, as usual, are no better: benchmarks/RESULTS.md, "Schedules and Muon"."""
ADAMW_RMS = 0.2
"""The usual root mean square of AdamW's updates, to which Muon's are scaled (Liu et al., 2025)."""
STACKED = 1 << 22
"""Numbers of small matrices that are orthogonalized at once: one by one is slower."""
MOMENTUM_BUFFER = "momentum_buffer"
"""The name of what is kept of a matrix, as torch has it."""
PARTS = "parts"
"""The entry of a Muon group: how many matrices each of its parameters joins by rows."""


class Muon(EagerOptimizer):
    """Muon for the groups that have `parts`, AdamW for the others, with one learning rate for both.

    The updates of Muon are those of torch.optim.Muon with Nesterov's momentum, `ITERATIONS` and
    `adjust_lr_fn="match_rms_adamw"`, for each of the joined matrices by itself. The iteration that
    orthogonalizes computes in `dtype`. Its parameters may be sharded: then every process must call
    `step`, which gathers one update after another.
    """

    def __init__(self, adamw: AdamW, matrices: list[dict[str, Any]], dtype: torch.dtype) -> None:
        self._adamw, self._dtype = adamw, dtype
        super().__init__([*adamw.param_groups, *matrices], {"lr": adamw.defaults["lr"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. A closure is not supported."""
        assert closure is None
        # accelerate replaces groups and state when it prepares the optimizer.
        self._adamw.param_groups = [group for group in self.param_groups if PARTS not in group]
        self._adamw.state = self.state
        self._adamw.step()
        for group in self.param_groups:
            by_shape = defaultdict(list)
            for parameter in group["params"] if PARTS in group else ():
                if parameter.grad is not None:
                    by_shape[parameter.shape].append(parameter)
            for shape, parameters in by_shape.items():
                at_once = max(1, STACKED // shape.numel())
                for begin in range(0, len(parameters), at_once):
                    self._update(parameters[begin : begin + at_once], group)

    def _update(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        """Update parameters of one shape, which are sharded alike."""
        sharded, mixed = is_sharded(parameters[0]), []
        for parameter in parameters:
            gradient, state = parameter.grad, self.state[parameter]
            assert gradient is not None
            if MOMENTUM_BUFFER not in state:
                state[MOMENTUM_BUFFER] = torch.zeros_like(parameter)
            momentum = state[MOMENTUM_BUFFER]
            momentum.lerp_(gradient, 1 - MOMENTUM)
            update = gradient.lerp(momentum, MOMENTUM)
            mixed.append(gather_full(update) if sharded else update)
        updates = torch.stack(mixed)  # the full ones, (N, R, C), before they are orthogonalized
        rows, columns = updates.size(1) // group[PARTS], updates.size(2)
        matrices = updates.view(-1, rows, columns).to(self._dtype)
        directions = orthogonalized(matrices).reshape(updates.shape)
        rate = group["lr"] * ADAMW_RMS * math.sqrt(max(rows, columns))
        for parameter, direction in zip(parameters, directions, strict=True):
            weight: Tensor = parameter
            if sharded:
                weight, direction = local_part(parameter), direction[local_slices(parameter)]
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            weight.add_(direction, alpha=-rate)


def orthogonalized(matrices: Tensor) -> Tensor:
    """About U V^T for each matrix U S V^T of (N, R, C); most singular values are 0.7 to 1.2.

    `ITERATIONS` steps of a Newton-Schulz iteration, in the precision of the input.
    """
    a, b, c = COEFFICIENTS
    is_tall = matrices.size(1) > matrices.size(2)
    x = matrices.mT if is_tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        gram = x @ x.mT  # (N, R, R), or (N, C, C) of tall matrices
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
