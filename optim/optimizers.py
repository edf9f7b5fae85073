"""The optimizers by name: how each is built, and what it keeps of a parameter.

A new one is a function here and its row in `OPTIMIZERS`, from which the configuration takes the
name, and snapshots and plans what is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from optim.eager import eager
from optim.muon import MOMENTUM_BUFFER, PARTS, Muon

Parts = Mapping[nn.Parameter, int]
"""The trained parameters. By parameter: how many matrices of a block it joins by rows; 0 for all
that is no such matrix, as embeddings, the output layer, biases and norms."""
STEP = "step"
"""torch's name for the number of updates, which it keeps on the CPU unless the update is fused."""


class Settings(Protocol):
    """The keys of `optim` that an optimizer is built from."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> Sequence[float]: ...


@dataclass(frozen=True)
class Kind:
    """An optimizer, and what it keeps of each parameter from its first update on.

    All is float32, and enough to continue with new groups: snapshots hold nothing else.
    """

    build: Callable[[Parts, Settings, torch.device, torch.dtype], Optimizer]
    """From what is trained, the keys, the device, and the dtype of the run's matrix products."""
    keeps: tuple[str, ...]
    """Names of what has one number for each weight."""
    counts: tuple[str, ...] = (STEP,)
    """Names of what is one number."""
    of_matrices: tuple[str, ...] | None = None
    """All that is kept of a matrix of a block, one number for each weight, if that differs."""

    def kept_of(self, parameter: nn.Parameter, joined: int) -> dict[str, tuple[int, ...]]:
        """The shapes, by name, of what is kept of a parameter that joins so many matrices."""
        shape = tuple(parameter.shape)
        if joined and self.of_matrices is not None:
            return dict.fromkeys(self.of_matrices, shape)
        return {**dict.fromkeys(self.keeps, shape), **dict.fromkeys(self.counts, ())}

    def wrong_in(self, state: Mapping[str, Any], parameter: nn.Parameter, joined: int) -> str:
        """What is kept of a parameter and is not as this row says; empty if all is."""
        expected = self.kept_of(parameter, joined)
        kept = {
            key: tuple(value.shape)
            if isinstance(value, Tensor) and value.dtype == torch.float32
            else "no float32 tensor"
            for key, value in state.items()
        }
        if kept == expected:
            return ""
        return f"keeps {kept}, and its row in OPTIMIZERS (optim/optimizers.py) says {expected}"

    @property
    def moments(self) -> int:
        """Numbers that are kept of each weight of a block's matrix."""
        return len(self.keeps if self.of_matrices is None else self.of_matrices)


def adamw(parts: Parts, settings: Settings, device: torch.device, _: torch.dtype) -> AdamW:
    """AdamW (Loshchilov & Hutter, 2019) in one fused kernel, where torch has it for the device."""
    first, second = settings.betas
    fused = device.type in ("cpu", "cuda", "xpu", "mps")
    groups = decayed_groups(parts, settings.weight_decay)
    # Bare AdamW would import torch's compiler, which takes a second at every start.
    return eager(AdamW)(groups, lr=settings.learning_rate, betas=(first, second), fused=fused)


def muon(parts: Parts, settings: Settings, device: torch.device, dtype: torch.dtype) -> Muon:
    """Muon for the matrices of the blocks, AdamW for all other parameters."""
    groups = [
        {
            "params": [one for one, joined in parts.items() if joined == number],
            "weight_decay": settings.weight_decay,
            PARTS: number,
        }
        for number in sorted(set(parts.values()) - {0})
    ]
    others = {one: 0 for one, joined in parts.items() if not joined}
    return Muon(adamw(others, settings, device, dtype), groups, device, dtype)


OPTIMIZERS: dict[str, Kind] = {
    "adamw": Kind(adamw, keeps=("exp_avg", "exp_avg_sq")),
    "muon": Kind(muon, keeps=("exp_avg", "exp_avg_sq"), of_matrices=(MOMENTUM_BUFFER,)),
}
"""By `optim.name`."""


def decayed_groups(parts: Parts, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay; biases and norms, which are vectors, do not."""
    return [
        {"params": [p for p in parts if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parts if p.dim() < 2], "weight_decay": 0.0},
    ]
