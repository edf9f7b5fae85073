"""Muon: orthogonalized updates for the matrices of the blocks, AdamW for all other parameters.

Letters in shapes: N matrices of one shape, R rows, C columns.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from model.sharded import cut_of, local_part, whole_shape
from optim.eager import EagerOptimizer
from optim.sharing import Grid, Work, all_gather, all_to_all, grid_of, overlapped, owners

MOMENTUM = 0.95
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the polynomial that moves all singular values to about 1 (Jordan et al., 2024).
"""
ITERATIONS = 4
"""Five, as usual, are no better: benchmarks/RESULTS.md, "Schedules and Muon"."""
ADAMW_RMS = 0.2
"""The usual root mean square of AdamW's updates, to which Muon's are scaled (Liu et al., 2025)."""
STACKED = 1 << 22
"""Numbers of small matrices that a process orthogonalizes at once: one by one is slower."""
MOMENTUM_BUFFER = "momentum_buffer"
"""The name of what is kept of a matrix, as torch has it."""
PARTS = "parts"
"""The entry of a Muon group: how many matrices each of its parameters joins by rows."""


@dataclass(frozen=True, eq=False)
class Matrix:
    """One of the matrices that a parameter joins by rows, (R, C)."""

    parameter: nn.Parameter
    group: dict[str, Any]
    """The parameter's group."""
    part: int

    @property
    def shape(self) -> tuple[int, int]:
        """R and C."""
        rows, columns = whole_shape(self.parameter)
        return rows // self.group[PARTS], columns

    @property
    def flop(self) -> int:
        """Floating-point operations to orthogonalize it."""
        less, more = sorted(self.shape)
        return ITERATIONS * (4 * less * less * more + 2 * less**3)

    def place_in(self, grid: Grid, holder: int) -> Place:
        """What a holder has of it."""
        shard, part = divmod(holder, grid.parts)
        rows, columns = self.shape
        cut, first, across = cut_of(self.parameter), 0, slice(0, columns)
        if cut is not None and cut.dim == 0:
            of_part = cut.ranges(part)[self.part]
            first, rows = of_part.start - self.part * rows, of_part.stop - of_part.start
        elif cut is not None and cut.dim == 1:
            (across,) = cut.ranges(part)
        begin = self.part * rows  # among the rows that FSDP shards
        held = grid.rows_of(shard, rows * self.group[PARTS])
        low, high = (min(max(row, held.start), held.stop) for row in (begin, begin + rows))
        return Place(
            slice(low - held.start, high - held.start),
            slice(first + low - begin, first + high - begin),
            across,
        )


class Place(NamedTuple):
    """What a process has of a matrix."""

    local: slice
    """Its rows, as rows of what the process has of the parameter."""
    rows: slice
    columns: slice

    @property
    def numel(self) -> int:
        """Its numbers."""
        return (self.rows.stop - self.rows.start) * (self.columns.stop - self.columns.start)


