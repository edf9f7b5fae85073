"""The optimizers by name: how each is built, and what it keeps of a parameter.

A new one is a function here and its name in `OPTIMIZERS`. The configuration takes the name from
there; the snapshots and the planner ask the optimizer itself what it keeps (`kept_by`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from model.sharded import whole_shape
from optim.eager import eager
from optim.muon import PARTS, Muon
from optim.sharing import Work
from optim.state_dtype import FLOAT32, STEP, ReducedState

Parts = Mapping[nn.Parameter, int]
"""The trained parameters. By parameter: how many matrices of a block it joins by rows; 0 for all
that is no such matrix, as embeddings, the output layer, biases and norms."""
Kept = dict[str, tuple[int, ...]]
"""What an optimizer keeps of one parameter: the shapes by name."""


class Settings(Protocol):
    """The keys of `optim` that an optimizer is built from."""

    @property
    def learning_rate(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def betas(self) -> Sequence[float]: ...
    @property
    def state_dtype(self) -> str: ...


@dataclass(frozen=True)
class UsualSettings:
    """The settings with which a snapshot's reader asks an optimizer what it keeps."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)
    state_dtype: str = FLOAT32


class OptimizerError(ValueError):
    """An optimizer whose state a snapshot cannot hold: what follows optim.name in a sentence."""


def adamw(parts: Parts, settings: Settings, work: Work) -> AdamW:
    """AdamW (Loshchilov & Hutter, 2019) in one fused kernel, where torch has it for the device."""
    first, second = settings.betas
    fused = work.device.type in ("cpu", "cuda", "xpu", "mps")
    groups = decayed_groups(parts, settings.weight_decay)
    # Bare AdamW would import torch's compiler, which takes a second at every start.
    return eager(AdamW)(groups, lr=settings.learning_rate, betas=(first, second), fused=fused)


def muon(parts: Parts, settings: Settings, work: Work) -> Muon:
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
    return Muon(adamw(others, settings, work), groups, work)


OPTIMIZERS: dict[str, Callable[[Parts, Settings, Work], Optimizer]] = {
    "adamw": adamw,
    "muon": muon,
}
"""Builders by `optim.name`. Each gets the parameters, the keys of `optim`, and where and with
which processes to compute."""


TOGETHER = ("muon",)
"""Those whose processes compute the update of a matrix together, from all of it, wherever its parts
are. `optim.state_dtype` is not for them."""


def build(name: str, parts: Parts, settings: Settings, work: Work) -> Optimizer:
    """The optimizer of this name, which keeps its state in `settings.state_dtype`."""
    optimizer = OPTIMIZERS[name](parts, settings, work)
    if settings.state_dtype == FLOAT32:
        return optimizer
    return ReducedState(optimizer, settings.state_dtype)


def decayed_groups(parts: Parts, weight_decay: float) -> list[dict[str, Any]]:
    """Two groups: matrices and embeddings decay; biases and norms, which are vectors, do not."""
    return [
        {"params": [p for p in parts if p.dim() >= 2], "weight_decay": weight_decay},
        {"params": [p for p in parts if p.dim() < 2], "weight_decay": 0.0},
    ]


USUAL = UsualSettings()
CPU = torch.device("cpu")
TINY = (2, 3, 4, 5)
"""The sizes of the parameters that an optimizer is asked with, by dimension."""
KINDS = ((1, 2), (0, 2), (0, 1), (0, 3))
"""The kinds of parameters that models have: matrices of a block, other matrices, vectors, experts.
By kind, how many matrices one joins, and its dimensions."""


def kept_by(name: Any, parts: Parts, settings: Settings = USUAL) -> dict[nn.Parameter, Kept]:
    """What an optimizer keeps of each parameter after its first update.

    It is asked: it updates a tiny parameter of each kind. So no list of names by optimizer is
    needed, and it costs a millisecond at any size of the model.

    Raises OptimizerError for an unknown name, and for what a snapshot cannot hold.
    """
    kinds = {(joined, parameter.dim()) for parameter, joined in parts.items()}
    kept = {kind: _kept_of_kind(name, *kind, settings) for kind in kinds}
    return {
        one: {key: whole_shape(one) if each else () for key, each in kept[n, one.dim()].items()}
        for one, n in parts.items()
    }


def _kept_of_kind(name: Any, joined: int, dimensions: int, settings: Settings) -> dict[str, bool]:
    """What is kept, by name: True for one number per weight, False for one per parameter."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise OptimizerError(f"is not {' or '.join(OPTIMIZERS)}")
    shape = torch.Size((TINY[0] * max(1, joined), *TINY[1:])[:dimensions])
    parameter = nn.Parameter(torch.ones(shape, device=CPU))
    parameter.grad = torch.ones_like(parameter)
    optimizer = OPTIMIZERS[name]({parameter: joined}, settings, Work(CPU))
    try:
        optimizer.step()
    except Exception as error:  # each optimizer raises its own types
        raise OptimizerError(f"cannot update a parameter: {error}") from error
    found = {}
    for key, value in optimizer.state[parameter].items():
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            what = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise OptimizerError(
                f"keeps {key!r} of a parameter as {what}, but snapshots hold only float32 tensors"
            )
        if value.shape not in (shape, ()):
            raise OptimizerError(
                f"keeps {key!r} in the shape {list(value.shape)} of a parameter in the shape "
                f"{list(shape)}, but a snapshot holds one number for each weight, or one for all"
            )
        found[key] = value.shape == shape and key != STEP
    return found


def updates_parts(name: str, settings: Settings) -> bool:
    """Whether it updates each part of a matrix as it does within the whole. It is asked."""
    generator = torch.Generator().manual_seed(0)
    matrix, gradient = (torch.randn(4, 6, generator=generator) for _ in range(2))
    in_whole, in_parts = torch.empty_like(matrix), torch.empty_like(matrix)
    for updated, rows, columns in ((in_whole, 4, 6), (in_parts, 2, 3)):
        for row in range(0, 4, rows):
            for column in range(0, 6, columns):
                part = slice(row, row + rows), slice(column, column + columns)
                parameter = nn.Parameter(matrix[part].clone())
                parameter.grad = gradient[part].clone()
                OPTIMIZERS[name]({parameter: 1}, settings, Work(CPU)).step()
                updated[part] = parameter.detach()
    return torch.allclose(in_whole, in_parts)


def refusal(name: str, settings: Settings) -> str | None:
    """Why no run with this optimizer could be resumed: the rest of a sentence; None where it can.

    What it will keep with its settings must be what a snapshot's reader expects.
    """
    for kind in KINDS:
        try:
            kept, expected = (_kept_of_kind(name, *kind, one) for one in (settings, USUAL))
        except OptimizerError as error:
            return str(error)
        if kept != expected:
            keeps, reads = (" and ".join(one) or "nothing" for one in (kept, expected))
            return (
                f"keeps {keeps} of a parameter with these optim.* values, but resuming from a "
                f"snapshot expects {reads}"
            )
    return None


def is_reducible(name: str) -> bool:
    """Whether `optim.state_dtype` is for this optimizer."""
    return name not in TOGETHER and STEP in _kept_of_kind(name, 1, 2, USUAL)


def moments_of(name: str) -> int:
    """Numbers that an optimizer keeps per weight of a block's matrix."""
    return sum(_kept_of_kind(name, 1, 2, USUAL).values())
