"""The optimizers by name: how each is built, and what it keeps of a parameter.

A new one is a function here and its name in `OPTIMIZERS`. The configuration takes the name from
there; the snapshots and the planner ask the optimizer itself what it keeps (`kept_by`).
"""

from __future__ import annotations

import copy
import math
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

Parts = Mapping[nn.Parameter, int]
"""The trained parameters. By parameter: how many matrices of a block it joins by rows; 0 for all
that is no such matrix, as embeddings, the output layer, biases and norms."""
Kept = dict[str, tuple[int, ...]]
"""What an optimizer keeps of one parameter: the shapes by name."""
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
class UsualSettings:
    """The settings with which a snapshot's reader asks an optimizer what it keeps."""

    learning_rate: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.99)


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
are."""


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
UPDATES = 7
"""Updates of a tiny parameter that must be the same after a resume: more than the usual period of
slow weights."""


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


def _tiny(
    name: str, joined: int, dimensions: int, settings: Settings
) -> tuple[nn.Parameter, Optimizer]:
    """A parameter of a kind, of ones, and its optimizer, which is built before there are any.

    Raises OptimizerError for one that needs the values of the weights when it is built.
    """
    shape = torch.Size((TINY[0] * max(1, joined), *TINY[1:])[:dimensions])
    parameter = nn.Parameter(torch.full(shape, math.nan, device=CPU))
    try:
        optimizer = OPTIMIZERS[name]({parameter: joined}, settings, Work(CPU))
    except AttributeError as error:
        if error.obj is not settings:
            raise
        raise OptimizerError(
            f"reads the setting {error.name!r}, which {type(settings).__name__} lacks: add it to "
            "OptimConfig in config/schema.py, and to Settings and UsualSettings in "
            "optim/optimizers.py"
        ) from error
    for key, value in optimizer.state.get(parameter, {}).items():
        if isinstance(value, Tensor) and value.isnan().any():
            raise OptimizerError(
                f"keeps {key!r} from the weights when it is built, when they have no values yet: "
                "make it in its first update"
            )
    parameter.data.fill_(1.0)
    return parameter, optimizer


def _update(optimizer: Optimizer) -> None:
    """An update. Raises OptimizerError where it fails."""
    try:
        optimizer.step()
    except Exception as error:  # each optimizer raises its own types
        raise OptimizerError(f"cannot update a parameter: {error}") from error


def _group_values(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The entries of each group but its parameters, and its rate, which the run sets."""
    out = ("params", "lr")
    return [{k: v for k, v in group.items() if k not in out} for group in optimizer.param_groups]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)


def _kept_of_kind(name: Any, joined: int, dimensions: int, settings: Settings) -> dict[str, bool]:
    """What is kept, by name: True for one number per weight, False for one per parameter."""
    if not isinstance(name, str) or name not in OPTIMIZERS:
        raise OptimizerError(f"is not {' or '.join(OPTIMIZERS)}")
    parameter, optimizer = _tiny(name, joined, dimensions, settings)
    shape = parameter.shape
    parameter.grad = torch.ones_like(parameter)
    before = copy.deepcopy(_group_values(optimizer))
    _update(optimizer)
    for old, new in zip(before, _group_values(optimizer), strict=True):
        for key, value in new.items():
            if key not in old or not _same(old[key], value):
                raise OptimizerError(
                    f"keeps {key!r} in its groups, which no snapshot holds: keep it as a float32 "
                    "tensor of each parameter"
                )
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


def _refuse_lost_state(name: str, joined: int, dimensions: int, settings: Settings) -> None:
    """Raise OptimizerError unless a run that resumes makes the updates of an undisturbed one.

    One optimizer updates a tiny parameter; another is built anew before each update, as a resume
    does it, and has nothing but the weights and what was kept of the parameter.
    """
    of_kind = name, joined, dimensions, settings
    generator, drawn = torch.Generator().manual_seed(0), torch.get_rng_state()
    (whole, optimizer), (weights, resumed) = _tiny(*of_kind), _tiny(*of_kind)
    first: set[str] = set()
    try:
        for number in range(1, UPDATES + 1):
            gradient = torch.randn(whole.shape, generator=generator)
            for parameter, its in ((whole, optimizer), (weights, resumed)):
                torch.default_generator.manual_seed(number)  # as the run does before each step
                parameter.grad = gradient.clone()
                for group in its.param_groups:
                    group["lr"] = number * 1e-3
                _update(its)
            kept = resumed.state[weights]
            first = first or {*kept}
            if later := sorted({*optimizer.state[whole]} ^ first):
                raise OptimizerError(
                    f"keeps {later[0]!r} of a parameter after some of its updates only, but "
                    "snapshots hold what it keeps after the first: make it there, and keep it"
                )
            if not whole.view(torch.int32).equal(weights.view(torch.int32)):
                raise OptimizerError(
                    f"computes another update {number} after a resume, which brings back weights "
                    "and state alone: keep what it needs, such as a count of updates, as a float32 "
                    "tensor of each parameter in its state"
                )
            before = weights
            weights, resumed = _tiny(*of_kind)
            weights.data.copy_(before)
            resumed.state[weights] = {key: value.clone() for key, value in kept.items()}
    finally:
        torch.set_rng_state(drawn)


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
    try:
        for kind in KINDS[:2]:  # Muon and the like treat them apart
            _refuse_lost_state(name, *kind, settings)
    except OptimizerError as error:
        return str(error)
    return None


def moments_of(name: str) -> int:
    """Numbers that an optimizer keeps per weight of a block's matrix."""
    return sum(_kept_of_kind(name, 1, 2, USUAL).values())