class Muon(EagerOptimizer):
    """Muon for the groups that have `parts`, AdamW for the others, with one learning rate for both.

    The updates of Muon are those of torch.optim.Muon with Nesterov's momentum, `ITERATIONS` and
    `adjust_lr_fn="match_rms_adamw"`, for each of the joined matrices by itself. They are computed
    on the device and in the dtype of `work`. Its processes share the matrices: each orthogonalizes
    its own and sends them to the others, so all have the same bits. Parameters may be sharded.
    """

    def __init__(self, adamw: AdamW, matrices: list[dict[str, Any]], work: Work) -> None:
        self._adamw, self._work = adamw, work
        self._grid: Grid | None = None
        super().__init__([*adamw.param_groups, *matrices], {"lr": adamw.defaults["lr"]})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient. A closure is not supported.

        Every process must call this.
        """
        assert closure is None
        # accelerate replaces groups and state when it prepares the optimizer.
        self._adamw.param_groups = [group for group in self.param_groups if PARTS not in group]
        self._adamw.state = self.state
        self._adamw.step()
        matrices = []
        for group in self.param_groups:
            for parameter in group["params"] if PARTS in group else ():
                if parameter.grad is not None:
                    self._add_to_momentum(parameter, parameter.grad)
                    matrices += [Matrix(parameter, group, part) for part in range(group[PARTS])]
        if matrices:
            if self._grid is None:  # all are sharded alike
                self._grid = grid_of(matrices[0].parameter, self._work.group)
            grid = self._grid
            overlapped(self._update(batch, grid) for batch in batches(matrices, grid.processes))

    def _add_to_momentum(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        state = self.state[parameter]
        if MOMENTUM_BUFFER not in state:
            state[MOMENTUM_BUFFER] = torch.zeros_like(parameter)
        local_part(state[MOMENTUM_BUFFER]).lerp_(local_part(gradient), 1 - MOMENTUM)

    def _update(self, batch: Batch, grid: Grid) -> Iterator[None]:
        """Update matrices of one shape. It yields where it has begun an exchange."""
        copies = grid.by_copy(batch)
        copy = copies[grid.copy]
        own = copy[grid.holder]
        places = [[one.place_in(grid, holder) for one in own] for holder in range(grid.holders)]
        there = [sum(place.numel for place in each) for each in places]
        here = [numel_here(of_owner, grid) for of_owner in copy]
        flat = self._mixed([one for of_owner in copy for one in of_owner], sum(here), grid)
        # An empty exchange is one as well: batches of all processes advance in step.
        if grid.within is not None:  # the owners get what each holder has
            exchange = all_to_all(flat, here, there, grid.within)
            del flat
            yield
            flat = put_together(exchange.wait(), places, own)
        if own:
            flat = orthogonalized(flat.view(len(own), *own[0].shape)).reshape(-1)
        if grid.within is not None:  # and send it back to each
            exchange = all_to_all(taken_apart(flat, places, own), there, here, grid.within)
            del flat
            yield
            flat = exchange.wait()
        directions = [flat]
        if grid.across is not None:
            most = max(sum(numel_here(of_owner, grid) for of_owner in each) for each in copies)
            if flat.numel() < most:
                flat = torch.cat((flat, flat.new_zeros(most - flat.numel())))
            exchange = all_gather(flat, grid.across)
            del flat, directions
            yield
            directions = list(exchange.wait())
        for of_copy, each in zip(directions, copies, strict=True):
            _apply([one for of_owner in each for one in of_owner], of_copy, grid)

    def _mixed(self, matrices: list[Matrix], size: int, grid: Grid) -> Tensor:
        """This process's rows of the updates before they are orthogonalized, one after another."""
        flat = torch.empty(size, dtype=self._work.dtype, device=self._work.device)
        begin = 0
        for one in matrices:
            place = one.place_in(grid, grid.holder)
            end = begin + place.numel
            assert one.parameter.grad is not None
            gradient = local_part(one.parameter.grad)[place.local]
            momentum = local_part(self.state[one.parameter][MOMENTUM_BUFFER])[place.local]
            flat[begin:end].view(gradient.shape).copy_(gradient.lerp(momentum, MOMENTUM))
            begin = end
        return flat


Batch = list[list[Matrix]]
"""Matrices of one shape, by the process that orthogonalizes them at once."""


def batches(matrices: Sequence[Matrix], processes: int) -> Iterator[Batch]:
    """The matrices of each shape, in batches, shared so that all processes compute as much."""
    alike: dict[tuple[int, int], list[Matrix]] = {}
    for one in matrices:
        alike.setdefault(one.shape, []).append(one)
    # Those of one shape follow one another, so that their owners differ.
    of_owner = iter(owners([one.flop for each in alike.values() for one in each], processes))
    for (rows, columns), each in alike.items():
        by_owner: Batch = [[] for _ in range(processes)]
        for one in each:
            by_owner[next(of_owner)].append(one)
        at_once = max(1, STACKED // (rows * columns))
        for begin in range(0, max(map(len, by_owner)), at_once):
            yield [own[begin : begin + at_once] for own in by_owner]


def numel_here(matrices: list[Matrix], grid: Grid) -> int:
    """The numbers that this process has of some matrices."""
    return sum(one.place_in(grid, grid.holder).numel for one in matrices)


def put_together(received: Tensor, places: list[list[Place]], own: list[Matrix]) -> Tensor:
    """Whole matrices, (N * R * C), from what every holder has of them, one after the other."""
    if not own:
        return received
    whole = received.new_empty(len(own), *own[0].shape)
    pieces = iter(received.split([place.numel for each in places for place in each]))
    for each in places:
        for matrix, (_, rows, columns) in zip(whole, each, strict=True):
            at = matrix[rows, columns]
            at.copy_(next(pieces).view(at.shape))
    return whole.view(-1)


def taken_apart(flat: Tensor, places: list[list[Place]], own: list[Matrix]) -> Tensor:
    """The reverse of `put_together`."""
    if not own:
        return flat
    whole = flat.view(len(own), *own[0].shape)
    return torch.cat(
        [
            matrix[rows, columns].flatten()
            for each in places
            for matrix, (_, rows, columns) in zip(whole, each, strict=True)
        ]
    )


def _apply(matrices: list[Matrix], directions: Tensor, grid: Grid) -> None:
    """Update this process's rows of matrices, from directions that follow one another."""
    begin = 0
    for one in matrices:
        weight = local_part(one.parameter)[one.place_in(grid, grid.holder).local]
        end = begin + weight.numel()
        direction = directions[begin:end].view(weight.shape).to(weight.device)
        rate = one.group["lr"] * ADAMW_RMS * math.sqrt(max(one.shape))
        weight.mul_(1 - one.group["lr"] * one.group["weight_decay"])
        weight.add_(direction, alpha=-rate)
        begin = end


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
